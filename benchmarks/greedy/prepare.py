"""Write what the turns of ``greedy`` read, unless it exists: bundles, CTranslate2 models, sources and inputs."""

import json
import sys
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.greedy.turns import GreedySizes
from benchmarks.harness.prepare import prepare_probes, prepared_model, write_arrays
from benchmarks.peers.ctranslate2_model import prepare_ctranslate2_model
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS
from fatdeploy.spec import Tokens

ATTEMPTS = 100  # per forced row


def prepare_greedy(preset: str, batches: Sequence[int], sizes: GreedySizes) -> None:
    """Write the bundle, the CTranslate2 model, and for each batch sources with the reference's tokens."""
    models = sizes.models(preset)
    model = prepared_model(models)
    prepare_ctranslate2_model(model, models.ctranslate2)
    prepare_probes(models, model, batches, sizes)


def prepare_positions(preset: str, batches: Sequence[int], sizes: GreedySizes) -> None:
    """Write the bundle, and for each batch sources and the input of every step."""
    models = sizes.models(preset)
    model = prepared_model(models)
    for batch in batches:
        path = models.forced(batch, sizes.source, sizes.forced_steps)
        if not path.exists():
            draw = np.random.default_rng(batch)
            rows = [forced_row(model, sizes.source, sizes.forced_steps, draw) for _ in range(batch)]
            source, inputs, tokens = (np.stack(arrays) for arrays in zip(*rows, strict=True))
            write_arrays(path, source=source, read=inputs, tokens=tokens)


def forced_row(model: ReferenceModel, length: int, steps: int, draw: np.random.Generator) -> tuple[Tokens, ...]:
    """Return a source [S], inputs [T], and the reference's choice after each, nowhere by a narrow margin.

    No input lets a hybrid step skip its cross-attention, so that the two positions do the same work.
    """
    ids = np.arange(1 + max(model.config.pad_id, model.config.bos_id, model.config.eos_id), model.config.vocab_size)
    input_ids = ids[model.keep.numpy()[ids]] if model.config.hybrid else ids
    for _ in range(ATTEMPTS):
        source, inputs = draw.choice(ids, length), draw.choice(input_ids, steps)
        inputs[0] = model.config.bos_id
        with torch.inference_mode():
            logits = model(*(torch.from_numpy(array[None]) for array in (source, np.ones(length, bool), inputs)))[0]
        best = logits.topk(2)
        margin = float((best.values[:, 0] - best.values[:, 1]).min())
        if margin >= SAFE_MARGINS * NOISE * max(1.0, float(logits.abs().max())):
            return source, inputs, best.indices[:, 0].numpy()
    raise SystemExit(f"none of {ATTEMPTS} random targets is decided by safe margins for {steps} steps")


def main() -> None:
    """Prepare what the argument describes."""
    described = json.loads(sys.argv[1])
    sizes = GreedySizes(**described["sizes"])
    for preset, batches in described["greedy"].items():
        prepare_greedy(preset, batches, sizes)
    for preset, batches in described["positions"].items():
        prepare_positions(preset, batches, sizes)
    print("null")


if __name__ == "__main__":
    main()
