"""What onnxruntime itself says it did: in a step nothing but attention touches anything as large as a cache."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fatdeploy.runtimes import ort_sessions
from fatdeploy.runtimes.engine import Capacity, Want
from fatdeploy.runtimes.ort import OrtEngine
from tests.bundles import bundle_of

ROWS, CAPACITY, HEADS, WIDTH, STEPS = 3, 200, 2, 16, 10
CACHE = ROWS * HEADS * CAPACITY * WIDTH  # as many numbers as no weight and no other value of the model has


def profiled_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> OrtEngine:
    """Return an engine like any other, but that its sessions keep a record."""
    right = ort_sessions._session_options

    def recording(ort: Any, options: ort_sessions.OrtOptions, *, alone: bool) -> Any:
        chosen = right(ort, options, alone=alone)
        chosen.enable_profiling = True
        chosen.profile_file_prefix = str(folder / ("decoder" if alone else "encoder"))
        return chosen

    monkeypatch.setattr(ort_sessions, "_session_options", recording)
    return OrtEngine(bundle_of("transformer-tiny"), threads=1)


def recorded_ops(engine: OrtEngine) -> list[dict[str, Any]]:
    """Return what was recorded of every op in ten steps."""
    source = np.random.default_rng(0).integers(3, 64, (ROWS, 5))
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, CAPACITY))
    for step in range(STEPS):
        engine.step(np.full((ROWS, 1), 5 + step), state, Want.LOGITS)
    assert engine._sessions is not None
    events = json.loads(Path(engine._sessions.decoder.end_profiling()).read_text())
    return [event["args"] for event in events if event["cat"] == "Node"]


def largest(op: dict[str, Any], kind: str) -> int:
    """Return how many numbers the largest input or output of an op has."""
    return max((math.prod(shape) for one in op[f"{kind}_type_shape"] for shape in one.values()), default=0)


def test_only_attention_reads_and_writes_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for op in recorded_ops(profiled_engine(tmp_path, monkeypatch)):
        sizes[op["op_name"]].append((largest(op, "input"), largest(op, "output")))
    attention = sizes.pop("MultiHeadAttention")
    # Two layers attend to themselves, with caches in and out, and two to the source.
    assert len(attention) == 4 * STEPS
    assert attention.count((CACHE, CACHE)) == 2 * STEPS
    # The largest thing that anything else reads is the table of positions.
    assert max(max(found) for shapes in sizes.values() for found in shapes) == 256 * 32 < CACHE
