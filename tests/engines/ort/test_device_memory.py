"""State on a device: the same tokens and beams; only tokens are copied in, only requested outputs are copied out."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from fatdeploy.errors import BackendUnavailable, SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.doctor.cuda_driver import cuda_here
from fatdeploy.runtimes.engines.ort.device_memory import OrtCudaDevice
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.ort.row_graphs import ROWS, gathered_name, row_graph, shape_name, zero_graph
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.spec import TensorSpec
from tests.support.bundles import bundle_of, model_of, shared_bundle
from tests.support.devices.counting import CountingDevice, on_device, seen
from tests.support.engines.equalities import BEAMS, SAMPLES, assert_alike, sources_of, tokens_of

PRESETS = ["transformer-tiny", "fast-tiny", "at-tiny", "rnn-tiny", "fat-tiny"]
TINY = "transformer-tiny"
GREEDY = DecodeOptions(max_new_tokens=24)
TENSORS = (
    TensorSpec("a", "float32", ("rows", 2, 3)),
    TensorSpec("b", "float16", ("rows", 4)),
    TensorSpec("c", "bool", ("rows", "source")),
    TensorSpec("d", "int64", ("rows",)),
)


def counts(engine: OrtEngine) -> CountingDevice:
    assert isinstance(engine.device, CountingDevice)
    return engine.device


@pytest.mark.parametrize("preset", PRESETS)
def test_every_search_on_a_device_returns_the_references_tokens(preset: str) -> None:
    engine, reference, sources = on_device(bundle_of(preset)), EagerEngine(model_of(preset)), sources_of(preset)
    for options in (GREEDY, BEAMS, SAMPLES):
        expected = decode(reference, sources, options)
        assert_alike(decode(engine, sources, options), expected)
        # In reused buffers, and each source alone.
        assert_alike(decode(engine, sources, options), expected)
        assert_alike([decode(engine, [source], options)[0] for source in sources[:3]], expected[:3])


def test_a_parallel_model_and_its_lengths_come_from_a_device() -> None:
    preset = "transformer-nat-tiny"
    sources = sources_of(preset)
    expected = decode(EagerEngine(model_of(preset)), sources)
    assert tokens_of(decode(on_device(bundle_of(preset)), sources)) == tokens_of(expected)


def test_a_standard_graph_runs_on_a_device() -> None:
    preset = "fat-tiny"
    sources = sources_of(preset)
    expected = decode(EagerEngine(model_of(preset)), sources, BEAMS)
    assert_alike(decode(on_device(bundle_of(preset, "standard")), sources, BEAMS), expected)


@pytest.mark.parametrize("preset", [TINY, "fat-tiny"])
def test_a_prefix_in_one_call_is_the_prefix_token_by_token(preset: str) -> None:
    engine, [source, *_] = on_device(bundle_of(preset)), sources_of(preset)
    tokens = decode(engine, [source], GREEDY)[0].tokens
    rest = DecodeOptions(prefix=tokens[:9], max_new_tokens=24 - 9)
    assert decode(engine, [source], rest)[0].tokens == tokens


@pytest.mark.parametrize(
    ("want", "names", "n_bytes"),
    [(Want.TOPK, ("top_log_probs", "top_ids"), 2 * 16 * (4 + 8)), (Want.LOGITS, ("logits",), 2 * 64 * 4)],
)
def test_a_step_copies_tokens_and_position_in_and_requested_outputs_out(
    want: Want, names: tuple[str, ...], n_bytes: int
) -> None:
    engine = on_device(bundle_of(TINY))
    state = engine.encode(np.array([[5, 6, 7], [8, 9, 3]]), np.ones((2, 3), bool), Capacity(1, 64))
    engine.step(np.array([[1], [1]]), state, want)
    device = counts(engine)
    before, bytes_in, allocated = device.copies.copy(), device.bytes_in, device.allocated
    for _ in range(10):
        out = engine.step(np.array([[9], [4]]), state, want)
    spec = engine.spec
    assert device.copies - before == {spec.tokens.name: 10, spec.position.name: 10}
    assert device.bytes_in - bytes_in == 10 * (2 * 8 + 2 * 8)  # one position per row
    assert device.allocated == allocated
    assert [name for name, array in vars(out).items() if array is not None] == [*names]
    assert sum(array.nbytes for array in device.results) == n_bytes


def test_state_stays_where_it_is_for_250_steps_and_serves_the_next_decode_as_zeros() -> None:
    engine = on_device(bundle_of("at-tiny"))
    source, mask = np.array([[5, 6, 7]]), np.ones((1, 3), bool)
    state = engine.encode(source, mask, Capacity(2, 256))
    first = np.array(engine.step(np.array([[1]]), state, Want.LOGITS).logits)
    engine.reorder(state, np.array([0, 0]))
    places = [array.value.data_ptr() for arrays in state.arrays for array in arrays]
    allocated = counts(engine).allocated
    for index in range(250):
        engine.step(np.array([[index % 50 + 3], [9]]), state, Want.TOPK)
        engine.reorder(state, np.array([1, 0]))
    assert [array.value.data_ptr() for arrays in state.arrays for array in arrays] == places
    assert counts(engine).allocated == allocated
    buffers = state.buffers
    engine.release(state)
    assert not any(seen(array).any() for arrays in buffers.sets for array in arrays)
    again = engine.encode(source, mask, Capacity(2, 256))
    assert again.buffers is buffers
    np.testing.assert_array_equal(engine.step(np.array([[1]]), again, Want.LOGITS).logits, first)


def test_one_row_needs_no_second_set_of_buffers() -> None:
    engine = on_device(bundle_of(TINY))
    single, double = (
        engine.encode(np.ones((n, 2), np.int64) * 5, np.ones((n, 2), bool), Capacity(1, 8)) for n in (1, 2)
    )
    assert (len(single.arrays), len(double.arrays)) == (1, 2)


def test_rows_that_stay_are_not_copied_and_others_change_sets() -> None:
    engine = on_device(bundle_of(TINY))
    state = engine.encode(np.array([[5, 6], [7, 8]]), np.ones((2, 2), bool), Capacity(1, 8))
    engine.step(np.array([[3], [4]]), state, Want.TOPK)
    engine.reorder(state, np.array([0, 1]))
    assert state.turn == 0
    before = [seen(array) for array in state.arrays[0]]
    engine.reorder(state, np.array([1]))
    assert (state.turn, state.rows, len(state.sources[engine.spec.source_mask.name])) == (1, 1, 1)
    for old, new in zip(before, state.arrays[1], strict=True):
        np.testing.assert_array_equal(seen(new)[0], old[1])


def test_a_provider_that_may_write_before_it_reads_gets_two_sets_that_alternate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = on_device(bundle_of(TINY))
    expected = decode(engine, [[5, 6, 7]], GREEDY)
    for part in (engine, engine._binder, engine._memory):  # as with providers=("tensorrt",)
        monkeypatch.setattr(part, "_alternates", True)
    engine.pool.clear()
    state = engine.encode(np.array([[5, 6, 7]]), np.ones((1, 3), bool), Capacity(1, 8))
    engine.step(np.array([[1]]), state, Want.TOPK)
    assert (state.turn, len(state.arrays)) == (1, 2)
    assert decode(engine, [[5, 6, 7]], GREEDY) == expected


def test_a_released_state_and_wrong_rows_are_refused_as_on_the_host() -> None:
    engine = on_device(bundle_of(TINY))
    state = engine.encode(np.array([[5]]), np.ones((1, 1), bool), Capacity(1, 4))
    with pytest.raises(SpecMismatch, match="the state has rows 0…0"):
        engine.reorder(state, np.array([1]))
    with pytest.raises(SpecMismatch, match="past max_target = 4"):
        engine.step(np.ones((1, 5), np.int64), state, Want.TOPK)
    engine.release(state)
    with pytest.raises(SpecMismatch, match="was released"):
        engine.step(np.array([[1]]), state, Want.TOPK)


def ran(graph: bytes, **feeds: Any) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


def test_graphs_written_byte_by_byte_are_valid_onnx_and_compute_the_right_values() -> None:
    for graph in (row_graph(TENSORS), zero_graph(TENSORS)):
        onnx.checker.check_model(onnx.load_from_string(graph), full_check=True)
    draw = np.random.default_rng(0)
    arrays = {
        "a": draw.standard_normal((4, 2, 3)).astype(np.float32),
        "b": draw.standard_normal((4, 4)).astype(np.float16),
        "c": draw.integers(0, 2, (4, 5)).astype(bool),
        "d": np.arange(4),
    }
    rows = np.array([3, 1, 1, 0, 2])
    gathered = ran(row_graph(TENSORS), **arrays, **{ROWS: rows})
    for name, array in arrays.items():
        np.testing.assert_array_equal(gathered[gathered_name(name)], array[rows])
    shapes = {shape_name(name): np.array(array.shape) for name, array in arrays.items()}
    for name, array in ran(zero_graph(TENSORS), **shapes).items():
        assert (array.shape, array.dtype, array.any()) == (arrays[name].shape, arrays[name].dtype, False)


def test_a_missing_device_and_one_without_memory_raise_our_errors() -> None:
    with pytest.raises(BackendUnavailable, match=r"the GPU has no 4,096 bytes for an array \[32, 32\] .*batch_tokens"):
        OrtCudaDevice(onnxruntime).empty("float32", (32, 32))


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_here().devices, reason="there is no CUDA device here")
@pytest.mark.parametrize("preset", PRESETS)
def test_every_search_on_a_gpu_returns_the_references_tokens(preset: str) -> None:
    bundle = shared_bundle(
        f"{preset}-ort-cuda",
        lambda folder: write_bundle(model_of(preset), folder, origin=Origin(name=preset), target="ort-cuda"),
    )
    engine, sources = OrtEngine(bundle, OrtOptions(providers=("cuda",))), sources_of(preset)
    for options in (GREEDY, BEAMS):
        assert_alike(decode(engine, sources, options), decode(EagerEngine(model_of(preset)), sources, options))
