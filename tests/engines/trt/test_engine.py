"""Plans on the test device: the same memory at every step, few bytes over the bus, replayed recordings."""

import math
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from fatdeploy.bundle import write_manifest
from fatdeploy.errors import SpecMismatch
from fatdeploy.manifest import PROBES
from fatdeploy.plans import Profile, SizeRange
from fatdeploy.runtimes.bench.timing import stopwatch_of, timed_decode
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.engines.row_moves import Strips, written_strips
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest, build_engines
from fatdeploy.runtimes.engines.trt.device import GpuIdentity
from fatdeploy.runtimes.engines.trt.engine import TrtEngine, TrtState
from fatdeploy.runtimes.engines.trt.memory import MOST_WAITING, DecodeMemory, DecodeMemoryShape
from fatdeploy.runtimes.proof.probes import read_probes, verified
from fatdeploy.spec import cache_specs, recurrent_specs
from tests.support.bundles import bundle_of, half_of
from tests.support.devices.cpu import CpuContext, CpuDevice, CpuPlan, Opened, plans_of, trt_engine, with_plans
from tests.support.engines.kinds import places

PRESETS = ["transformer-tiny", "fat-tiny"]
SOURCE, MASK = np.array([[5, 6, 7], [8, 9, 4]]), np.ones((2, 3), bool)
SOURCES = [np.random.default_rng(3).integers(3, 64, length).tolist() for length in (1, 2, 7, 31, 256)]
ONE, UP_TO_4 = SizeRange(least=1, usual=1, most=1), SizeRange(least=1, usual=4, most=4)
BEAMS = DecodeOptions(num_beams=4, num_return_sequences=4, max_new_tokens=24)


def started(preset: str = "transformer-tiny", **options: bool) -> tuple[TrtEngine, CpuDevice]:
    bundle = plans_of(preset)
    device = CpuDevice(bundle)
    return TrtEngine(bundle, device, **options), device


def fed(engine: TrtEngine, state: TrtState, steps: int = 5) -> list[np.ndarray]:
    """Return the logits of a few fixed steps."""
    tokens = [np.full((state.rows, 1), 7 + step % 50) for step in range(steps)]
    return [np.array(engine.step(call, state, Want.LOGITS).logits) for call in tokens]


def all_tokens(hypotheses: Sequence[Hypothesis]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.tokens, *(other.tokens for other in hypothesis.alternatives)] for hypothesis in hypotheses]


def bound(device: CpuDevice) -> list[dict[str, Any]]:
    return [context.bound for context in device.open if isinstance(context, CpuContext)]


@pytest.mark.parametrize("preset", PRESETS)
def test_over_500_steps_addresses_stay_and_only_the_first_steps_allocate(preset: str) -> None:
    engine, device = started(preset)
    used: list[object] = []
    for _ in range(2):
        state = engine.encode(SOURCE, MASK, Capacity(1, 256))
        for step in range(250):
            out = engine.step(np.full((2, 1), 3 + step % 60), state, Want.TOPK)
            # A recurrent state alternates between two buffers; the second order is recorded one step later.
            if step > 3:
                used.append((places(state), out.top_ids.ctypes.data, device.n_allocated, device.n_pinned))
        engine.release(state)
    assert len(used) > 490
    assert all(earlier == later for earlier, later in pairwise(used))


@pytest.mark.parametrize("preset", [*PRESETS, "transformer-nat-tiny"])
def test_after_the_first_sentence_of_a_shape_nothing_is_allocated(preset: str) -> None:
    engine, device = started(preset)
    many = [BEAMS, DecodeOptions(max_new_tokens=20, prefix=[5, 6, 7])]
    for options in [DecodeOptions()] if "nat" in preset else many:
        expected = decode(engine, SOURCES, options)
        allocated = device.n_allocated, device.n_pinned
        # Other tokens, other lengths of the same kind: 31 and 32 are one shape, and so are 1, 3 and 16.
        # A parallel model has a shape per target length, which depends on its sources.
        if "nat" not in preset:
            decode(engine, [SOURCES[1] * 4, [9, 10, 11], [12], [13] * 16, [14] * 250], options)
        assert decode(engine, SOURCES, options) == expected
        assert (device.n_allocated, device.n_pinned) == allocated


