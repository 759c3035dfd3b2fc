"""Reused state buffers: the same memory, the same results, and never two decodes in one buffer."""

import numpy as np
import pytest

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort import engine as ort
from fatdeploy.runtimes.engines.ort.buffers import MOST_WAITING, BufferPool, Buffers
from fatdeploy.runtimes.engines.ort.engine import OrtEngine, OrtState
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from tests.support.bundles import bundle_of
from tests.support.engines.kinds import Kind, engine_of, places

SOURCE, MASK = np.array([[5, 6, 7], [8, 9, 4]]), np.ones((2, 3), bool)
PRESETS = ["transformer-tiny", "fat-tiny"]


def fed(engine: OrtEngine, state: OrtState, steps: int = 5) -> np.ndarray:
    """Return the last logits of a few fixed steps."""
    outs = [engine.step(np.full((2, 1), token), state, Want.LOGITS) for token in range(7, 7 + steps)]
    return np.array(outs[-1].logits)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_next_decode_of_the_same_shape_has_the_same_buffers_and_the_same_numbers(preset: str) -> None:
    engine = OrtEngine(bundle_of(preset))
    first = engine.encode(SOURCE, MASK, Capacity(1, 8))
    used, expected = places(first), fed(engine, first)
    engine.release(first)
    second = engine.encode(SOURCE, MASK, Capacity(1, 8))
    assert places(second) == used
    assert not any(array.any() for arrays in second.arrays for array in arrays)
    np.testing.assert_array_equal(fed(engine, second), expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_two_decodes_at_once_share_no_buffer(preset: str) -> None:
    engine = OrtEngine(bundle_of(preset))
    engine.release(engine.encode(SOURCE, MASK, Capacity(1, 8)))
    state, other_state = (engine.encode(SOURCE, MASK, Capacity(1, 8)) for _ in range(2))
    assert not set(places(state)) & set(places(other_state))
    assert len(engine.pool) == 0


def test_another_shape_gets_buffers_of_its_own() -> None:
    engine = OrtEngine(bundle_of("transformer-tiny"))
    engine.release(engine.encode(SOURCE, MASK, Capacity(1, 8)))
    state = engine.encode(SOURCE[:1], MASK[:1], Capacity(1, 9))
    assert state.arrays[0][0].shape[::2] == (1, 9)
    assert len(engine.pool) == 1


@pytest.mark.parametrize(
    ("preset", "dialect"), [("transformer-tiny", "ort"), ("transformer-tiny", "standard"), ("fat-tiny", "ort")]
)
def test_nans_do_not_reach_the_next_decode(preset: str, dialect: str) -> None:
    engine, options = OrtEngine(bundle_of(preset, dialect)), DecodeOptions(max_new_tokens=8)
    expected = decode(engine, SOURCE.tolist(), options)
    spoilt = engine.encode(SOURCE, MASK, Capacity(1, 8))
    used = places(spoilt)
    fed(engine, spoilt, 8)
    for tensor, *arrays in zip(engine.spec.state, *spoilt.arrays, strict=True):
        for array in arrays:
            array[(slice(None), slice(None), slice(8))[: array.ndim] if tensor.kind == "cache" else ...] = np.nan
    engine.release(spoilt)
    assert decode(engine, SOURCE.tolist(), options) == expected
    assert places(engine.encode(SOURCE, MASK, Capacity(1, 8))) == used


def bindings(state: OrtState) -> list[int]:
    return [id(binding) for bound in state.bound.values() for binding in bound.bindings]


@pytest.mark.parametrize("preset", PRESETS)
def test_bindings_are_reused_with_the_sources_and_results_of_another_decode(preset: str) -> None:
    engine, fresh = OrtEngine(bundle_of(preset)), OrtEngine(bundle_of(preset))
    first = engine.encode(SOURCE, MASK, Capacity(2, 8))
    fed(engine, first)
    used = bindings(first)
    engine.reorder(first, np.array([0, 0, 1, 1]))
    engine.step(np.full((4, 1), 7), first, Want.LOGITS)
    grown = bindings(first)
    engine.release(first)
    # Longer sources, one of them padded: only the state keeps its binding, because its shape is the same.
    source, mask = np.array([[9, 8, 7, 6, 5], [4, 5, 0, 0, 0]]), np.arange(5) < np.array([[5], [2]])
    states = [backend.encode(source, mask, Capacity(2, 8)) for backend in (engine, fresh)]
    logits, expected = (fed(backend, state) for backend, state in zip((engine, fresh), states, strict=True))
    np.testing.assert_array_equal(logits, expected)
    assert bindings(states[0]) == used
    for backend, state in zip((engine, fresh), states, strict=True):
        backend.reorder(state, np.array([0, 0, 1, 1]))
    logits, expected = (
        np.array(backend.step(np.full((4, 1), 7), state, Want.LOGITS).logits)
        for backend, state in zip((engine, fresh), states, strict=True)
    )
    np.testing.assert_array_equal(logits, expected)
    assert bindings(states[0]) == grown
    assert not {*grown} & {*used}


def test_bindings_of_large_sources_are_not_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OrtEngine(bundle_of("transformer-tiny"))
    for most, kept in ((2**18, 1), (1800, 0)):
        monkeypatch.setattr(ort, "MOST_HELD_BYTES", most)
        state = engine.encode(SOURCE, MASK, Capacity(1, 8))
        fed(engine, state)
        buffers = state.buffers
        engine.release(state)
        assert len(buffers.bound) == kept
        buffers.bound.clear()


def test_bindings_of_a_few_shapes_are_pooled_and_the_oldest_go_first() -> None:
    engine = OrtEngine(bundle_of("transformer-tiny"))
    for steps in (1, 2, 3, 4, 1, 5, 6):
        state = engine.encode(SOURCE, MASK, Capacity(1, 8))
        engine.step(np.full((2, steps), 7), state, Want.LOGITS)
        buffers = state.buffers
        engine.release(state)
    assert list(buffers.bound) == [(2, steps, Want.LOGITS) for steps in (4, 1, 5, 6)]


def test_a_result_that_is_still_referenced_is_not_overwritten_after_the_release() -> None:
    engine = OrtEngine(bundle_of("transformer-tiny"))
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))
    kept = engine.step(np.full((2, 1), 7), state, Want.LOGITS).logits
    before = np.array(kept)
    engine.release(state)
    fed(engine, engine.encode(SOURCE[::-1].copy(), MASK, Capacity(1, 8)))
    np.testing.assert_array_equal(kept, before)


