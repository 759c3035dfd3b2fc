"""Rows at different positions: each is what it is alone, and new sources take the places of finished ones."""

import numpy as np
import pytest

from fatdeploy.errors import SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.engines.ort.engine import OrtEngine, OrtState
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.ort.refills import refilled_width
from fatdeploy.runtimes.engines.protocol import Capacity, Refilling, Want
from tests.support.bundles import bundle_of, model_of
from tests.support.engines.kinds import engine_of
from tests.support.engines.refills import STEPS, Script, alone, batch, refilled_logits, scripts
from tests.support.quantized import quantized_of

PRESETS = (
    "transformer-tiny",
    "fat-tiny",
    "at-tiny",
    "rnn-tiny",
    pytest.param("fat-published-tiny", marks=pytest.mark.slow),
)


def engine_with(preset: str, precision: str, threads: int = 1) -> OrtEngine:
    bundle = bundle_of(preset) if precision == "fp32" else quantized_of(preset, precision)  # type: ignore[arg-type]
    return OrtEngine(bundle, OrtOptions(threads=threads))


@pytest.mark.parametrize("per_source", [1, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_refilled_sources_give_the_references_logits(preset: str, per_source: int) -> None:
    engine, draw = engine_with(preset, "fp32"), np.random.default_rng(per_source)
    waiting = scripts(draw, [30, 21, 28, *draw.integers(1, 30, 9).tolist()], per_source)
    results, _ = refilled_logits(engine, waiting, per_source, places=3)
    reference = EagerEngine(model_of(preset))
    for script, logits in zip(waiting, results, strict=True):
        expected = alone(reference, script)
        bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=bound)
        assert (logits.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("per_source", [1, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_refilled_sources_are_bit_for_bit_what_they_are_alone_in_int8(
    preset: str, per_source: int, threads: int
) -> None:
    engine, draw = engine_with(preset, "int8", threads), np.random.default_rng(10 + per_source)
    # Long ones first, then short ones, then a long one again: the arrays are cut and grow.
    lengths = [60, 41, 57, 50, *draw.integers(1, 12, 14).tolist(), 60, *draw.integers(1, 30, 8).tolist()]
    waiting = scripts(draw, lengths, per_source)
    results, widths = refilled_logits(engine, waiting, per_source, places=4)
    assert (widths[0], max(widths[-1:]) <= 32, min(widths) <= 12, max(widths)) == (60, True, True, 60)
    assert all(width % 4 == 0 for width in widths)
    for script, logits in zip(waiting, results, strict=True):
        np.testing.assert_array_equal(logits, alone(engine, script))


def test_refilled_sources_are_what_they_are_alone_in_int4() -> None:
    engine, draw = engine_with("transformer-tiny", "int4"), np.random.default_rng(3)
    waiting = scripts(draw, draw.integers(1, 40, 12).tolist(), 1)
    waiting.sort(key=lambda script: -len(script.source))
    results, _ = refilled_logits(engine, waiting, 1, places=3)
    for script, logits in zip(waiting, results, strict=True):
        expected = alone(engine, script)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


def ragged(engine: OrtEngine, capacity: Capacity = Capacity(1, STEPS)) -> tuple[OrtState, list[Script]]:  # noqa: B008
    """Return a state of three sources whose rows are at positions 4, 0 and 4."""
    draw = np.random.default_rng(7)
    waiting = scripts(draw, [9, 7, 5, 8], 1)
    state = engine.encode(*batch([script.source for script in waiting[:3]]), capacity)
    engine.step(np.tile(np.arange(3, 7), (3, 1)), state, Want.HIDDEN)
    engine.refill(state, np.array([1]), engine.encode(*batch([waiting[3].source]), Capacity(1, 1)))
    return state, [waiting[0], waiting[3], waiting[2]]


@pytest.mark.parametrize("preset", PRESETS)
def test_several_tokens_for_rows_at_different_positions_are_those_of_each_row_alone(preset: str) -> None:
    engine = engine_with(preset, "fp32")
    state, rows = ragged(engine)
    tokens = np.array([[11, 12, 13], [14, 15, 16], [17, 18, 19]])
    out = engine.step(tokens, state, Want.LOGITS)
    best = engine.step(tokens[:, :2], state, Want.TOPK)
    assert (state.position, state.buffers.position.tolist()) == (9, [9, 5, 9])
    assert best.top_ids.shape == (3, 2, 16)
    for row, script in enumerate(rows):
        before = [] if row == 1 else [3, 4, 5, 6]
        fed = np.array([[*before, *tokens[row]]])
        expected = alone(EagerEngine(model_of(preset)), Script(script.source, fed))[:, len(before) :]
        np.testing.assert_allclose(out.logits[[row]], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_keep_their_positions_when_they_move(preset: str) -> None:
    engine = engine_with(preset, "int8")
    state, rows = ragged(engine, Capacity(2, STEPS))
    engine.reorder(state, np.array([1, 1, 2, 2, 0, 0]))
    assert (state.position, state.buffers.position.tolist()) == (4, [0, 0, 4, 4, 4, 4])
    fed = np.arange(20, 26)[:, None]
    logits = engine.step(fed, state, Want.LOGITS).logits.copy()
    for row, source in enumerate((1, 1, 2, 2, 0, 0)):
        before = [] if source == 1 else [3, 4, 5, 6]
        script = Script(rows[source].source, np.array([[*before, *fed[row]]]))
        # Alone its first tokens are fed one by one, and integers may round otherwise than in one call.
        if source == 1:
            np.testing.assert_array_equal(logits[row], alone(engine, script)[0, -1:])
        else:
            assert np.abs(logits[row] - alone(engine, script)[0, -1:]).max() < 0.05 * np.abs(logits[row]).max()
    # The furthest rows leave.
    engine.reorder(state, np.array([0]))
    assert (state.position, state.buffers.written) == (1, 5)
    engine.step(np.full((1, 13), 5), state, Want.HIDDEN)
    with pytest.raises(SpecMismatch, match="a step to position 15 is past max_target = 14"):
        engine.step(np.array([[5]]), state, Want.HIDDEN)


def test_a_step_past_the_capacity_of_one_row_is_refused() -> None:
    engine = engine_with("transformer-tiny", "fp32")
    state, _ = ragged(engine)
    with pytest.raises(SpecMismatch, match="a step to position 15 is past max_target = 14"):
        engine.step(np.full((3, 11), 5), state, Want.HIDDEN)
    assert engine.step(np.full((3, 10), 5), state, Want.HIDDEN).hidden.shape == (3, 10, 32)


def test_a_refill_of_every_place_allows_several_tokens_in_one_run_again() -> None:
    engine = engine_with("transformer-tiny", "fp32")
    state, _ = ragged(engine)
    engine.refill(state, np.array([2, 0, 1]), engine.encode(*batch([np.array([5, 6])] * 3), Capacity(1, 1)))
    assert (state.position, state.ragged, state.buffers.written) == (0, False, 4)
    engine.step(np.full((3, 6), 5), state, Want.HIDDEN)
    assert (6, Want.HIDDEN) in state.bound
    assert state.buffers.written == 6


def test_what_a_finished_source_left_behind_is_never_read() -> None:
    engine = engine_with("transformer-tiny", "int8")
    state, rows = ragged(engine)
    for array in state.arrays[0]:
        array[1] = np.nan
    tokens = rows[1].fed[:, :8]
    for step in range(tokens.shape[1]):
        fed = np.array([[5], tokens[0, [step]], [6]])
        logits = engine.step(fed, state, Want.LOGITS).logits[1].copy()
    np.testing.assert_array_equal(logits, alone(engine, Script(rows[1].source, tokens))[0, -1:])
    arrays = [array for arrays in state.arrays for array in arrays]
    engine.release(state)
    assert not any(array[:, :, : 4 + tokens.shape[1]].any() for array in arrays)
    assert not state.buffers.position.any()


def test_bindings_are_kept_unless_the_arrays_move_and_the_callers_arrays_stay_as_they_are() -> None:
    engine = engine_with("fat-tiny", "fp32")
    source, mask = batch([np.arange(3, 23), np.arange(3, 20)])
    before = source.copy(), mask.copy()
    state = engine.encode(source, mask, Capacity(1, 8))
    engine.step(np.array([[5], [6]]), state, Want.LOGITS)
    bound, addresses = dict(state.bound), {name: array.ctypes.data for name, array in state.sources.items()}
    engine.refill(state, np.array([1]), engine.encode(*batch([np.array([7, 8, 9])]), Capacity(1, 1)))
    assert state.bound == bound
    assert {name: array.ctypes.data for name, array in state.sources.items()} == addresses
    np.testing.assert_array_equal(state.sources[engine.spec.source.name][1], [7, 8, 9, *[0] * 17])
    assert all(np.array_equal(now, then) for now, then in zip((source, mask), before, strict=True))
    engine.refill(state, np.array([0]), engine.encode(*batch([np.arange(3, 16)]), Capacity(1, 1)))
    # 13 tokens of at most 20: 16 columns are more than three quarters.
    assert (state.bound, state.sources[engine.spec.source.name].shape) == (bound, (2, 20))
    engine.refill(state, np.array([0]), engine.encode(*batch([np.arange(3, 15)]), Capacity(1, 1)))
    assert (state.bound, state.sources[engine.spec.source.name].shape) == ({}, (2, 12))
    assert state.sources[engine.spec.memory[0].name].shape == (2, 2, 12, 16)


@pytest.mark.parametrize(
    ("lengths", "width", "expected"),
    [([60, 3], 60, 60), ([46, 3], 60, 60), ([44, 45], 60, 60), ([44, 3], 60, 44), ([1], 60, 4), ([13], 12, 14)],
    ids=str,
)
def test_arrays_are_cut_to_whole_multiples_when_three_quarters_are_enough(
    lengths: list[int], width: int, expected: int
) -> None:
    assert refilled_width(np.array(lengths), width, widest=14 if width == 12 else 60, multiple=4) == expected


@pytest.mark.parametrize(
    ("places", "sources", "message"),
    [
        ([3], 1, r"^refill refused: places must be different sources in 0…2, found \[3\]$"),
        ([-1], 1, r"places must be different sources in 0…2, found \[-1\]$"),
        ([1, 1], 2, r"places must be different sources in 0…2, found \[1, 1\]$"),
        ([0, 1], 1, r"^refill refused: 1 new sources for 2 places$"),
        ([], 1, r"^refill refused: places must be int64 \[n\], one per new source, found float64 \[0\]$"),
    ],
    ids=str,
)
def test_places_that_the_state_does_not_have_are_refused(places: list[int], sources: int, message: str) -> None:
    engine = engine_with("transformer-tiny", "fp32")
    state, _ = ragged(engine)
    with pytest.raises(SpecMismatch, match=message):
        engine.refill(state, np.array(places), engine.encode(*batch([np.array([5])] * sources), Capacity(1, 1)))


def test_newcomers_that_do_not_fit_are_refused_and_the_state_is_unchanged() -> None:
    engine = engine_with("transformer-tiny", "fp32")
    state, _ = ragged(engine)
    before = {name: array.copy() for name, array in state.sources.items()}
    longer = engine.encode(*batch([np.arange(3, 13)]), Capacity(1, 4))
    with pytest.raises(
        SpecMismatch, match="a new source has 10 tokens, the state was encoded for sources of at most 9"
    ):
        engine.refill(state, np.array([0]), longer)
    stepped = engine.encode(*batch([np.arange(3, 6)]), Capacity(1, 4))
    engine.step(np.array([[5]]), stepped, Want.HIDDEN)
    with pytest.raises(SpecMismatch, match="a state that was just encoded, found steps"):
        engine.refill(state, np.array([0]), stepped)
    engine.release(stepped)
    with pytest.raises(SpecMismatch, match="this state was released"):
        engine.refill(state, np.array([0]), stepped)
    assert all(np.array_equal(array, before[name]) for name, array in state.sources.items())
    assert state.buffers.position.tolist() == [4, 0, 4]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_some_of_the_encoded_sources_join_and_the_others_wait(precision: str) -> None:
    engine = engine_with("transformer-tiny", precision)
    state, _ = ragged(engine)
    sources = [np.arange(3, 12), np.arange(20, 24), np.arange(30, 37)]
    newcomers = engine.encode(*batch(sources), Capacity(1, 1))
    engine.refill(state, np.array([2]), newcomers, slice(0, 1))
    engine.refill(state, np.array([0, 1]), newcomers, slice(1, 3))
    logits = engine.step(np.full((3, 1), 5), state, Want.LOGITS).logits
    for place, source in zip((2, 0, 1), sources, strict=True):
        expected = alone(engine, Script(source, np.array([[5]])))[0]
        np.testing.assert_allclose(logits[place], expected, atol=0 if precision == "int8" else 1e-5)
    with pytest.raises(SpecMismatch, match=r"^refill refused: 1 new sources for 2 places$"):
        engine.refill(state, np.array([0, 1]), newcomers, slice(2, 5))


def test_padding_does_not_make_a_newcomer_longer() -> None:
    engine = engine_with("transformer-tiny", "int8")
    state, _ = ragged(engine)
    source, mask = np.zeros((1, 20), np.int64), np.zeros((1, 20), bool)
    source[0, :9], mask[0, :9] = np.arange(3, 12), True
    engine.refill(state, np.array([2]), engine.encode(source, mask, Capacity(1, 1)))
    logits = engine.step(np.full((3, 1), 5), state, Want.LOGITS).logits[2].copy()
    np.testing.assert_array_equal(logits, alone(engine, Script(np.arange(3, 12), np.array([[5]])))[0])


def test_only_engines_with_a_position_per_row_refill() -> None:
    assert isinstance(engine_with("transformer-tiny", "fp32"), Refilling)
    assert engine_with("fat-tiny", "fp32").refills
    assert not isinstance(engine_of("transformer-tiny", "eager"), Refilling)
    assert not isinstance(engine_of("transformer-tiny", "trt"), Refilling)
    for engine in (engine_of("fast-tiny", "ort"), engine_of("transformer-tiny", "standard")):
        assert isinstance(engine, Refilling)
        assert not engine.refills
        state = engine.encode(np.array([[5, 6]]), np.ones((1, 2), bool), Capacity(1, 4))
        with pytest.raises(SpecMismatch, match="all rows of this engine are at one position; decode whole batches"):
            engine.refill(state, np.array([0]), state)
