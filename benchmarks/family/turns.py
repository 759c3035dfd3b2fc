"""One turn of ``family`` in a process of its own: a decoder writes a long target, or an encoder reads long sources.

Its tokens are checked before a time is recorded.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.family.settings import FamilySizes, FamilyTurn
from benchmarks.harness.memory import resident_bytes
from benchmarks.harness.rounds import print_turn
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.bench.timing import peak_bytes, random_sources
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.proof.probes import read_probes, verified
from fatdeploy.spec import ModelSpec, Tokens

# Ids that every hybrid model of these sizes reads with its cross-attention: no step is cheaper than another.
FREQUENT = 500


def opened(turn: FamilyTurn, sizes: FamilySizes) -> OrtEngine:
    """Return the engine of a turn, which has repeated the reference's tokens."""
    bundle = read_bundle(sizes.folder(turn.part, turn.model))
    engine = OrtEngine(bundle, OrtOptions(threads=turn.threads))
    verified(engine, read_probes(bundle.file(PROBES)))
    return engine


def decoder(turn: FamilyTurn, sizes: FamilySizes) -> dict[str, Any]:
    """Return the milliseconds of a step, on average up to each length and around it, and the bytes of the state."""
    engine = opened(turn, sizes)
    spec, longest = engine.spec, max(sizes.targets)
    source = np.stack(random_sources(spec, turn.batch, sizes.source))
    inputs = np.random.default_rng(turn.batch).choice(spec.ordinary_ids()[:FREQUENT], (turn.batch, longest))
    seconds = np.array([*step_seconds(engine, source, inputs)])
    return {
        "mean_ms": [float(seconds[:target].mean() * 1e3) for target in sizes.targets],
        "step_ms": [float(np.median(seconds[target // 2 : target]) * 1e3) for target in sizes.targets],
        "state_bytes": [state_bytes(spec, turn.batch, target) for target in sizes.targets],
        "peak_bytes": peak_bytes(),
    }


def step_seconds(engine: OrtEngine, source: Tokens, inputs: Tokens) -> Iterator[float]:
    """Yield the seconds of each step on prescribed inputs [B, T]."""
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, inputs.shape[1]))
    for step in range(inputs.shape[1]):
        started = time.perf_counter()
        engine.step(inputs[:, step : step + 1], state, Want.LOGITS)
        yield time.perf_counter() - started
    engine.release(state)


def state_bytes(spec: ModelSpec, rows: int, target: int) -> int:
    """Return how many bytes a decode of a length keeps from step to step."""
    sizes = {"rows": rows, "capacity": target}
    return sum(int(np.prod(tensor.sized(sizes))) * np.dtype(tensor.dtype).itemsize for tensor in spec.state)


def encoder(turn: FamilyTurn, sizes: FamilySizes) -> dict[str, Any]:
    """Return the seconds of every encode by source length, and by how much it raised the peak of memory."""
    engine = opened(turn, sizes)
    before = resident_bytes()
    seconds, grown = [], []
    for length in sizes.sources:
        source = np.stack(random_sources(engine.spec, turn.batch, length))
        seconds.append([_encode_seconds(engine, source) for _ in range(1 + sizes.repetitions)][1:])
        grown.append((peak_bytes() or before) - before)
    return {"seconds": seconds, "grown_bytes": grown}


def _encode_seconds(engine: OrtEngine, source: Tokens) -> float:
    started = time.perf_counter()
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, 1))
    taken = time.perf_counter() - started
    engine.release(state)
    return taken


PARTS = {"decoder": decoder, "encoder": encoder}


if __name__ == "__main__":
    print_turn(FamilyTurn, FamilySizes, lambda turn, sizes: PARTS[turn.part](turn, sizes))
