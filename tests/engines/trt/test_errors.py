"""Everything that can go wrong with plans: our own error that says what to do, and nothing left on the device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.errors import BackendUnavailable, BundleError, DeviceFailed, OutOfDeviceMemory, SpecMismatch
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.contract import GraphTensor
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.engines.trt.device import GpuIdentity
from fatdeploy.runtimes.engines.trt.engine import TrtEngine
from tests.support.bundles import bundle_of
from tests.support.devices.cpu import HERE, CpuDevice, CpuPlan, plans_of, ranges, trt_engine, with_plans

SOURCE, MASK = np.array([[5, 6, 7], [8, 9, 4]]), np.ones((2, 3), bool)
BEAMS = DecodeOptions(num_beams=3, max_new_tokens=12)


def refused(bundle: Bundle, here: GpuIdentity = HERE) -> str:
    """Return the message of an engine that cannot be opened, and check that it leaks nothing."""
    device = CpuDevice(bundle, here)
    with pytest.raises((BackendUnavailable, BundleError)) as caught:
        TrtEngine(bundle, device)
    assert device.leaked == 0
    assert device.closed
    return str(caught.value)


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny"])
def test_a_device_that_is_full_at_any_allocation_is_an_error_and_the_engine_goes_on(preset: str) -> None:
    expected = decode(trt_engine(preset), [[5, 6, 7]], BEAMS)
    bundle = plans_of(preset)
    device = CpuDevice(bundle)
    engine = TrtEngine(bundle, device)
    failures = 0
    for number in range(20):
        device.fail_at = number
        try:
            hypotheses = decode(engine, [[5, 6, 7]], BEAMS)
        except OutOfDeviceMemory:
            failures += 1
            continue
        assert hypotheses == expected
        break
    assert failures >= 2
    device.fail_at = None
    assert decode(engine, [[5, 6, 7]], BEAMS) == expected
    engine.close()
    assert (device.leaked, device.pinned_now) == (0, 0)


def test_pooled_memory_is_freed_when_another_decode_needs_it() -> None:
    bundle = plans_of("transformer-tiny")
    device = CpuDevice(bundle)
    engine = TrtEngine(bundle, device)
    wanted = trt_engine("transformer-tiny")
    options = DecodeOptions(max_new_tokens=4)
    expected = decode(wanted, [[5] * 200] * 8, options)
    decode(engine, [[5] * 200] * 8, options)
    device.limit = sum(map(len, device.memory.values())) + 1000
    assert decode(engine, [[5] * 40] * 8, options)  # another shape, for which there is no room beside the first
    assert decode(engine, [[5] * 200] * 8, options) == expected
    device.limit = 1000
    with pytest.raises(OutOfDeviceMemory, match="the device has no"):
        decode(engine, [[5] * 90], options)
    assert not device.memory
    engine.close()
    assert (device.leaked, device.pinned_now) == (0, 0)


def test_a_failed_run_names_plan_profile_and_sizes_and_its_memory_is_not_reused() -> None:
    bundle = plans_of("transformer-tiny")
    device = CpuDevice(bundle)
    engine = TrtEngine(bundle, device)
    for steps in (0, 1, 5):  # the first run, the recorded run, and a new shape after them
        state = engine.encode(SOURCE, MASK, Capacity(1, 32))
        for _ in range(steps):
            engine.step(np.full((2, 1), 7), state, Want.LOGITS)
        device.fail_execution = True
        message = r"^engines/decoder-.*\.plan, profile 1 \(batch 2, rows 2, source 16, step 2\): .*could not be asked"
        with pytest.raises(DeviceFailed, match=message):
            engine.step(np.full((2, 2), 7), state, Want.LOGITS)
        assert device.recording is None
        before = len(device.memory)
        with pytest.raises(DeviceFailed, match=r"^engines/encoder-.*profile 1 \(batch 2, source 16\)"):
            engine.encode(SOURCE, MASK, Capacity(1, 32))
        assert len(device.memory) <= before
        device.fail_execution = False
        memory = state.memory
        engine.release(state)
        again = engine.encode(SOURCE, MASK, Capacity(1, 32))
        assert memory.closed
        assert again.memory is not memory
        engine.release(again)
    engine.close()
    assert (device.leaked, device.pinned_now) == (0, 0)


@pytest.mark.parametrize(
    ("sizes", "call", "message"),
    [
        (
            {"source": 8},
            lambda engine: decode(engine, [[5] * 9]),
            r"profile 0 takes 1…8 source tokens \(axis 1 of source_mask\), found 9.*--profile source=1:9$",
        ),
        (
            {"batch": 2},
            lambda engine: decode(engine, [[5]] * 3),
            r"profile 0 takes 1…2 sources \(axis 0 of source_mask\), found 3",
        ),
        (
            {"rows": 5},
            lambda engine: decode(engine, [[5]] * 2, BEAMS),
            r"^decoder refused, no profile of engines/decoder-.* fits: profile 0 takes 1…5 rows \(axis 0 of tokens\), "
            "found 6",
        ),
    ],
    ids=["source", "batch", "rows"],
)
def test_sizes_that_no_profile_takes_are_refused_with_tensor_axis_and_ranges_before_anything_is_allocated(
    sizes: dict[str, int], call: Callable[[TrtEngine], object], message: str, tmp_path: Path
) -> None:
    profile = ranges(**{"batch": 4, "rows": 16, "source": 64, "step": 4, **sizes})
    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle", (profile,))
    device = CpuDevice(bundle)
    engine = TrtEngine(bundle, device)
    with pytest.raises(SpecMismatch, match=message):
        call(engine)
    assert not device.memory


def test_every_profile_that_does_not_fit_is_named(tmp_path: Path) -> None:
    profiles = tuple(ranges(batch=batch, rows=8, source=source, step=4) for batch, source in ((1, 64), (4, 8)))
    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle", profiles)
    engine = TrtEngine(bundle, CpuDevice(bundle))
    assert decode(engine, [[5] * 64], DecodeOptions(max_new_tokens=2))
    assert decode(engine, [[5] * 8] * 4, DecodeOptions(max_new_tokens=2))
    with pytest.raises(SpecMismatch, match=r"profile 0 takes 1…1 sources .*, found 2; profile 1 takes 1…8 source"):
        decode(engine, [[5] * 9] * 2)


def test_a_target_of_a_parallel_model_that_no_profile_takes_is_refused(tmp_path: Path) -> None:
    bundle = with_plans(
        bundle_of("transformer-nat-tiny", "standard"),
        tmp_path / "bundle",
        (ranges(batch=2, rows=8, source=64, step=2),),
    )
    device = CpuDevice(bundle)
    engine = TrtEngine(bundle, device)
    state = engine.encode(SOURCE, MASK, Capacity(1, 8))
    with pytest.raises(SpecMismatch, match=r"profile 0 takes 1…2 tokens per step \(axis 1 of tokens\), found 3"):
        engine.step(np.full((2, 3), 7), state, Want.LOGITS)
    engine.release(state)
    engine.close()
    assert device.leaked == 0


def test_a_step_past_max_target_is_refused_and_the_state_goes_on() -> None:
    engine = trt_engine("transformer-tiny")
    state = engine.encode(SOURCE, MASK, Capacity(1, 9999))
    for _ in range(15):
        engine.step(np.full((2, 17), 7), state, Want.HIDDEN)
    with pytest.raises(SpecMismatch, match="a step to position 257 is past max_target = 256"):
        engine.step(np.full((2, 2), 7), state, Want.LOGITS)
    assert engine.step(np.full((2, 1), 7), state, Want.LOGITS).logits.shape == (2, 1, 64)


def test_a_plan_of_another_version_or_gpu_is_refused_with_both_named() -> None:
    bundle = plans_of("transformer-tiny")
    message = refused(bundle, replace(HERE, version="1.8.0", compute_capability="12.0"))
    assert "has no plans for tensorrt-rtx 1.8.0 on test GPU (compute capability 12.0)" in message
    assert "encoder-tensorrt-rtx-1.7.1-sm89.plan is for tensorrt-rtx 1.7.1 and compute capability 8.9" in message
    assert "decoder-tensorrt-rtx-1.7.1-sm89.plan is for tensorrt-rtx 1.7.1 and compute capability 8.9" in message
    assert message.endswith(f"fatdeploy build {bundle.path}")
    assert "is for tensorrt-rtx 1.7.1;" in refused(bundle, replace(HERE, flavour="tensorrt", version="10.16.1"))


def test_among_plans_of_several_gpus_those_for_this_one_are_run(tmp_path: Path) -> None:
    standard = bundle_of("transformer-tiny", "standard")
    bundle = with_plans(standard, tmp_path / "bundle")
    others = [replace(plan, compute_capabilities=("12.0",)) for plan in bundle.manifest.plans]
    both = write_manifest(bundle.path, replace(bundle.manifest, plans=(*others, *bundle.manifest.plans)))
    assert decode(TrtEngine(both, CpuDevice(both)), [[5, 6]], BEAMS)


def test_plans_of_another_graph_and_bundles_without_plans_are_refused(tmp_path: Path) -> None:
    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle")
    other = [replace(plan, graph_sha256="0" * 64) for plan in bundle.manifest.plans]
    changed = write_manifest(bundle.path, replace(bundle.manifest, plans=tuple(other)))
    assert "sm89.plan is for another graph" in refused(changed)
    none = write_manifest(bundle.path, replace(bundle.manifest, plans=()))
    message = refused(none)
    assert "there is no plan of the encoder; there is no plan of the decoder. Build them on this machine" in message


def test_plans_run_where_their_graphs_were_dropped(tmp_path: Path) -> None:
    from fatdeploy.runtimes.engines.trt.build.drop import drop_graphs

    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle")
    drop_graphs(bundle.path)
    # The test device runs the graph itself, which is in another folder.
    dropped, device = read_bundle(bundle.path), CpuDevice(plans_of("transformer-tiny"))
    assert decode(TrtEngine(dropped, device), [[5, 6]], BEAMS) == decode(
        trt_engine("transformer-tiny"), [[5, 6]], BEAMS
    )


@pytest.mark.parametrize("content", [b"", b"a plan", b"a plan of onnxruntime: encoder and more"], ids=repr)
def test_a_damaged_plan_is_refused_by_its_hash_and_by_the_loader(content: bytes, tmp_path: Path) -> None:
    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle")
    bundle.file(bundle.manifest.plans[0].file).write_bytes(content)
    with pytest.raises(BundleError, match=r"encoder-tensorrt-rtx-1\.7\.1-sm89\.plan: expected"):
        read_bundle(bundle.path)
    # As if somebody had written a manifest for it.
    assert "cannot be loaded: it is damaged" in refused(write_manifest(bundle.path, bundle.manifest))


def test_a_plan_that_is_not_the_contracts_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = CpuDevice.load

    def changed(device: CpuDevice, path: Path, record: object) -> CpuPlan:
        plan = loaded(device, path, record)  # type: ignore[arg-type]
        first, *rest = (tensor for tensor in plan.tensors if tensor.name != plan.spec.source_mask.name)
        plan.tensors = (replace(first, dtype="int32"), *rest, GraphTensor("more", "output", "float32", (2,)))
        return plan

    monkeypatch.setattr(CpuDevice, "load", changed)
    message = refused(plans_of("transformer-tiny"))
    assert "input source_mask is missing; output more is not in the contract" in message
    assert "source must be an input, int64 [-1, -1], found an input, int32 [-1, -1]" in message


def test_wrong_profiles_and_aliases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = plans_of("fat-tiny")
    monkeypatch.setattr(CpuPlan, "aliased", lambda plan, name: "tokens" if name.startswith("present.") else None)
    message = refused(bundle)
    assert "present.sums.0 must be written over no input, found tokens" in message
    monkeypatch.setattr(CpuPlan, "profile_shapes", lambda plan, name, profile: ((1,), (1,), (2,)))
    assert "profile 0 of source must be ((1, 1), (1, 256), (1, 256)), found ((1,), (1,), (2,))" in refused(bundle)
    monkeypatch.setattr(CpuPlan, "n_profiles", 3)
    assert "the manifest says 2 profiles, found 3" in refused(bundle)
