"""One turn of ``greedy`` in a process of its own: an engine is loaded, its tokens are checked, then it is timed.

torch is imported for the reference alone: it would add its memory and idle threads to every other engine.
"""

import importlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fatdeploy
from benchmarks.harness.memory import resident_bytes
from benchmarks.harness.rounds import print_turn
from benchmarks.harness.settings import NEIGHBOURS, DecodeSizes, EngineSetting
from benchmarks.harness.timing import Phases, repeated, timed_steps
from benchmarks.peers.decoders import IMPORTED, Decoder, loaded_decoder
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.proof.probes import Probe, read_probes
from fatdeploy.spec import Tokens

GreedyPart = Literal["greedy", "positions", "memory", "export"]


@dataclass(frozen=True, kw_only=True)
class GreedySizes(DecodeSizes):
    """What all turns of a run have in common."""

    positions: tuple[int, int]  # an early and a late step, whose costs are compared

    @property
    def forced_steps(self) -> int:
        """How many steps are decoded to time those around the later position."""
        return max(self.positions) + NEIGHBOURS + 1


@dataclass(frozen=True, kw_only=True)
class GreedyTurn(EngineSetting):
    """Which engine does what, in which setting."""

    part: GreedyPart


def greedy(turn: GreedyTurn, sizes: GreedySizes) -> dict[str, Any]:
    """Return seconds to load, and the phases of each repetition."""
    models = sizes.models(turn.preset)
    [probe] = read_probes(models.probe(turn.batch, sizes.source, sizes.target))
    folder = turn.model(models)
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
        raise SystemExit("the tokens differ from the reference's: no time was recorded")
    return phases


def positions(turn: GreedyTurn, sizes: GreedySizes) -> list[Phases]:
    """Return seconds of single steps around an early and a late position."""
    models = sizes.models(turn.preset)
    engine = OrtEngine(read_bundle(models.bundle), OrtOptions(threads=turn.threads))
    with np.load(models.forced(turn.batch, sizes.source, sizes.forced_steps)) as file:
        source, inputs, tokens = file["source"], file["read"], file["tokens"]
    runs = [_step_seconds(engine, source, inputs, tokens) for _ in range(1 + sizes.repetitions)][1:]
    return [
        {f"position_{position}": float(seconds[position + offset]) for position in sizes.positions}
        for seconds in runs
        for offset in range(-NEIGHBOURS, NEIGHBOURS + 1)
    ]


def _step_seconds(engine: OrtEngine, source: Tokens, inputs: Tokens, expected: Tokens) -> np.ndarray:
    """Return seconds of each step on prescribed inputs: a hybrid step may cost more or less by its input."""
    seconds, tokens = timed_steps(engine, source, np.ones_like(source, bool), inputs)
    if not np.array_equal(tokens, expected):
        raise SystemExit("the tokens differ from the reference's: no time was recorded")
    return seconds


def memory(turn: GreedyTurn, sizes: GreedySizes) -> dict[str, Any]:
    """Return the memory of a process after it loaded a bundle, and after its first decode."""
    models = sizes.models(turn.preset)
    [probe] = read_probes(models.probe(turn.batch, sizes.source, sizes.target))
    importlib.import_module("onnxruntime")
    imported = resident_bytes()
    model = fatdeploy.load(models.bundle, threads=turn.threads)
    loaded = resident_bytes()
    sources = [row[real] for row, real in zip(probe.source, probe.mask, strict=True)]
    hypotheses = model.generate(sources, fatdeploy.DecodeOptions(max_new_tokens=sizes.target))
    decoded = resident_bytes()
    for row, hypothesis in zip(probe.tokens.tolist(), hypotheses, strict=True):
        if list(hypothesis.tokens) != row[: len(hypothesis.tokens)]:
            raise SystemExit("the tokens differ from the reference's: no memory was recorded")
    weights = model.bundle.file(WEIGHTS).stat().st_size
    return {
        "after_import_bytes": imported,
        "after_load_bytes": loaded,
        "after_decode_bytes": decoded,
        "weights_bytes": weights,
    }


def export(turn: GreedyTurn, sizes: GreedySizes) -> dict[str, Any]:
    """Return seconds of one export, from a model in memory to a certified bundle, which is then deleted."""
    import torch

    from fatdeploy.export.pipeline import Origin, write_bundle
    from fatdeploy.export.reference.weights import model_from_preset

    torch.set_num_threads(turn.threads)
    model = model_from_preset(turn.preset)
    with tempfile.TemporaryDirectory(dir=sizes.cache) as folder:
        started = time.perf_counter()
        write_bundle(model, Path(folder) / "bundle", origin=Origin(name=turn.preset))
        return {"seconds": time.perf_counter() - started}


PARTS = {"greedy": greedy, "positions": positions, "memory": memory, "export": export}


if __name__ == "__main__":
    print_turn(GreedyTurn, GreedySizes, lambda turn, sizes: PARTS[turn.part](turn, sizes))
