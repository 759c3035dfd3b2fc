"""Rows that move in place: the reference's numbers, the same memory, the same bindings, nothing left behind."""

from collections.abc import Iterator

import numpy as np
import pytest

from fatdeploy.errors import SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.decoding.loop import DecodeOptions, decode
from fatdeploy.runtimes.engines.ort.engine import BoundCall, OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.engines.row_moves import move_rows, zero_rows
from fatdeploy.spec import cache_specs, recurrent_specs
from tests.support.bundles import bundle_of, model_of
from tests.support.engines.kinds import Kind, engine_of, places

GRAPHS = [("transformer-tiny", "ort"), ("fat-tiny", "ort"), ("transformer-tiny", "standard")]
ENGINES = [*GRAPHS, ("transformer-tiny", "trt"), ("fat-tiny", "trt")]
SOURCE = np.array([[5, 6, 7, 8], [9, 4, 0, 0], [11, 12, 13, 0]])
MASK = SOURCE != 0
BEAMS = 4


def beam_like(draw: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield reorders as a beam search makes them: grow, move within sources, let sources leave, shrink, grow again."""
    sources, each = 3, 1
    for step in range(24):
        kept = np.delete(np.arange(sources), 1) if step in (9, 15) else np.arange(sources)
        following = {0: BEAMS, 12: 2, 17: 3}.get(step, each)
        chosen = draw.integers(0, each, (len(kept), following))
        if step % 3 == 1 and following == each:
            chosen = draw.permuted(np.tile(np.arange(each), (len(kept), 1)), axis=1)
        yield (kept[:, None] * each + chosen).reshape(-1)
        sources, each = len(kept), following


@pytest.mark.parametrize(("preset", "kind"), ENGINES)
def test_rows_that_move_as_in_a_beam_search_go_on_as_in_the_reference(preset: str, kind: Kind) -> None:
    engine, reference = engine_of(preset, kind), EagerEngine(model_of(preset))
    draw = np.random.default_rng(0)
    state, expected_state = (backend.encode(SOURCE, MASK, Capacity(BEAMS, 40)) for backend in (engine, reference))
    used = places(state)
    engine.step(np.full((3, 1), 1), state, Want.LOGITS)
    reference.step(np.full((3, 1), 1), expected_state, Want.LOGITS)
    for rows in beam_like(draw):
        engine.reorder(state, rows)
        reference.reorder(expected_state, rows)
        tokens = draw.integers(3, 64, (len(rows), int(draw.integers(1, 3))))
        if state.position + tokens.shape[1] > 40:
            break
        logits = engine.step(tokens, state, Want.LOGITS).logits
        expected = reference.step(tokens, expected_state, Want.LOGITS).logits
        bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=bound)
        assert places(state) == used
    assert len(rows) == 3
    assert state.position > 30


@pytest.mark.parametrize(("preset", "dialect"), GRAPHS)
def test_unwritten_positions_stay_zero_in_every_row(preset: str, dialect: str) -> None:
    engine, draw = OrtEngine(bundle_of(preset, dialect)), np.random.default_rng(1)
    state = engine.encode(SOURCE, MASK, Capacity(BEAMS, 40))
    for rows in beam_like(draw):
        engine.step(draw.integers(3, 64, (state.rows, 1)), state, Want.HIDDEN)
        engine.reorder(state, rows)
    for spec, array in zip(engine.spec.state, state.arrays[0], strict=True):
        assert len(array) == 3 * BEAMS
        if "capacity" in spec.shape:
            assert array[:, :, : int(state.position)].any(axis=(1, 2, 3)).all()
            assert not array[:, :, int(state.position) :].any()


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny"])
def test_written_positions_are_zeroed_on_release_even_in_rows_that_left(preset: str) -> None:
    engine = OrtEngine(bundle_of(preset))
    state = engine.encode(SOURCE, MASK, Capacity(2, 8))
    engine.step(np.full((3, 1), 7), state, Want.LOGITS)
    engine.reorder(state, np.array([0, 0, 1, 1, 2, 2]))
    engine.step(np.full((6, 2), 7), state, Want.LOGITS)
    engine.reorder(state, np.array([3]))
    engine.step(np.full((1, 1), 7), state, Want.LOGITS)
    used, arrays = places(state), [array for arrays in state.arrays for array in arrays]
    assert all(array[5].any() for array in arrays)
    engine.release(state)
    assert not any(array.any() for array in arrays)
    # The next state may have as many rows again, also for another number of sources: six.
    assert places(engine.encode(SOURCE[:2], MASK[:2], Capacity(3, 8))) == used


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny"])
def test_results_are_rebound_only_when_the_number_of_rows_or_the_sources_change(preset: str) -> None:
    engine = OrtEngine(bundle_of(preset))
    state = engine.encode(SOURCE, MASK, Capacity(2, 8))

    made: list[BoundCall] = []  # kept alive, or a new array might reuse the address of an old one

    def bound_after(rows: list[int]) -> list[int]:
        engine.reorder(state, np.array(rows))
        engine.step(np.full((len(rows), 1), 7), state, Want.LOGITS)
        made.extend(state.bound.values())
        return [id(bound) for bound in state.bound.values()]

    grown = bound_after([0, 0, 1, 1, 2, 2])
    assert bound_after([1, 0, 3, 3, 4, 5]) == grown
    assert bound_after([0, 1, 2, 3, 4, 5]) == grown
    fewer = bound_after([2, 3, 4, 5])
    assert not set(fewer) & set(grown)
    swapped = bound_after([2, 3, 0, 1])
    assert not set(swapped) & set(fewer)
    one_each = bound_after([1, 2])
    assert not set(one_each) & set(swapped)
    # As many rows as before, but all of one source.
    assert not set(bound_after([1, 1])) & set(one_each)


@pytest.mark.parametrize("kind", ["eager", "ort", "trt"])
def test_more_rows_than_the_state_was_encoded_for_are_refused_and_it_is_unchanged(kind: Kind) -> None:
    engine = engine_of("transformer-tiny", kind)
    state = engine.encode(SOURCE, MASK, Capacity(2, 8))
    message = r"^reorder refused: 3 rows per source, the state was encoded for a capacity of rows_per_source = 2$"
    for rows in ([0, 0, 0, 1, 1, 1, 2, 2, 2], [1, 1, 1]):
        with pytest.raises(SpecMismatch, match=message):
            engine.reorder(state, np.array(rows))
    assert engine.step(np.full((3, 1), 7), state, Want.LOGITS).logits.shape == (3, 1, 64)


@pytest.mark.parametrize(
    ("rows", "copied"),
    [([0, 1, 2, 3], 0), ([0, 1, 0, 3], 1), ([3, 1, 3, 3], 2), ([1, 0, 2, 3], 2), ([1, 2, 3, 0], 4), ([0, 0, 1, 1], 3)],
    ids=str,
)
def test_only_written_positions_of_rows_that_move_are_touched(rows: list[int], copied: int) -> None:
    specs = (*cache_specs(0, 2, 3), *recurrent_specs(0, 2, 4, 3))
    draw = np.random.default_rng(2)
    arrays = [draw.standard_normal(tensor.sized({"rows": 6, "capacity": 7})) for tensor in specs]
    before = [array.copy() for array in arrays]
    move_rows(specs, arrays, np.array(rows), np.array(5))
    for spec, array, old in zip(specs, arrays, before, strict=True):
        part = (slice(4), slice(None), slice(5)) if spec.kind == "cache" else (slice(4),)
        expected = old.copy()
        expected[part] = old[rows][part]
        np.testing.assert_array_equal(array, expected)
        assert (array != old).reshape(6, -1).any(axis=1).sum() == copied


@pytest.mark.parametrize("rows", [[0, 1, 0, 3], [1, 2, 3, 0], [3, 3, 1, 1], [2, 3]], ids=str)
def test_each_row_is_copied_up_to_the_position_it_has_reached(rows: list[int]) -> None:
    specs = (*cache_specs(0, 2, 3), *recurrent_specs(0, 2, 4, 3))
    draw = np.random.default_rng(3)
    arrays = [draw.standard_normal(tensor.sized({"rows": 6, "capacity": 7})) for tensor in specs]
    before, positions = [array.copy() for array in arrays], np.array([5, 0, 7, 2, 9, 9])
    move_rows(specs, arrays, np.array(rows), positions)
    for spec, array, old in zip(specs, arrays, before, strict=True):
        expected = old.copy()
        for new, parent in enumerate(rows):
            part = (slice(None), slice(positions[parent])) if spec.kind == "cache" else ()
            expected[new][part] = old[parent][part]
        np.testing.assert_array_equal(array, expected)


def test_zeroing_does_not_touch_unused_rows() -> None:
    specs = (*cache_specs(0, 2, 3), *recurrent_specs(0, 2, 4, 3))
    arrays = [np.ones(tensor.sized({"rows": 4, "capacity": 7})) for tensor in specs]
    zero_rows(specs, [arrays], 3, 5)
    assert [int(array.sum()) for array in arrays] == [2 * 3 * (4 * 7 - 3 * 5)] * 2 + [2 * 4 * 3, 2 * 4]


@pytest.mark.parametrize("kind", ["ort", "trt"])
def test_length_candidates_are_rows_that_grow_once(kind: Kind) -> None:
    engine, reference = engine_of("transformer-nat-tiny", kind), EagerEngine(model_of("transformer-nat-tiny"))
    sources, options = [[5, 6, 7], [9, 10]], DecodeOptions(length_candidates=3)
    hypotheses, expected = (decode(backend, sources, options) for backend in (engine, reference))
    assert [(hypothesis.tokens, hypothesis.finish) for hypothesis in hypotheses] == [
        (hypothesis.tokens, hypothesis.finish) for hypothesis in expected
    ]
