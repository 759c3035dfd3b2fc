"""Matrices of a vocabulary: where they may be split, what their rows cost, and which plans split them."""

import numpy as np
import pytest

from fatdeploy.export.quantize.blocks.split import SplitBlocks
from fatdeploy.export.quantize.planning.forms import Candidate, Sample, candidates_of, split_candidates
from fatdeploy.export.quantize.planning.plan import Option, planned
from fatdeploy.export.quantize.planning.vocabulary import (
    Lookups,
    lookup_shares,
    spans_of,
    split_places,
    tied_hessians,
)
from fatdeploy.export.quantize.request import Integers, QuantizeRequest
from tests.support.quantized import quantizer_of

V, K = 256, 64
DRAW = np.random.default_rng(0)
ROWS = (DRAW.standard_normal((300, K)) @ (np.eye(K) + 0.2 * DRAW.standard_normal((K, K)))).astype(np.float32)
MATRIX = DRAW.standard_normal((K, V)).astype(np.float32)
FREQUENT = (1 / np.arange(1, V + 1) ** 2).astype(np.float32)  # what an error in each logit costs


def test_places_are_shares_of_the_vocabulary_and_spans_lie_between_them() -> None:
    assert split_places(65001) == [4048, 8112, 12176, 16240, 24368, 32496]
    assert split_places(64) == [16, 32]
    assert split_places(20) == []
    assert list(spans_of(64)) == [slice(0, 16), slice(16, 32), slice(32, 64)]
    assert list(spans_of(20)) == [slice(0, 20)]


def test_neighbours_share_how_often_they_are_looked_up() -> None:
    shares = lookup_shares([np.array([0, 1, 1, 20]), np.array([5, 63, 2, 3])], 64)
    np.testing.assert_allclose(shares, np.repeat([6 / 8 / 16, 1 / 8 / 16, 1 / 8 / 32], [16, 16, 32]))
    assert shares.sum() == pytest.approx(1)


def test_an_error_costs_more_where_rows_are_read_and_channels_matter() -> None:
    lookups = Lookups(np.array([0.75, 0.25], np.float32), np.array([2, 0, 1], np.float32))
    assert lookups.error(np.array([[1, 0], [5, 5], [0, 2]], np.float32)) == pytest.approx(2 * 0.75 + 4 * 0.25)


def test_a_span_that_is_never_chosen_is_rounded_for_its_lookups() -> None:
    weights = np.zeros(64, np.float32)
    weights[:16] = 2
    lookups = Lookups(np.full(64, 0.5, np.float32), np.arange(3, dtype=np.float32))
    hessians = [hessian for _, hessian in tied_hessians(np.ones((3, 3)), weights, lookups, None)]
    np.testing.assert_allclose(hessians[0], 2 * np.ones((3, 3)) + np.diag([0, 0.5, 1]))
    np.testing.assert_allclose(hessians[-1], np.diag([0, 0.5, 1]))
    # Smoothed rows are larger than those that are read.
    factors = np.array([1, 2, 4], np.float32)
    smoothed = [hessian for _, hessian in tied_hessians(np.ones((3, 3)), weights, lookups, factors)]
    np.testing.assert_allclose(smoothed[-1], np.diag([0, 0.5 / 4, 1 / 16]))


def test_rows_of_a_tied_matrix_lose_less_when_lookups_count() -> None:
    weights = np.where(np.arange(V) < 128, FREQUENT, 0).astype(np.float32)
    lookups = Lookups(np.full(V, 1 / V, np.float32), np.full(K, 100, np.float32))
    rounded = [
        candidates_of(Sample(ROWS, MATRIX, weights, reading), ["blocks4"], 8, smoothed=False)[0].recipe
        for reading in (lookups, None)
    ]
    lost = [lookups.error(recipe.integers(MATRIX, 8).restored() - MATRIX) for recipe in rounded]
    assert lost[0] < 0.8 * lost[1]


def splits() -> tuple[list[Candidate], list[Candidate]]:
    sample = Sample(ROWS, MATRIX, FREQUENT)
    narrow = candidates_of(sample, ["blocks4", "blocks8"], 8, smoothed=False)
    return narrow, split_candidates(sample, narrow, 8)


def test_more_wide_columns_have_less_error_and_more_bytes() -> None:
    (narrow, wide), found = splits()
    assert [candidate.recipe.stored.n_wide for candidate in found] == split_places(V)
    errors = [narrow.error, *(candidate.error for candidate in found), wide.error]
    assert errors == sorted(errors, reverse=True)
    assert found[0].error < 0.1 * narrow.error  # the first sixteenth has nearly all of what errors cost
    sizes = [candidate.recipe.stored.nbytes for candidate in found]
    assert [narrow.recipe.stored.nbytes, *sizes] == sorted([narrow.recipe.stored.nbytes, *sizes])


def test_a_plan_splits_a_matrix_where_8_bits_for_all_of_it_would_cost_more() -> None:
    (narrow, wide), found = splits()
    costs = [narrow.recipe.stored.nbytes, K * V * 1.125, *(entry.recipe.stored.nbytes for entry in found)]
    options = [
        Option(entry.recipe, entry.error, cost) for entry, cost in zip([narrow, wide, *found], costs, strict=True)
    ]
    budget = 0.1 * narrow.error
    plan, without = planned({"output": options}, budget), planned({"output": options[:2]}, budget)
    assert isinstance(plan.choices["output"].recipe.stored, SplitBlocks)
    assert without.choices["output"].recipe.form == "blocks8"
    assert plan.cost < 0.7 * without.cost
    assert plan.error <= budget


@pytest.mark.parametrize(("precision", "expected"), [("int4", {16, 32}), ("int8", set())])
def test_only_the_output_matrix_of_4_bits_may_be_split(precision: Integers, expected: set[int]) -> None:
    options = quantizer_of("fat-tiny", QuantizeRequest(precision=precision)).options
    places = {
        name: {entry.recipe.stored.n_wide for entry in found if isinstance(entry.recipe.stored, SplitBlocks)}
        for name, found in options.items()
    }
    assert places.pop("output") == expected
    assert not any(places.values())