@pytest.mark.parametrize("kind", ["ort", "trt"])
def test_a_released_state_cannot_be_used_again(kind: Kind) -> None:
    engine = engine_of("transformer-tiny", kind)
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))
    engine.release(state)
    for use in (
        lambda: engine.step(np.full((2, 1), 7), state, Want.LOGITS),
        lambda: engine.reorder(state, np.array([0, 1])),
        lambda: engine.length_log_probs(state),
        lambda: engine.release(state),
    ):
        with pytest.raises(SpecMismatch, match="this state was released and cannot be used any more: encode"):
            use()
    assert len(engine.pool) == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_a_reordered_state_returns_all_rows_it_was_allocated_for(preset: str) -> None:
    engine = OrtEngine(bundle_of(preset))
    state = engine.encode(SOURCE, MASK, Capacity(2, 8))
    used = places(state)
    fed(engine, state)
    engine.reorder(state, np.array([1]))
    engine.step(np.array([[7]]), state, Want.LOGITS)
    engine.release(state)
    state = engine.encode(SOURCE[:1], MASK[:1], Capacity(4, 8))
    assert places(state) == used
    assert not any(array.any() for arrays in state.arrays for array in arrays)


def test_few_buffers_are_pooled_and_the_oldest_go_first() -> None:
    pool = BufferPool()
    for rows in range(1, MOST_WAITING + 3):
        pool.give(Buffers([[np.zeros((rows, 2))]]))
    assert len(pool) == MOST_WAITING == 4
    assert pool.take([(1, 2)]) is None
    assert pool.take([(2, 2)]) is None
    newest = pool.take([(6, 2)])
    assert newest is not None
    assert newest.sets[0][0].shape == (6, 2)
    assert pool.take([(6, 2)]) is None


def test_the_garbage_collector_may_give_buffers_back_while_its_thread_takes_some() -> None:
    pool = BufferPool()
    pool.give(Buffers([[np.zeros((1, 2))]]))

    class Collected(np.ndarray):
        """Reading its shape does what a garbage collection would: it returns the buffers of a dropped stream."""

        @property
        def shape(self) -> tuple[int, ...]:  # type: ignore[override]
            pool.give(Buffers([[np.zeros((3, 2))]]))
            return (9, 9)

    pool.give(Buffers([[np.zeros((2, 2)).view(Collected)]]))
    buffers = pool.take([(1, 2)])
    assert buffers is not None
    assert buffers.sets[0][0].shape == (1, 2)
    assert pool.take([(3, 2)]) is not None


def test_buffers_of_other_shapes_stay_in_their_order() -> None:
    pool = BufferPool()
    for rows in (1, 2, 3, 4):
        pool.give(Buffers([[np.zeros((rows, 2))]]))
    assert pool.take([(2, 2)]) is not None
    pool.give(Buffers([[np.zeros((5, 2))]]))
    pool.give(Buffers([[np.zeros((6, 2))]]))
    assert pool.take([(1, 2)]) is None
    assert all(pool.take([(rows, 2)]) is not None for rows in (3, 4, 5, 6))


@pytest.mark.parametrize("kind", ["ort", "trt"])
def test_a_closed_engine_says_so(kind: Kind) -> None:
    engine = engine_of("transformer-tiny", kind)
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))
    engine.close()
    with pytest.raises(ConfigError, match="this engine is closed: load the bundle again"):
        engine.step(np.full((2, 1), 7), state, Want.LOGITS)
    with pytest.raises(ConfigError, match="this engine is closed"):
        decode(engine, [[5]])
    engine.release(state)
    engine.close()