@pytest.mark.parametrize("preset", PRESETS)
def test_beams_are_those_of_onnxruntime_on_the_same_graphs(preset: str) -> None:
    engine = trt_engine(preset)
    expected = decode(OrtEngine(bundle_of(preset, "standard"), OrtOptions(threads=1)), SOURCES, BEAMS)
    hypotheses = decode(engine, SOURCES, BEAMS)
    assert all_tokens(hypotheses) == all_tokens(expected)
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(
        [hypothesis.score for hypothesis in expected], abs=1e-4
    )
    assert all_tokens(decode(engine, SOURCES, BEAMS)) == all_tokens(expected)


@pytest.mark.parametrize("preset", [*PRESETS, "transformer-nat-tiny"])
def test_the_probes_of_a_bundle_are_met_within_the_bound(preset: str) -> None:
    parity = verified(trt_engine(preset), read_probes(plans_of(preset).file(PROBES)))
    assert parity.tokens > 100
    assert parity.largest_difference <= parity.bound
    assert parity.largest_difference_alone <= parity.bound


@pytest.mark.parametrize(("preset", "not_replayed"), [("transformer-tiny", 1), ("fat-tiny", 2)])
def test_every_step_but_the_first_of_each_role_is_replayed(preset: str, not_replayed: int) -> None:
    engine, device = started(preset)
    expected = fed(engine, engine.encode(SOURCE, MASK, Capacity(1, 40)), 12)
    assert (device.n_captured, device.n_launched) == (not_replayed, 12 - not_replayed)
    plain, device = started(preset, capture=False)
    np.testing.assert_array_equal(fed(plain, plain.encode(SOURCE, MASK, Capacity(1, 40)), 12), expected)
    assert (device.n_captured, device.n_launched) == (0, 0)


def test_a_cache_is_updated_in_place_and_recurrent_state_alternates_between_two_buffers() -> None:
    for preset, distance in (("transformer-tiny", 1), ("fat-tiny", 2)):
        engine, device = started(preset)
        state = engine.encode(SOURCE, MASK, Capacity(1, 8))
        fed(engine, state, 3)
        spec = engine.spec
        steps = [bindings for bindings in bound(device) if spec.tokens.name in bindings]
        assert len(steps) == distance
        for past, present in zip(spec.past, spec.present, strict=True):
            read, written = ({bindings[name.name][1] for bindings in steps} for name in (past, present))
            assert read == written
            assert len(read) == distance
            assert all((bindings[past.name][1] == bindings[present.name][1]) == (distance == 1) for bindings in steps)


def test_only_tokens_position_and_requested_outputs_cross_the_bus() -> None:
    engine, device = started()
    state = engine.encode(SOURCE, MASK, Capacity(1, 32))
    # 16 ids of 8 bytes for each of two sources, and their mask.
    assert (device.uploaded, device.downloaded) == (256 + 256, 0)
    width, vocabulary, k = 32, 64, 16
    expected = {Want.HIDDEN: 0, Want.LOGITS: 4 * vocabulary, Want.TOPK: (4 + 8) * k}
    for want, each in expected.items():
        for _ in range(3):
            before = device.uploaded, device.downloaded
            engine.step(np.full((2, 1), 7), state, want)
            assert (
                device.uploaded - before[0] == 256 + 256
            )  # the position and two ids, each aligned as a tensor must be
            assert device.downloaded - before[1] == 2 * (4 * width + each)


