"""Write what turns read, where it is not there yet: bundles, CTranslate2 models, sources."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.turns import Cache, Sizes
from benchmarks.peers.ctranslate2_model import write_ctranslate2_model
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.proof.certify import drawn_probe
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS
from fatdeploy.runtimes.proof.probes import write_probes
from fatdeploy.spec import Tokens

ATTEMPTS = 100  # of a forced row


def prepare_greedy(preset: str, batches: list[int], sizes: Sizes) -> None:
    """Write the bundle, the CTranslate2 model, and for each batch sources with the reference's tokens."""
    cache = Cache(Path(sizes.cache), preset)
    model = prepared_model(cache)
    if not cache.ctranslate2.exists():
        write_ctranslate2_model(model, cache.ctranslate2)
    prepare_probes(cache, model, batches, sizes)


def prepare_probes(cache: Cache, model: ReferenceModel, batches: list[int], sizes: Sizes) -> None:
    """Write for each batch sources with the reference's tokens."""
    cache.folder.mkdir(parents=True, exist_ok=True)
    for batch in batches:
        path = cache.probe(batch, sizes.source, sizes.target)
        if not path.exists():
            probe = drawn_probe(EagerEngine(model), [sizes.source] * batch, sizes.target, seed=batch)
            write_probes(new := path.with_suffix(".new.npz"), [probe])
            new.replace(path)


def prepare_positions(preset: str, batches: list[int], sizes: Sizes) -> None:
    """Write the bundle, and for each batch sources and the tokens that every step is to read."""
    cache = Cache(Path(sizes.cache), preset)
    model = prepared_model(cache)
    for batch in batches:
        path = cache.forced(batch, sizes.source, sizes.forced_steps)
        if not path.exists():
            draw = np.random.default_rng(batch)
            rows = [forced_row(model, sizes.source, sizes.forced_steps, draw) for _ in range(batch)]
            source, read, tokens = (np.stack(arrays) for arrays in zip(*rows, strict=True))
            np.savez(new := path.with_suffix(".new.npz"), source=source, read=read, tokens=tokens)
            new.replace(path)


def prepared_model(cache: Cache) -> ReferenceModel:
    """Return a preset, its bundle written."""
    model = model_from_preset(cache.preset)
    if not cache.bundle.exists():
        write_bundle(model, cache.bundle, origin=Origin(name=cache.preset))
    return model


def forced_row(model: ReferenceModel, length: int, steps: int, draw: np.random.Generator) -> tuple[Tokens, ...]:
    """Return a source [S], tokens to read [T], and what the reference says after each, nowhere by a narrow margin.

    No token that is read lets a hybrid step skip its cross-attention: two positions are compared by the same work.
    """
    ids = np.arange(1 + max(model.config.pad_id, model.config.bos_id, model.config.eos_id), model.config.vocab_size)
    read_ids = ids[model.keep.numpy()[ids]] if model.config.hybrid else ids
    for _ in range(ATTEMPTS):
        source, read = draw.choice(ids, length), draw.choice(read_ids, steps)
        read[0] = model.config.bos_id
        with torch.inference_mode():
            logits = model(*(torch.from_numpy(array[None]) for array in (source, np.ones(length, bool), read)))[0]
        best = logits.topk(2)
        margin = float((best.values[:, 0] - best.values[:, 1]).min())
        if margin >= SAFE_MARGINS * NOISE * max(1.0, float(logits.abs().max())):
            return source, read, best.indices[:, 0].numpy()
    raise SystemExit(f"none of {ATTEMPTS} random targets is decided by safe margins for {steps} steps")


def main() -> None:
    """Prepare what the argument describes."""
    described = json.loads(sys.argv[1])
    for preset in described.get("bundles", ()):
        prepared_model(Cache(Path(described["cache"]), preset))
    if "sizes" in described:
        prepare_engines(described)
    print("null")


def prepare_engines(described: dict[str, Any]) -> None:
    """Prepare what ``greedy`` compares."""
    sizes = Sizes(**described["sizes"])
    for preset, batches in described["greedy"].items():
        prepare_greedy(preset, batches, sizes)
    for preset, batches in described["positions"].items():
        prepare_positions(preset, batches, sizes)


if __name__ == "__main__":
    main()
