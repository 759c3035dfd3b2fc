"""onnxruntime's own profile: only attention touches values as large as a cache, and what ops cost."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from benchmarks.harness.profile_step import main, own_times
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from tests.support.bundles import bundle_of

ROWS, CAPACITY, HEADS, WIDTH, STEPS = 3, 200, 2, 16, 10
CACHE = ROWS * HEADS * CAPACITY * WIDTH  # no weight and no other value of the model has as many numbers


def recorded_ops(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded arguments of every op in ten steps."""
    engine = OrtEngine(bundle_of("transformer-tiny"), OrtOptions(threads=1, profile=folder))
    source = np.random.default_rng(0).integers(3, 64, (ROWS, 5))
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, CAPACITY))
    for step in range(STEPS):
        engine.step(np.full((ROWS, 1), 5 + step), state, Want.LOGITS)
    engine.release(state)
    engine.close()
    [record] = folder.glob(f"{DECODER}*.json")
    return [event["args"] for event in json.loads(record.read_text()) if event["cat"] == "Node"]


def largest(op: dict[str, Any], kind: str) -> int:
    """Return how many numbers the largest input or output of an op has."""
    return max((math.prod(shape) for shapes in op[f"{kind}_type_shape"] for shape in shapes.values()), default=0)


def test_only_attention_reads_and_writes_the_caches(tmp_path: Path) -> None:
    sizes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for op in recorded_ops(tmp_path):
        sizes[op["op_name"]].append((largest(op, "input"), largest(op, "output")))
    # Two layers attend to themselves, with caches in and out, and two to the source.
    assert sizes.pop("GroupQueryAttention") == [(CACHE, CACHE)] * 2 * STEPS
    assert len(sizes["MultiHeadAttention"]) == 2 * STEPS
    # The largest value that any other op reads is the position table.
    assert max(max(pair) for shapes in sizes.values() for pair in shapes) == 256 * 32 < CACHE


def test_a_branch_costs_its_time_without_its_nodes() -> None:
    nodes = [{"ts": 12, "dur": 5}, {"ts": 17, "dur": 3}, {"ts": 10, "dur": 20}, {"ts": 30, "dur": 4}]
    assert [(event["ts"], own) for event, own in own_times(nodes)] == [(10, 12), (12, 5), (17, 3), (30, 4)]


def test_a_profile_lists_ops_and_nodes_per_step() -> None:
    run = CliRunner().invoke(
        main, [str(bundle_of("transformer-tiny").path), "--threads", "1", "--steps", "6", "--json"]
    )
    assert run.exit_code == 0, run.output
    profile = json.loads(run.stdout)
    assert (profile["steps"], profile["batch"], profile["bundle"]) == (6, 1, bundle_of("transformer-tiny").digest)
    calls = {op["op"]: op["calls"] for op in profile["ops"]}
    assert (calls["GroupQueryAttention"], calls["MultiHeadAttention"]) == (2, 2)
    assert (calls["LayerNormalization"], calls["FusedMatMul"]) == (6, 1)
    assert sum(node["calls"] for node in profile["nodes"]) == sum(calls.values())
    assert any(node["name"].startswith("decoder.layers.0.attention") for node in profile["nodes"])


def test_a_profile_is_shown_as_two_tables() -> None:
    run = CliRunner().invoke(main, [str(bundle_of("transformer-tiny").path), "--steps", "2", "--top", "3"])
    assert run.exit_code == 0, run.output
    summary, _, ops, *rest = run.stdout.splitlines()
    assert re.fullmatch(r"[\d.]+ ms per step over 2 steps, [\d.-]+ of it between ops", summary)
    assert ops.split() == ["op", "calls", "ms", "share"]
    assert rest[rest.index("") + 1].split() == ["node", "op", "ms", "share"]
    assert len(rest) - rest.index("") == 5