@pytest.mark.parametrize("preset", PRESETS)
def test_only_changed_rows_move_on_the_device_and_only_their_written_positions(preset: str) -> None:
    engine, device = started(preset)
    state = engine.encode(SOURCE, MASK, Capacity(3, 32))
    fed(engine, state, 5)
    before = device.uploaded, device.downloaded
    n_tensors = len(engine.spec.state)
    copies = []
    for rows in ([0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 3, 4], [2, 0, 1, 4, 5, 3]):
        device.moved.clear()
        engine.reorder(state, np.array(rows))
        copies.append(len(device.moved) / n_tensors)
    # Two rows grow to rows 1 to 5; nothing; a swap with one copy to the spare row, two copies; two cycles.
    assert copies == [5, 0, 5, 8]
    strips = {strip for _, _, strip in device.moved}
    if preset == "transformer-tiny":
        assert strips == {Strips(width=5 * 16 * 4, pitch=256 * 16 * 4, count=2)}
    assert (device.uploaded, device.downloaded) == before


def test_strips_are_the_written_positions_of_caches_and_the_whole_of_sums() -> None:
    cache, _ = cache_specs(0, 2, 3, "bfloat16")
    sums, _ = recurrent_specs(0, 2, 4, 3)
    sizes = {"rows": 6, "capacity": 7}
    assert written_strips(cache, sizes, 5) == Strips(width=5 * 3 * 2, pitch=7 * 3 * 2, count=2)
    assert written_strips(sums, sizes, 5) == Strips(width=2 * 4 * 3 * 4, pitch=2 * 4 * 3 * 4, count=1)


def test_a_batch_that_loses_sources_is_computed_in_few_shapes() -> None:
    engine = trt_engine("transformer-tiny")
    source = np.arange(3, 3 + 7 * 4).reshape(7, 4)
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, 32))
    batches = []
    while True:
        fed(engine, state, 1)
        batches.append((state.rows, state.device_batch))
        if state.rows == 1:
            break
        engine.reorder(state, np.arange(state.rows - 1))
    assert batches == [(7, 8), (6, 8), (5, 8), (4, 4), (3, 4), (2, 2), (1, 1)]


def test_a_profile_of_one_size_is_padded_with_unused_rows(tmp_path: Path) -> None:
    only = {"batch": 4, "source": 12, "step": 1}
    sizes = {axis: SizeRange(least=size, usual=size, most=size) for axis, size in only.items()}
    profile = Profile(sizes={**sizes, "rows": SizeRange(least=4, usual=8, most=16)})
    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle", (profile,))
    engine = TrtEngine(bundle, CpuDevice(bundle))
    expected = trt_engine("transformer-tiny")
    for options in (DecodeOptions(max_new_tokens=12, prefix=[5, 6, 7]), BEAMS):
        tokens = all_tokens(decode(engine, SOURCES[:3], options))
        assert tokens == all_tokens(decode(expected, SOURCES[:3], options))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_long_prefix_split_to_fit_profiles_equals_a_single_call(preset: str) -> None:
    engine = trt_engine(preset)
    tokens = np.random.default_rng(1).integers(3, 64, (2, 37))
    reference = OrtEngine(bundle_of(preset, "standard"), OrtOptions(threads=1))
    for want in (Want.LOGITS, Want.TOPK, Want.HIDDEN):
        outs = [
            backend.step(tokens, backend.encode(SOURCE, MASK, Capacity(1, 64)), want) for backend in (engine, reference)
        ]
        for name, expected in vars(outs[1]).items():
            array = getattr(outs[0], name)
            assert (array is None) == (expected is None)
            if expected is not None:
                assert array.shape == expected.shape
                np.testing.assert_allclose(array, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("preset", PRESETS)
def test_leftovers_of_another_decode_are_not_read(preset: str) -> None:
    engine, device = started(preset)
    first = engine.encode(SOURCE, MASK, Capacity(1, 16))
    expected, used = fed(engine, first, 8), places(first)
    engine.release(first)
    for memory in device.memory.values():
        memory[:] = 0xFF  # NaN of any float
    second = engine.encode(SOURCE, MASK, Capacity(1, 16))
    assert places(second) == used
    np.testing.assert_array_equal(fed(engine, second, 8), expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_threads_decode_at_once_each_with_memory_of_its_own(preset: str) -> None:
    engine, device = started(preset)
    options = [DecodeOptions(max_new_tokens=20), DecodeOptions(num_beams=3, max_new_tokens=20)] * 6
    expected = [all_tokens(decode(engine, SOURCES[:4], option)) for option in options]
    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(lambda option: all_tokens(decode(engine, SOURCES[:4], option)), options))
    assert tokens == expected
    engine.close()
    assert device.leaked == 0


def test_two_decodes_at_once_share_no_memory() -> None:
    engine, _ = started()
    engine.release(engine.encode(SOURCE, MASK, Capacity(1, 8)))
    state, other_state = (engine.encode(SOURCE, MASK, Capacity(1, 8)) for _ in range(2))
    assert not set(places(state)) & set(places(other_state))
    assert len(engine.pool) == 0


def test_few_memories_are_pooled_and_the_oldest_are_freed() -> None:
    engine, device = started()
    for beams in range(1, MOST_WAITING + 4):
        engine.release(engine.encode(SOURCE, MASK, Capacity(beams, 8)))
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))  # the oldest is gone: this one is new
    assert len(device.memory) == MOST_WAITING + 1
    engine.release(state)
    engine.close()
    assert (device.leaked, device.pinned_now) == (0, 0)


