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
from benchmarks.measuring import Phases, code_digest, timed_decode
from fatdeploy.bundle import WEIGHTS, read_bundle
from fatdeploy.runtimes.engine import Capacity, Want
from fatdeploy.runtimes.ort import OrtEngine
from fatdeploy.runtimes.verify import Probe, read_probes
from fatdeploy.spec import Tokens

Part = Literal["greedy", "positions", "memory", "export"]
EngineName = Literal["fatdeploy", "ctranslate2", "reference"]
# Decodes a number of steps; returns its phases, and the tokens [B, T].
Decoder = Callable[[int], tuple[Phases, Tokens]]

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
        return self.folder / "bundle"

    @property
    def ctranslate2(self) -> Path:
        return self.folder / "ctranslate2"

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
    positions: tuple[int, int]

    @property
    def forced_steps(self) -> int:
        """How many steps are decoded to time those around the later position."""
        return max(self.positions) + NEIGHBOURS + 1


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Which engine does what, in which setting."""

    part: Part
    preset: str
    engine: EngineName
    batch: int
    threads: int
    workers: int = 1  # of CTranslate2: the batch is split over them


def greedy(turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """Return seconds to load, and the phases of each repetition."""
    cache = Cache(Path(sizes.cache), turn.preset)
    [probe] = read_probes(cache.probe(turn.batch, sizes.source, sizes.target))
    importlib.import_module(IMPORTED[turn.engine])
    started = time.perf_counter()
    decoder = DECODERS[turn.engine](turn, cache, probe)
    loaded = time.perf_counter()
    _checked(decoder, probe, sizes.target)
    _checked(decoder, probe, 1)
    found = []
    for _ in range(sizes.repetitions):
        phases, short = _checked(decoder, probe, sizes.target), _checked(decoder, probe, 1)
        found.append({**phases, "encode_and_first_token": short["end_to_end"]})
    # Drawing weights is not loading them.
    load = None if turn.engine == "reference" else loaded - started
    return {"load": load, "phases": with_differences(found, sizes.target)}


def _checked(decoder: Decoder, probe: Probe, target: int) -> Phases:
    phases, tokens = decoder(target)
    if not np.array_equal(tokens, probe.tokens[:, :target]):
        raise SystemExit("the tokens are not those of the reference: no time was recorded")
    return phases


def with_differences(found: list[Phases], target: int) -> list[Phases]:
    """Add what two decodes tell of an engine that does not show its phases: all engines are compared by these."""
    # The median, because a slow short decode would make the step of its long one look fast.
    short = float(np.median([phases["encode_and_first_token"] for phases in found]))
    steps = [(phases["end_to_end"] - short) / (target - 1) for phases in found]
    return [
        {
            **phases,
            "per_token_by_difference": step,
            "encode_by_difference": phases["encode_and_first_token"] - step,
        }
        for phases, step in zip(found, steps, strict=True)
    ]


def _fatdeploy_decoder(turn: Turn, cache: Cache, probe: Probe) -> Decoder:
    engine = OrtEngine(read_bundle(cache.bundle), threads=turn.threads)
    return lambda target: timed_decode(engine, probe.source, probe.mask, target)


def _reference_decoder(turn: Turn, cache: Cache, probe: Probe) -> Decoder:
    import torch

    from fatdeploy.export.eager import EagerEngine
    from fatdeploy.export.reference.weights import model_from_preset

    torch.set_num_threads(turn.threads)
    engine = EagerEngine(model_from_preset(cache.preset))
    return lambda target: timed_decode(engine, probe.source, probe.mask, target)


def _ctranslate2_decoder(turn: Turn, cache: Cache, probe: Probe) -> Decoder:
    from benchmarks.ctranslate2_decoding import Translation

    translation = Translation(cache.ctranslate2, threads=turn.threads, workers=turn.workers)
    sources = translation.sources(probe.source, probe.mask)

    def decoder(target: int) -> tuple[Phases, Tokens]:
        started = time.perf_counter()
        results = translation.results(sources, target)
        ended = time.perf_counter()
        return {"end_to_end": ended - started}, translation.tokens(results)

    return decoder


DECODERS: dict[EngineName, Callable[[Turn, Cache, Probe], Decoder]] = {
    "fatdeploy": _fatdeploy_decoder,
    "ctranslate2": _ctranslate2_decoder,
    "reference": _reference_decoder,
}


# Imported before the clock starts: loading a model is what is compared.
IMPORTED: dict[EngineName, str] = {"fatdeploy": "onnxruntime", "ctranslate2": "ctranslate2", "reference": "torch"}


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
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, read.shape[1]))
    times, found = np.empty(read.shape[1]), np.empty_like(expected)
    for step in range(read.shape[1]):
        started = time.perf_counter()
        logits = engine.step(read[:, step : step + 1], state, Want.LOGITS).logits
        found[:, step] = logits[:, 0].argmax(-1)
        times[step] = time.perf_counter() - started
    engine.release(state)
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


def resident_bytes() -> int:
    """Return how much of this process is in memory; Linux tells it."""
    return _status_bytes("VmRSS:")


def peak_bytes() -> int:
    """Return how much of this process ever was in memory at once."""
    return _status_bytes("VmHWM:")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(name)]
    return int(kilobytes) * 1024


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
