"""One turn of an engine in a process of its own: what is loaded, decoded, checked, and only then timed.

Nothing here imports torch unless the reference takes its turn: the memory and the idle threads would be ours.
"""

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fatdeploy
from benchmarks.harness.decoders import (
    IMPORTED,
    Decoder,
    EngineName,
    Translating,
    bundle_decoder,
    plain_decoder,
    reference_decoder,
    repeated,
    timed_steps,
)
from benchmarks.harness.measuring import Phases, code_digest
from benchmarks.harness.memory_alone import resident_bytes
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.proof.probes import Probe, read_probes
from fatdeploy.spec import Tokens

Part = Literal["greedy", "positions", "memory", "export"]

# What is computed without quantization, by our name and by CTranslate2's.
FP32, FLOAT32 = EXACT = "fp32", "float32"
FOLDERS: dict[EngineName, str] = {"fatdeploy": "bundle", "ctranslate2": "ctranslate2", "plain": "growing-caches"}
NEIGHBOURS = 4  # steps on either side of a position that are timed with it


@dataclass(frozen=True)
class Cache:
    """Where a preset's bundle, CTranslate2 model and sources are; other exporting code has another folder."""

    root: Path
    preset: str

    @property
    def folder(self) -> Path:
        return self.root / f"{self.preset}-{code_digest('fatdeploy', 'export')}"

    @property
    def bundle(self) -> Path:
        return self.model("fatdeploy")

    @property
    def ctranslate2(self) -> Path:
        return self.model("ctranslate2")

    def model(self, engine: EngineName, precision: str = FP32) -> Path:
        """Return the folder that an engine loads; the reference loads none."""
        return self.folder / (FOLDERS[engine] if precision in EXACT else f"{FOLDERS[engine]}-{precision}")

    def probe(self, batch: int, source: int, target: int) -> Path:
        """Sources and the reference's greedy tokens."""
        return self.folder / f"greedy-{batch}-{source}-{target}.npz"

    def beams(self, batch: int, beams: int, source: int, target: int) -> Path:
        """Sources and the reference's best targets, of one step and of all."""
        return self.folder / f"beams-{batch}-{beams}-{source}-{target}.npz"

    def forced(self, batch: int, source: int, target: int) -> Path:
        """Sources, the tokens that are read, and those that the reference would say after each."""
        return self.folder / f"forced-{batch}-{source}-{target}.npz"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What all turns of a run have in common."""

    cache: str
    source: int
    target: int
    repetitions: int
    positions: tuple[int, int] = (10, 400)  # of the part of that name

    @property
    def forced_steps(self) -> int:
        """How many steps are decoded to time those around the later position."""
        return max(self.positions) + NEIGHBOURS + 1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Which engine decodes, and how."""

    preset: str
    engine: EngineName
    precision: str = FP32  # by the engine's own name for it
    batch: int
    threads: int
    workers: int = 1  # of CTranslate2: the batch is split over them

    def model(self, cache: Cache) -> Path | None:
        """Return the folder that is loaded, if any is."""
        return cache.model(self.engine, self.precision) if self.engine in FOLDERS else None


@dataclass(frozen=True, kw_only=True)
class Turn(Setting):
    """Which engine does what, in which setting."""

    part: Part