def test_a_result_that_is_still_referenced_can_be_read_after_the_engine_is_closed() -> None:
    engine, device = started()
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))
    kept = engine.step(np.full((2, 1), 7), state, Want.LOGITS).logits
    before = np.array(kept)
    engine.close()
    assert device.pinned_now == 1
    np.testing.assert_array_equal(kept, before)
    del kept
    assert device.pinned_now == 0


def test_half_precision_halves_memory_and_caches_and_gives_the_same_tokens(tmp_path: Path) -> None:
    half = half_of("transformer-tiny")
    bundle = with_plans(half, tmp_path / "bundle")
    device = CpuDevice(bundle)
    engine, reference = TrtEngine(bundle, device), OrtEngine(half, OrtOptions(threads=1))
    states = [backend.encode(SOURCE, MASK, Capacity(1, 16)) for backend in (engine, reference)]
    rows = math.prod((2, 2, 256, 16)) * 2  # rows, heads, capacity, width, bytes
    first, second = places(states[0])[:2]
    assert second - first == rows
    for token in range(7, 15):
        tokens = np.full((2, 1), token)
        logits, expected = (
            backend.step(tokens, state, Want.LOGITS).logits
            for backend, state in zip((engine, reference), states, strict=True)
        )
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3 * float(np.abs(expected).max()))
        assert (logits.argmax(-1) == expected.argmax(-1)).all()


def test_one_source_runs_in_the_profile_for_one_and_more_in_the_other() -> None:
    engine, device = started()
    for batch, profile in ((1, 0), (2, 1)):
        state = engine.encode(SOURCE[:batch], MASK[:batch], Capacity(1, 8))
        fed(engine, state, 1)
        assert {context.profile for context in device.open if isinstance(context, CpuContext)} == {0, profile}


