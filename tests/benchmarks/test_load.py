"""One model under load: a small version of ``benchmarks.load.run``, without its check of memory."""

import threading

import numpy as np
import pytest

from benchmarks.load.run import unmet
from benchmarks.load.turns import Kind, LoadSizes, MemorySamples, drawn_requests, is_answer, loaded
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.engines.ort.engine import OrtEngine, OrtState
from fatdeploy.runtimes.engines.protocol import Capacity
from fatdeploy.spec import Mask, Tokens
from tests.support.bundles import bundle_of

SIZES = LoadSizes(requests=120, threads=8)


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny"])
def test_a_model_under_load_is_right_and_leaves_nothing_behind(preset: str) -> None:
    result = loaded(bundle_of(preset), SIZES)
    assert result["failures"] == []
    # Other tests in this process also change its memory.
    assert {name for name, holds in result["conditions"].items() if not holds} <= {"memory_is_flat"}
    assert 0 < result["cancelled"] < 120
    assert 1 < result["most_states_held"] <= 8
    assert result["memory"]["samples"][-1]["bytes"] > 0


def test_requests_are_of_every_kind_and_of_the_shortest_and_longest_sources() -> None:
    spec = bundle_of("transformer-tiny").spec
    requests = drawn_requests(spec, SIZES)
    kinds: set[Kind] = {"greedy", "beams", "samples", "stream", "closed", "dropped", "timeout"}
    assert {request.kind for request in requests} == kinds
    lengths = {len(source) for request in requests for source in request.sources}
    assert {1, spec.max_source} < lengths <= set(range(1, 1 + spec.max_source))
    assert requests == drawn_requests(spec, SIZES)


def test_wrong_results_and_states_that_are_not_released_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, encode = bundle_of("transformer-tiny"), OrtEngine.encode

    def disturbed(self: OrtEngine, source: Tokens, mask: Mask, capacity: Capacity) -> OrtState:
        # Like a buffer that other threads write to; the expected results are decoded in the main thread.
        alone = threading.current_thread() is threading.main_thread()
        return encode(self, source if alone else np.where(mask, 5, source), mask, capacity)

    monkeypatch.setattr(OrtEngine, "encode", disturbed)
    monkeypatch.setattr("benchmarks.harness.watched.WatchedEngine.release", lambda self, state: None)
    result = loaded(bundle, LoadSizes(requests=12, threads=2))
    assert result["failures"][0].startswith("another result: Request(")
    assert result["states_held"] > 0
    assert set(unmet({"results": [{"bundle": "tiny", **result}]})) >= {
        "tiny: every_result_is_the_single_threaded_one",
        "tiny: no_state_is_held",
    }


@pytest.mark.parametrize(
    ("result", "right"),
    [
        (Hypothesis((5, 6, 7), "eos", score=-1.0), True),
        (Hypothesis((5, 6, 7), "eos", score=-1.5), False),
        (Hypothesis((5, 6), "eos", score=-1.0), False),
        (Hypothesis((5, 6), "cancelled"), True),
        (Hypothesis((), "cancelled"), True),
        (Hypothesis((5, 7), "cancelled"), False),
        (Hypothesis((5, 6, 7, 8), "cancelled"), False),
        (Hypothesis((5,), "cancelled", log_probs=(-0.5,)), False),
    ],
)
def test_a_cancelled_result_is_the_beginning_of_the_single_threaded_one(result: Hypothesis, right: bool) -> None:
    assert is_answer([result], [Hypothesis((5, 6, 7), "eos", score=-1.0)]) == right


def test_memory_is_judged_after_the_warm_up_by_how_far_it_moves_from_its_level() -> None:
    sizes = [1, 50, 100, 100, 104, 90]
    samples = [{"seconds": 0.1 * i, "finished": 10 * i, "bytes": size} for i, size in enumerate(sizes)]
    memory = MemorySamples(samples).as_dict(requests=80)
    assert (memory["level_bytes"], memory["lowest"], memory["highest"]) == (
        100,
        pytest.approx(-0.1),
        pytest.approx(0.04),
    )
