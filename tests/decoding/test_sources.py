"""Any number of sources: what is decoded together changes no result, and a deadline holds for the whole call."""

import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fatdeploy
from fatdeploy import ConfigError, DecodeOptions, Hypothesis, Model, SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes import model
from fatdeploy.runtimes.bulk import workers
from fatdeploy.runtimes.decoding import loop as decode
from fatdeploy.runtimes.decoding.sources import batches_of
from tests.support.bundles import bundle_of, model_of

GREEDY = DecodeOptions(max_new_tokens=10)
CHOICES = {
    "greedy": GREEDY,
    "greedy with scores": DecodeOptions(max_new_tokens=10, scores=True),
    "beams": DecodeOptions(max_new_tokens=10, num_beams=3, num_return_sequences=2),
    "samples": DecodeOptions(max_new_tokens=10, sample=True, num_return_sequences=2, top_k=20, seed=4),
    "prefix": DecodeOptions(max_new_tokens=10, prefix=(5, 9)),
}


@cache
def loaded(preset: str) -> Model:
    return fatdeploy.load(bundle_of(preset).path, threads=1, spinning=False)


@cache
def eager(preset: str) -> Model:
    return Model(bundle_of(preset), EagerEngine(model_of(preset)))


def drawn_sources(count: int) -> list[list[int]]:
    draw = np.random.default_rng(11)
    return [draw.integers(3, 64, draw.integers(1, 30)).tolist() for _ in range(count)]


def batch_sizes(model: Model, sources: Sequence[list[int]], **options: int) -> list[int]:
    sizes: list[int] = []
    model.generate(sources, GREEDY, progress=sizes.append, **options)
    return sizes


def assert_same(results: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    """Tokens are equal; scores are sums of floats, whose last bits depend on the shape of a product."""
    for result, other in zip(results, expected, strict=True):
        assert (result.tokens, result.finish, result.dropped) == (other.tokens, other.finish, other.dropped)
        assert result.score == pytest.approx(other.score, abs=1e-4)
        assert result.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert_same(result.alternatives, other.alternatives)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(1, 900),
)
def test_every_source_is_in_one_batch_that_fits_the_budget(
    sizes: list[tuple[int, int]], rows: int, budget: int
) -> None:
    lengths, targets = [length for length, _ in sizes], [target for _, target in sizes]
    batches = batches_of(lengths, rows, targets, budget)
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(len(lengths)))
    # The longest first, then those with the longest targets; equally long ones in their original order.
    assert order == sorted(order, key=lambda index: (-lengths[index], -targets[index], index))

    def positions_of(batch: list[int]) -> int:
        longest = max(lengths[index] for index in batch) + max(targets[index] for index in batch)
        return rows * len(batch) * longest

    for batch, following in zip(batches, [*batches[1:], []], strict=True):
        assert len(batch) == 1 or positions_of(batch) <= budget
        # No batch is smaller than necessary.
        assert not following or positions_of([*batch, following[0]]) > budget