def test_what_a_build_writes_is_what_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rtx = pytest.importorskip("tensorrt_rtx", reason="comes with the extra rtx")
    half = half_of("transformer-tiny")
    shutil.copytree(half.path, tmp_path / "bundle")
    write_manifest(tmp_path / "bundle", replace(half.manifest, target="tensorrt-rtx"))
    request = BuildRequest(
        flavour="tensorrt-rtx", capabilities=("8.6",), profiles=({}, {"batch": ONE, "rows": UP_TO_4})
    )
    bundle = build_engines(tmp_path / "bundle", request, stage=lambda _: None)
    # The plans are real and only a GPU can load them: this tests their records, sizes and names.
    monkeypatch.setattr(CpuDevice, "load", lambda device, path, record: CpuPlan(device, record))
    device = CpuDevice(bundle, GpuIdentity("test GPU", "tensorrt-rtx", rtx.__version__, "8.6"))
    engine, reference = TrtEngine(bundle, device), OrtEngine(half, OrtOptions(threads=1))
    for sources in ([[5, 6, 7]], [[8] * 20, [9]]):
        hypotheses, expected = (decode(backend, sources, BEAMS) for backend in (engine, reference))
        assert [hypothesis.tokens for hypothesis in hypotheses] == [hypothesis.tokens for hypothesis in expected]
    assert {context.profile for context in device.open if isinstance(context, CpuContext)} == {0, 1}
    with pytest.raises(SpecMismatch, match=r"profile 0 takes 1…8 sources .*; profile 1 takes 1…1 sources"):
        decode(engine, [[5]] * 9)


def test_only_sums_change_places_in_a_model_with_both_kinds_of_state() -> None:
    spec = replace(plans_of("transformer-tiny").spec, state=(*cache_specs(0, 2, 16), *recurrent_specs(1, 2, 4, 16)))
    device = CpuDevice(plans_of("transformer-tiny"))
    memory = DecodeMemory(device, spec, DecodeMemoryShape(batch=2, source=16, rows_per_source=2))
    assert [len(places) for places in memory.state] == [1, 1, 2, 2]
    assert memory.n_sets == 2
    (first, second), (third, fourth) = memory.places(0), memory.places(1)
    assert first[:2] == second[:2] == third[:2] == fourth[:2]
    assert (first[2:], second[2:]) == (fourth[2:], third[2:])
    device.zero(memory.slab.address, memory.slab.n_bytes)
    row = 2 * 4 * 16 * 4
    for place in memory.state[2]:
        device.view(place, 1)[:] = 7
    memory.move_state([1, 0, 2, 3], role=1, position=3)
    # Row 0 of the sums that the next step reads went to row 1; the others, which it writes, stay.
    assert [int(device.view(place + offset, 1)[0]) for place in memory.state[2] for offset in (0, row)] == [7, 0, 0, 7]
    memory.close()
    assert device.leaked == 0


def test_a_state_may_be_released_by_a_thread_in_the_middle_of_a_step() -> None:
    engine, device = started()
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))
    # As when the garbage collector drops a stream there: it must not touch the device or wait for a lock.
    with engine._lock:
        memory = dict(device.memory)
        engine.release(state)
        assert device.memory == memory
    assert len(engine.pool) == 1


def test_a_caller_that_waits_for_a_result_gets_it_before_the_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = started()
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))
    waiting, done = Event(), Event()

    def wait(event: Opened) -> None:
        waiting.set()
        assert done.wait(10)
        assert event in device.open

    monkeypatch.setattr(Opened, "wait", wait)
    with ThreadPoolExecutor(2) as pool:
        stepping = pool.submit(lambda: fed(engine, state, 1))
        assert waiting.wait(10)
        closing = pool.submit(engine.close)
        assert not closing.done()
        done.set()
        assert np.isfinite(stepping.result(10)[0]).all()
        closing.result(10)
    assert device.leaked == 0


def test_the_clock_of_the_device_times_each_step_recorded_or_not() -> None:
    engine, device = started()
    clock = stopwatch_of(engine)
    assert clock is not None
    for _ in range(2):
        times, _ = timed_decode(engine, [np.array(SOURCE[0])], DecodeOptions(max_new_tokens=5), clock)
        # The test device's clock ticks once per run; the encoder's tick came before the first mark.
        assert times.device_steps == (1.0,) * len(times.steps)
    engine.close()
    assert not device.open