def greedy(turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """Return seconds to load, and the phases of each repetition."""
    cache = Cache(Path(sizes.cache), turn.preset)
    [probe] = read_probes(cache.probe(turn.batch, sizes.source, sizes.target))
    folder = turn.model(cache)
    importlib.import_module(IMPORTED[turn.engine])
    started = time.perf_counter()
    decoder = loaded_decoder(turn, folder, probe)
    loaded = time.perf_counter()
    for target in (sizes.target, 1):
        _checked(decoder, probe, target)
    phases = repeated(lambda target: _checked(decoder, probe, target), sizes.target, sizes.repetitions)
    # Drawing weights is not loading them.
    load = None if turn.engine == "reference" else loaded - started
    return {"load": load, "phases": phases}


def _checked(decoder: Decoder, probe: Probe, target: int) -> Phases:
    phases, tokens = decoder.decoded(target)
    if not np.array_equal(tokens, probe.tokens[:, :target]):
        raise SystemExit("the tokens are not those of the reference: no time was recorded")
    return phases


def loaded_decoder(setting: Setting, folder: Path | None, probe: Probe) -> Decoder:
    """Return an engine that has loaded its model."""
    if folder is None:
        return reference_decoder(setting.preset, probe, setting.threads)
    if setting.engine == "ctranslate2":
        chosen = {"threads": setting.threads, "workers": setting.workers, "compute_type": setting.precision}
        return Translating(folder, probe, **chosen)
    return (plain_decoder if setting.engine == "plain" else bundle_decoder)(folder, probe, setting.threads)


def positions(turn: Turn, sizes: Sizes) -> list[Phases]:
    """Return seconds of single steps around an early and a late position, with their neighbours."""
    cache = Cache(Path(sizes.cache), turn.preset)
    engine = OrtEngine(read_bundle(cache.bundle), threads=turn.threads)
    with np.load(cache.forced(turn.batch, sizes.source, sizes.forced_steps)) as file:
        source, read, tokens = file["source"], file["read"], file["tokens"]
    runs = [_step_times(engine, source, read, tokens) for _ in range(1 + sizes.repetitions)][1:]
    return [
        {f"position_{position}": float(times[position + offset]) for position in sizes.positions}
        for times in runs
        for offset in range(-NEIGHBOURS, NEIGHBOURS + 1)
    ]


def _step_times(engine: OrtEngine, source: Tokens, read: Tokens, expected: Tokens) -> np.ndarray:
    """Return seconds of each step on tokens that are given: which ones it reads may change what a step costs."""
    times, found = timed_steps(engine, source, np.ones_like(source, bool), read)
    if not np.array_equal(found, expected):
        raise SystemExit("the tokens are not those of the reference: no time was recorded")
    return times


def memory(turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """Return what a process holds after it loaded a bundle, and after its first decode."""
    cache = Cache(Path(sizes.cache), turn.preset)
    [probe] = read_probes(cache.probe(turn.batch, sizes.source, sizes.target))
    importlib.import_module("onnxruntime")
    imported = resident_bytes()
    model = fatdeploy.load(cache.bundle, threads=turn.threads)
    loaded = resident_bytes()
    sources = [row[real] for row, real in zip(probe.source, probe.mask, strict=True)]
    found = model.generate(sources, fatdeploy.DecodeOptions(max_new_tokens=sizes.target))
    decoded = resident_bytes()
    for row, one in zip(probe.tokens.tolist(), found, strict=True):
        if list(one.tokens) != row[: len(one.tokens)]:
            raise SystemExit("the tokens are not those of the reference: no memory was recorded")
    weights = model.bundle.file(WEIGHTS).stat().st_size
    return {
        "after_import_bytes": imported,
        "after_load_bytes": loaded,
        "after_decode_bytes": decoded,
        "weights_bytes": weights,
    }


def export(turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """Return seconds of one export, from a model in memory to a certified bundle, which is not kept."""
    import torch

    from fatdeploy.export.pipeline import Origin, write_bundle
    from fatdeploy.export.reference.weights import model_from_preset

    torch.set_num_threads(turn.threads)
    model = model_from_preset(turn.preset)
    with tempfile.TemporaryDirectory(dir=sizes.cache) as folder:
        started = time.perf_counter()
        write_bundle(model, Path(folder) / "bundle", origin=Origin(name=turn.preset))
        return {"seconds": time.perf_counter() - started}


PARTS: dict[Part, Callable[[Turn, Sizes], Any]] = {
    "greedy": greedy,
    "positions": positions,
    "memory": memory,
    "export": export,
}


def main() -> None:
    """Do the turn that the argument describes, and print its result."""
    described = json.loads(sys.argv[1])
    turn, sizes = Turn(**described["turn"]), Sizes(**described["sizes"])
    print(json.dumps(PARTS[turn.part](turn, sizes)))


if __name__ == "__main__":
    main()