def test_batches_by_example() -> None:
    assert batches_of([3, 9, 4, 9, 1], rows_per_source=2, target_positions=[1] * 5, budget=40) == [[1, 3], [2, 0, 4]]
    assert batches_of([3, 900, 4], rows_per_source=1, target_positions=[10] * 3, budget=1) == [[1], [2], [0]]
    assert batches_of([], rows_per_source=1, target_positions=[], budget=1) == []
    # Three sources with a short target would fit, but the third has a long one.
    assert batches_of([5, 5, 4], rows_per_source=1, target_positions=[1, 1, 9], budget=20) == [[0, 1], [2]]
    # An engine that takes two sources, and one of more than 5 tokens; 0 is an error that the engine reports.
    most = {9: 1, 4: 2, 3: 2, 1: 0}
    lengths, budget = [3, 9, 4, 1, 1], 1000
    results = batches_of(lengths, 1, [10] * 5, budget, lambda longest, rows: most[longest] // rows)
    assert results == [[1], [2, 0], [3], [4]]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny"])
@pytest.mark.parametrize("of", [loaded, eager])
def test_results_do_not_depend_on_what_is_decoded_together(
    of: Callable[[str], Model], preset: str, choice: str
) -> None:
    model, sources, options = of(preset), drawn_sources(9), CHOICES[choice]
    expected = model.generate(sources, options)
    assert len({result.tokens for result in expected}) > 5
    assert_same(model.generate(sources, options, batch_tokens=1), expected)
    assert_same(model.generate(sources, options, batch_tokens=150), expected)
    assert_same(model.generate(sources[:4], options) + model.generate(sources[4:], options), expected)
    order = random.Random(3).sample(range(9), 9)
    shuffled = model.generate([sources[index] for index in order], options, batch_tokens=150)
    assert_same(shuffled, [expected[index] for index in order])


def test_a_parallel_model_decodes_in_batches_too() -> None:
    model, sources = loaded("transformer-nat-tiny"), drawn_sources(7)
    options = DecodeOptions(max_new_tokens=12, length_candidates=3)
    expected = model.generate(sources, options)
    assert_same(model.generate(sources, options, batch_tokens=100), expected)


def test_progress_is_reported_after_each_batch() -> None:
    model, sources = loaded("transformer-tiny"), [[7] * 10, [8] * 2, [9] * 10, [7] * 3, [5]]
    assert batch_sizes(model, sources) == [5]
    assert batch_sizes(model, sources, batch_tokens=40) == [2, 3]
    assert batch_sizes(model, sources, batch_tokens=1) == [1] * 5


def test_hundreds_of_sources_are_more_than_one_batch() -> None:
    sizes = batch_sizes(loaded("transformer-tiny"), drawn_sources(250))
    assert sum(sizes) == 250
    assert len(sizes) == 2


class Clock:
    """A clock that advances only on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (model, decode, workers):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)

    def passes(self, _: int) -> None:
        self.now += 1


def test_a_deadline_holds_for_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sources = Clock(monkeypatch), [[7], [8] * 30, [9] * 20]
    options = DecodeOptions(max_new_tokens=10, timeout_s=1.5)
    expected = loaded("transformer-tiny").generate(sources, GREEDY)
    results = loaded("transformer-tiny").generate(sources, options, batch_tokens=1, progress=clock.passes)
    # Two batches begin in time, those of the longest sources.
    assert results == [Hypothesis((), "cancelled"), expected[1], expected[2]]


def test_a_deadline_in_the_middle_of_a_batch_keeps_the_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = Clock(monkeypatch), []

    def slow(tokens: np.ndarray, scores: np.ndarray) -> np.ndarray:
        steps.append(tokens.shape[1])
        clock.now += 1
        return scores

    options = DecodeOptions(max_new_tokens=10, timeout_s=3.5, processors=[slow])
    results = loaded("transformer-tiny").generate([[7], [8, 9]], options, batch_tokens=1)
    [whole] = loaded("transformer-tiny").generate([[8, 9]], GREEDY)
    assert results == [Hypothesis((), "cancelled"), Hypothesis(whole.tokens[:4], "cancelled")]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sources", "options", "error", "reason"),
    [
        ([[7], [8], []], GREEDY, SpecMismatch, "source 2: is empty"),
        ([[7], [999], []], GREEDY, SpecMismatch, "source 1: ids must lie in 0…63, found 999; source 2: is empty"),
        ([[7]], DecodeOptions(max_new_tokens=9999), ConfigError, "max_new_tokens must lie in 1…"),
        ([[7]], DecodeOptions(prefix=(64,)), ConfigError, "prefix must be ids in 0…63, found 64"),
        ([], GREEDY, SpecMismatch, "no source given"),
    ],
)
def test_everything_is_checked_before_anything_is_decoded(
    sources: list[list[int]], options: DecodeOptions, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        loaded("transformer-tiny").generate(sources, options, batch_tokens=1, progress=pytest.fail)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"options": {"num_beams": 2}}, "options must be DecodeOptions, found {'num_beams': 2}"),
        ({"truncate": "no"}, "truncate must be True or False, found 'no'"),
        (
            {"progress": 3, "batch_tokens": 0},
            "batch_tokens must be .*; progress must be a function of a number, found 3",
        ),
    ],
    ids=str,
)
def test_an_argument_of_the_wrong_type_is_refused_before_anything_is_decoded(values: dict, reason: str) -> None:
    model = loaded("transformer-tiny")
    with pytest.raises(ConfigError, match=f"^call refused: {reason}$"):
        model.generate([[7]], **values)
    if not values.keys() & {"progress"}:
        with pytest.raises(ConfigError, match=f"^call refused: {reason}$"):
            model.stream([7], **values)


@pytest.mark.parametrize("value", [0, -5, 2.5, True, "8192"])
def test_a_budget_that_is_not_a_count_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="batch_tokens must be a whole number from 1 up, found"):
        loaded("transformer-tiny").generate([[7]], batch_tokens=value)
