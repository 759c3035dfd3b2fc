"""Engines: real builds by TensorRT-RTX, which needs no GPU for them, and everything refused before a build begins."""

import json
import logging
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import helper

from fatdeploy.bundle import Bundle, graph_hash, read_bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError, ExportFailed, SpecMismatch
from fatdeploy.export.graph_files import read_structure, write_structure
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.presets import PRESETS
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.manifest import DECODER, ENCODER, WEIGHTS, Manifest
from fatdeploy.plans import SizeRange
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.doctor.cuda_driver import Cuda, CudaDevice, cuda_here
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.output_matrix import stored_output_rows
from fatdeploy.runtimes.engines.trt import modules as trt_modules
from fatdeploy.runtimes.engines.trt.build import build as trt_build
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest, TimingCache, build_engines, planned
from fatdeploy.runtimes.engines.trt.build.log import BuildLog
from fatdeploy.runtimes.engines.trt.build.profiles import check_shapes, profiles_from_text, profiles_of, shapes_by_input
from fatdeploy.runtimes.engines.trt.modules import forward, listening, logger_of, tensorrt_module
from fatdeploy.targets import Flavour, Precision
from tests.support.bundles import HALF_PRESETS, bundle_of, half_of, model_of

ROOT = Path(__file__).parents[3]
GPUS = ("8.6", "8.9", "12.0")
RTX = BuildRequest(flavour="tensorrt-rtx", capabilities=GPUS)
VERSION = tensorrt_module("tensorrt-rtx").__version__
NO_GPU = "there is no GPU here"

without_gpu = pytest.mark.skipif(bool(cuda_here().devices), reason="this machine has a GPU")


def copied(bundle: Bundle, folder: Path, **changes: Any) -> Path:
    """Return a copy of a bundle with a changed manifest."""
    shutil.copytree(bundle.path, folder)
    if changes:
        write_manifest(folder, replace(bundle.manifest, **changes))
    return folder


def built(folder: Path, request: BuildRequest = RTX, *, keep_onnx: bool = True) -> Bundle:
    return build_engines(folder, request, stage=lambda _: None, keep_onnx=keep_onnx)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def fat(tmp_path: Path) -> Path:
    return copied(half_of("fat-tiny"), tmp_path / "fat")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


# -- builds ------------------------------------------------------------------------------------------------------------

CASES: list[Callable[[], Bundle]] = [
    lambda: half_of("transformer-tiny"),
    lambda: half_of("transformer-nat-tiny"),
    lambda: bundle_of("transformer-tiny", "standard"),
]


@pytest.mark.parametrize("bundle", CASES, ids=["transformer-fp16", "transformer-nat-fp16", "transformer-fp32"])
def test_engines_are_built_for_three_kinds_of_gpus_at_once(bundle: Callable[[], Bundle], tmp_path: Path) -> None:
    before = bundle()
    after = built(copied(before, tmp_path / "copy"))
    assert [plan.part for plan in after.manifest.plans] == ["encoder", "decoder"]
    for plan in after.manifest.plans:
        assert plan.file == f"engines/{plan.part}-tensorrt-rtx-{VERSION}-portable.plan"
        assert (plan.flavour, plan.version, plan.compute_capabilities) == ("tensorrt-rtx", VERSION, GPUS)
        assert plan.profiles == profiles_of(before.spec, ())
        assert plan.graph_sha256 == graph_hash(before.manifest, plan.part)
        assert after.manifest.files[plan.file].size > 100_000
    files = {name: record for name, record in after.manifest.files.items() if not name.startswith("engines/")}
    assert files == before.manifest.files
    assert after.manifest.versions == {**before.manifest.versions, "tensorrt-rtx": VERSION}


def test_several_profiles_are_built_into_one_engine(fat: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiles = profiles_from_text(["batch=1,source=1:8:16", "batch=2:4,rows=2:4:16,step=1:2"])
    after = built(fat, BuildRequest(flavour="tensorrt-rtx", capabilities=("8.9",), profiles=profiles))
    for plan in after.manifest.plans:
        assert plan.file == f"engines/{plan.part}-tensorrt-rtx-{VERSION}-sm89.plan"
        first, second = plan.profiles
        assert first.sizes["batch"] == SizeRange(least=1, usual=1, most=1)
        assert first.sizes["rows"] == SizeRange(least=1, usual=1, most=4)
        assert first.sizes["source"] == SizeRange(least=1, usual=8, most=16)
        assert second.sizes["batch"] == SizeRange(least=2, usual=4, most=4)
        assert second.sizes["source"] == SizeRange(least=1, usual=32, most=256)
    assert not caplog.records  # above all no second logger, which TensorRT would ignore
    assert not trt_modules._listeners
    log = (fat / "engines" / f"decoder-tensorrt-rtx-{VERSION}-sm89.log").read_text()
    assert "DEBUG " in log
    assert "INFO Engine generation completed" in log
    assert f"INFO Input filename:   {DECODER}\n" in log
    assert not re.search(r"(^|[\s'\"])/\w+/", log)
    assert str(fat.parent) not in log


def test_engines_of_other_gpus_stay_when_more_are_built(fat: Path) -> None:
    built(fat, BuildRequest(flavour="tensorrt-rtx", capabilities=("8.6",)))
    first = contents(fat)
    after = built(fat, BuildRequest(flavour="tensorrt-rtx", capabilities=("8.9",)))
    assert [(plan.part, plan.compute_capabilities) for plan in after.manifest.plans] == [
        ("encoder", ("8.6",)),
        ("decoder", ("8.6",)),
        ("encoder", ("8.9",)),
        ("decoder", ("8.9",)),
    ]
    assert {name: contents(fat)[name] for name in first if name.endswith("86.plan")} == {
        name: data for name, data in first.items() if name.endswith("86.plan")
    }


@pytest.mark.parametrize("bundle", [lambda: half_of("fat-tiny"), lambda: half_of("transformer-tiny")])
def test_a_bundle_of_engines_alone_keeps_what_the_device_reads(bundle: Callable[[], Bundle], tmp_path: Path) -> None:
    before = bundle()
    after = built(copied(before, tmp_path / "copy"), replace(RTX, capabilities=("8.6",)), keep_onnx=False)
    assert not {ENCODER, DECODER} & set(after.manifest.files)
    ids = np.array([3, 9, 63])
    expected = stored_output_rows(before, ids)
    rows = stored_output_rows(after, ids)
    if expected is None:
        assert rows is None
        assert WEIGHTS not in after.manifest.files
    else:
        assert rows is not None
        assert rows.tobytes() == expected.tobytes()
        assert after.manifest.files[WEIGHTS].size == expected.shape[1] * 64 * 2
    with pytest.raises(BundleError, match=r"stored without encoder.onnx and decoder.onnx, which"):
        built(tmp_path / "copy")
    with pytest.raises(BundleError, match=r"does not list encoder.onnx"):
        OrtEngine(after)


def test_a_bundle_with_engines_still_runs_on_the_cpu(fat: Path) -> None:
    after = built(fat, replace(RTX, capabilities=("8.6",)))
    options = DecodeOptions(max_new_tokens=8)
    assert decode(OrtEngine(after, OrtOptions(threads=1)), [[5, 6, 7]], options) == decode(
        OrtEngine(half_of("fat-tiny"), OrtOptions(threads=1)), [[5, 6, 7]], options
    )


# -- graphs that do not fit --------------------------------------------------------------------------------------------


def test_every_unsupported_node_is_reported_with_its_module(tmp_path: Path) -> None:
    folder = copied(bundle_of("transformer-tiny", "standard"), tmp_path / "copy")
    model = read_structure(folder / DECODER)
    logits = model.graph.output[1].name
    model.graph.node.extend(
        [
            helper.make_node("FusedMatMul", [logits, logits], ["a"], name="decoder.own/a", domain="com.microsoft"),
            helper.make_node("DynamicQuantizeLinear", ["a"], ["b", "c", "d"], name="decoder.other/b"),
            helper.make_node("BiasGelu", ["a", "a"], ["e"], name="/e", domain="com.microsoft"),
        ]
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.graph.output.append(helper.make_tensor_value_info("b", onnx.TensorProto.UINT8, None))
    model.graph.output.append(helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, None))
    write_structure(model, folder / DECODER)
    write_manifest(folder, bundle_of("transformer-tiny", "standard").manifest)
    before = contents(folder)
    with pytest.raises(ExportFailed, match=rf"tensorrt_rtx {VERSION} does not take decoder.onnx: ") as failed:
        built(folder)
    message = str(failed.value)
    assert "decoder.own: FusedMatMul that makes a: " in message
    assert "decoder.other: DynamicQuantizeLinear that makes b is not supported" in message
    assert "the graph: BiasGelu that makes e: " in message
    assert "Int64" not in message
    assert contents(folder) == before


def test_a_file_that_is_not_a_graph_is_reported(tmp_path: Path) -> None:
    folder = copied(bundle_of("transformer-tiny", "standard"), tmp_path / "copy")
    (folder / ENCODER).write_bytes(b"no graph")
    write_manifest(folder, bundle_of("transformer-tiny", "standard").manifest)
    with pytest.raises(ExportFailed, match=r"does not take encoder.onnx: .*Failed to parse the ONNX model"):
        built(folder)


def test_all_differences_from_the_contract_are_reported_before_a_build(tmp_path: Path) -> None:
    bundle = bundle_of("transformer-tiny", "standard")
    wrong = replace(
        bundle.spec.halved("bfloat16"), max_target=200, vocab_size=65, reads_source=True, state=bundle.spec.state[:2]
    )
    folder = copied(bundle, tmp_path / "copy", spec=replace(wrong, memory=bundle.spec.memory))
    before = contents(folder)
    with pytest.raises(SpecMismatch, match=r"the graph of the decoder does not fit the contract: ") as failed:
        built(folder)
    for reason in (
        "input source is missing;",
        "input past.keys.1 is not in the contract;",
        "past.keys.0 must be an input, float32 [-1, 2, 200, 16], found an input, float32 [-1, 2, 256, 16]",
        "logits must be an output, float32 [-1, -1, 65], found an output, float32 [-1, -1, 64]",
        "output present.values.1 is not in the contract",
        "Nothing was built: export the model again",
    ):
        assert reason in str(failed.value)
    assert contents(folder) == before
    halved = copied(bundle, tmp_path / "halved", spec=bundle.spec.halved("float16"))
    with pytest.raises(
        SpecMismatch,
        match=r"of the encoder .*memory.keys.0 must be an output, float16 .*, found an output, float32",
    ):
        built(halved)


def test_axes_of_inputs_must_have_the_names_of_the_contract(tmp_path: Path) -> None:
    bundle = bundle_of("transformer-tiny", "standard")
    folder = copied(bundle, tmp_path / "copy")
    model = read_structure(folder / ENCODER)
    for place, name in enumerate(("sources", "length")):
        model.graph.input[1].type.tensor_type.shape.dim[place].dim_param = name
    write_structure(model, folder / ENCODER)
    write_manifest(folder, bundle.manifest)
    message = re.escape("axes of input source_mask must be named ['batch', 'source'], found ['sources', 'length']")
    with pytest.raises(SpecMismatch, match=message):
        built(folder)


def test_a_bundle_for_onnxruntime_is_refused(tmp_path: Path) -> None:
    folder = copied(bundle_of("transformer-tiny"), tmp_path / "copy")
    with pytest.raises(
        BundleError, match=r"onnxruntime's own ops \(ort-cpu\).*--target tensorrt, tensorrt-rtx or onnx"
    ):
        built(folder)


def test_a_failed_build_leaves_the_bundle_and_repeats_the_message_of_tensorrt(tmp_path: Path) -> None:
    folder = copied(half_of("transformer-tiny"), tmp_path / "copy")
    before = contents(folder)
    # A bug of TensorRT-RTX 1.7.1: its compiler gives two masks of an fp16 encoder the same name if the batch is fixed
    # and sources are short.
    with pytest.raises(
        ExportFailed, match=r"could not build the encoder: .*Error Code.*a range, .*--profile batch=1:1:2$"
    ):
        built(folder, replace(RTX, profiles=profiles_from_text(["batch=1,source=1:16"])))
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


# -- profiles ----------------------------------------------------------------------------------------------------------


def test_sizes_are_read_from_text() -> None:
    (sizes,) = profiles_from_text(["batch=4, rows=2:8,source=1:5:9"])
    assert sizes == {
        "batch": SizeRange(least=4, usual=4, most=4),
        "rows": SizeRange(least=2, usual=8, most=8),
        "source": SizeRange(least=1, usual=5, most=9),
    }


def test_all_mistakes_in_the_text_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        profiles_from_text(["batch=1,batch=2", "lines=3", "source=9:1", "step=1:2:3:4,rows=x,batch"])
    for reason in (
        "'batch=1,batch=2': batch has two ranges; pass --profile twice for two profiles",
        "'lines=3': the axes are batch, rows, source, step",
        "'source=9:1': expected 1 <= least <= usual <= most, found 9, 1, 1",
        "'step=1:2:3:4': expected AXIS=SIZE",
        "'rows=x': expected AXIS=SIZE",
        "'batch': expected AXIS=SIZE",
    ):
        assert reason in str(refused.value)


def test_a_model_has_a_profile_of_its_own() -> None:
    (profile,) = profiles_of(model_of("transformer-tiny").spec, ())
    assert {axis: (size.least, size.usual, size.most) for axis, size in profile.sizes.items()} == {
        "batch": (1, 1, 8),
        "rows": (1, 1, 32),
        "source": (1, 32, 256),
        "step": (1, 1, 16),
    }
    (parallel,) = profiles_of(model_of("transformer-nat-tiny").spec, ())
    assert parallel.sizes["step"] == SizeRange(least=1, usual=32, most=256)


def test_sizes_beyond_the_model_are_refused_together() -> None:
    profiles = profiles_from_text(["batch=2:8,rows=1:20,source=1:257", "step=1:300", "source=1:32:256"])
    with pytest.raises(ConfigError) as refused:
        profiles_of(model_of("transformer-tiny").spec, [*profiles, {}])
    for reason in (
        "profile 1: source goes to 257, past max_source = 256",
        "profile 1: every source has the same number of rows, so the least rows must be a multiple of the least batch; "
        "found 1 rows of 2 sources",
        "found 20 rows of 8 sources",
        "profile 2: step goes to 300, past max_target = 256",
        "profile 4: it repeats profile 3",
    ):
        assert reason in str(refused.value)


def test_wrong_shapes_and_two_ranges_of_one_axis_are_refused_though_the_builder_accepts_them() -> None:
    spec = model_of("transformer-tiny").spec
    shapes = shapes_by_input(spec, "decoder", profiles_of(spec, ())[0])
    check_shapes(spec, "decoder", shapes)
    past, mask = spec.past[0].name, spec.source_mask.name
    wrong = {**shapes, "elsewhere": ((1,), (1,), (1,)), mask: ((1, 1), (2, 32), (8, 99)), past: ((1, 2, 9, 16),) * 3}
    del wrong[spec.position.name]
    with pytest.raises(SpecMismatch) as refused:
        check_shapes(spec, "decoder", wrong)
    for reason in (
        "it has shapes for elsewhere, which is not an input",
        f"it has no shapes for {spec.position.name}",
        f"{past} must have 256 at place 2, found (9, 9, 9)",
        f"batch must have one range, found (1, 2, 8) in {mask}, (1, 1, 8) in {spec.memory[0].name} and ",
        f"source must have one range, found (1, 32, 99) in {mask}, (1, 32, 256) in ",
        f"rows must have one range, found (1, 1, 32) in {spec.tokens.name} and ",
    ):
        assert reason in str(refused.value)
    with pytest.raises(SpecMismatch, match=f"{mask} has 2 axes, not those of"):
        check_shapes(spec, "decoder", {**shapes, mask: ((1,), (1,), (1,))})


# -- where a build can be made -----------------------------------------------------------------------------------------


@without_gpu
def test_tensorrt_without_a_gpu_is_refused_before_its_module_is_imported(
    fat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt_build, "tensorrt_module", lambda _: pytest.fail("imported"))
    with pytest.raises(
        BackendUnavailable, match=rf"{NO_GPU} \(.*\): engines of TensorRT are built on the GPU that runs"
    ):
        built(fat, BuildRequest(flavour="tensorrt"))


@without_gpu
def test_rtx_without_a_gpu_asks_which_one() -> None:
    with pytest.raises(BackendUnavailable, match=rf"{NO_GPU} \(.*\): pass --compute-capability, such as 8.6"):
        planned(BuildRequest(flavour="tensorrt-rtx"), model_of("fat-tiny").spec)


def test_with_a_gpu_engines_are_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model_of("fat-tiny").spec
    monkeypatch.setattr(trt_build, "cuda_here", lambda: Cuda("13.0", (CudaDevice(0, "a GPU", (8, 9), 1),)))
    rtx = planned(BuildRequest(flavour="tensorrt-rtx"), spec)
    assert (rtx.capabilities, rtx.runs_here) == (("8.9",), True)
    assert not planned(BuildRequest(flavour="tensorrt-rtx", capabilities=("8.6",)), spec).runs_here
    monkeypatch.setattr(trt_build, "tensorrt_module", tensorrt_of("11.4.0"))
    assert (
        planned(BuildRequest(flavour="tensorrt"), spec).file("decoder") == "engines/decoder-tensorrt-11.4.0-sm89.plan"
    )
    with pytest.raises(ConfigError, match=r"of compute capability 8\.9, not for 8\.6; tensorrt-rtx builds for others"):
        planned(BuildRequest(flavour="tensorrt", capabilities=("8.6",)), spec)


def tensorrt_of(version: str) -> Callable[[Flavour], Any]:
    class Module:
        __version__ = version

    return lambda _: Module


def test_unsupported_capabilities_are_reported_together() -> None:
    with pytest.raises(
        ConfigError,
        match=r"9\.0 is not available; eight is not available; 8\.6 is listed twice\. .* builds for 7\.5, 8\.0, 8\.6",
    ):
        planned(replace(RTX, capabilities=("8.6", "9.0", "eight", "8.6")), model_of("fat-tiny").spec)


def test_a_missing_module_is_reported_with_what_to_install() -> None:
    with pytest.raises(BackendUnavailable, match=r"needs tensorrt, .*: pip install 'fatdeploy\[tensorrt\]'"):
        tensorrt_module("tensorrt")


class AnotherGpu:
    """Rejects a timing cache as TensorRT does if it is of another GPU; TensorRT-RTX accepts any."""

    def create_timing_cache(self, data: bytes) -> bytes:
        return data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        return ignore_mismatch or not cache


def test_a_timing_cache_is_read_and_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--timing-cache is for tensorrt"):
        planned(replace(RTX, timing_cache=tmp_path / "cache"), model_of("fat-tiny").spec)
    module = tensorrt_module("tensorrt-rtx")
    builder = module.Builder(logger_of("tensorrt-rtx"))
    path = tmp_path / "cache"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on RTX these functions of TensorRT do nothing
        TimingCache(builder.create_builder_config(), path).write()
        first = path.read_bytes()
        assert first
        TimingCache(builder.create_builder_config(), path).write()
        assert path.read_bytes() == first
    with pytest.raises(ConfigError, match="is not a timing cache of this GPU and version"):
        TimingCache(AnotherGpu(), path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache"]


# -- what TensorRT says ------------------------------------------------------------------------------------------------


def test_warnings_go_to_the_log_and_everything_to_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fatdeploy")
    with (tmp_path / "log").open("w") as file:
        build_log = BuildLog(file, "tensorrt-rtx", tmp_path / "a folder")
        with listening(build_log.hear):
            forward(logging.DEBUG, f"Reading '{tmp_path / 'a folder'}/weights.bin' and /usr/lib/x/libnv.so.1")
            forward(logging.WARNING, "ModelImporter.cpp:1071: Make sure input tokens has Int64 binding.")
            forward(logging.WARNING, "layer decoder.layers.0/add is odd")
            forward(logging.ERROR, "out of\nmemory")
        forward(logging.WARNING, "later")
    assert [record.message for record in caplog.records] == [
        "tensorrt-rtx: layer decoder.layers.0/add is odd",
        "tensorrt-rtx: out of\nmemory",
        "later",
    ]
    assert build_log.errors == ["out of memory"]
    assert (tmp_path / "log").read_text().splitlines() == [
        "DEBUG Reading 'weights.bin' and libnv.so.1",
        "WARNING ModelImporter.cpp:1071: Make sure input tokens has Int64 binding.",
        "WARNING layer decoder.layers.0/add is odd",
        "ERROR out of",
        "memory",
    ]


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_builds_and_reports_the_plans(fat: Path) -> None:
    run = command("build", fat, "--flavour", "tensorrt-rtx", "--compute-capability", "8.6, 8.9", "--json")
    assert run.exit_code == 0, run.output
    values = json.loads(run.stdout)
    bundle = read_bundle(fat)
    assert (values["bundle"], values["bytes"]) == (str(fat), bundle.total_bytes)
    assert [(plan["part"], plan["compute_capabilities"]) for plan in values["plans"]] == [
        ("encoder", ["8.6", "8.9"]),
        ("decoder", ["8.6", "8.9"]),
    ]
    assert [plan["bytes"] for plan in values["plans"]] == [
        bundle.manifest.files[plan.file].size for plan in bundle.manifest.plans
    ]
    ending = f"with tensorrt-rtx {VERSION} for compute capability 8.6, 8.9 …"
    assert run.stderr.splitlines() == [f"building the encoder {ending}", f"building the decoder {ending}"]


def test_the_command_asks_for_the_flavour_if_the_bundle_has_none(fat: Path) -> None:
    run = command("build", fat)
    assert run.exit_code == 1
    assert f"{fat} was exported for onnx: pass --flavour tensorrt or tensorrt-rtx" in run.stderr
    write_manifest(fat, replace(read_bundle(fat).manifest, target="tensorrt"))
    if not cuda_here().devices:
        assert NO_GPU in command("build", fat).stderr


def test_export_builds_engines_or_leaves_them_to_the_device(tmp_path: Path) -> None:
    choices = ("--max-source", 16, "--max-target", 16, "--precision", "fp16")
    run = command(
        "export", "transformer-tiny", "--out", tmp_path / "rtx", "--target", "tensorrt-rtx", *choices,
        "--compute-capability", "8.6", "--profile", "batch=1:2,rows=1:4",
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    manifest = read_bundle(tmp_path / "rtx").manifest
    assert (manifest.target, manifest.precision, manifest.dialect) == ("tensorrt-rtx", "fp16", "standard")
    assert [plan.part for plan in manifest.plans] == ["encoder", "decoder"]
    assert manifest.plans[0].profiles[0].sizes["source"].most == 16
    assert f"engines/decoder-tensorrt-rtx-{VERSION}-sm86.plan: " in run.stdout
    trt_build.finish_bundle(
        Path(shutil.copytree(half_of("fat-tiny").path, tmp_path / "device")), "tensorrt", None, lambda _: None
    )
    device: Manifest = read_bundle(tmp_path / "device").manifest
    assert (device.target, device.plans) == ("tensorrt", ())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--target", "onnx", "--profile", "batch=1"], "no engines are built for onnx .*: --profile is for engines"),
        (["--compute-capability", "8.6"], "no engines are built for ort-cpu .*: --compute-capability is for engines"),
        (["--no-build"], "--no-build is for engines, and none are built for ort-cpu"),
        (
            ["--target", "tensorrt", "--no-build", "--profile", "batch=1", "--timing-cache", "x"],
            "no engines are built with --no-build .*: --profile is for engines; --timing-cache is for engines",
        ),
        (["--target", "tensorrt-rtx", "--compute-capability", "1.0"], "1.0 is not available"),
        pytest.param(["--target", "tensorrt"], rf"{NO_GPU}.*pass --no-build", marks=without_gpu),
    ],
)
def test_build_options_that_do_not_apply_are_refused_before_anything_is_traced(
    arguments: list[str], reason: str, tmp_path: Path
) -> None:
    run = command("export", "transformer-tiny", "--out", tmp_path / "out", *arguments)
    assert run.exit_code == 1
    assert re.search(reason, run.stderr)
    assert "tracing" not in run.stderr
    assert not list(tmp_path.iterdir())


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "onnx", "onnxruntime", "onnxsim", "onnxscript", "safetensors"}:
            raise ImportError(f"{name} is not on the device")
sys.meta_path.insert(0, Blocked())
from fatdeploy.cli import main
main(sys.argv[1:])
"""


def test_a_device_builds_without_torch_onnx_and_onnxruntime(fat: Path) -> None:
    arguments = ["build", str(fat), "--flavour", "tensorrt-rtx", "--compute-capability", "8.6"]
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr
    assert len(read_bundle(fat).manifest.plans) == 2


# -- every preset: many minutes ----------------------------------------------------------------------------------------

EVERY = [(f"{preset}-{size}", "fp16") for size in ("tiny", "small") for preset in HALF_PRESETS] + [
    *((f"{preset}-tiny", "fp32") for preset in PRESETS),
    *((f"{preset}-tiny", "bf16") for preset in HALF_PRESETS),
    ("transformer-base", "fp16"),
    ("fat-base", "fp16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "precision"), EVERY)
def test_every_preset_becomes_engines(preset: str, precision: Precision, tmp_path: Path) -> None:
    bundle = write_bundle(
        exportable_model(model_from_preset(preset), Choices(max_source=64, max_target=64)),
        tmp_path / "bundle",
        origin=Origin(name=preset, random=True),
        target="onnx",
        precision=precision,
    )
    after = built(bundle.path)
    assert [plan.part for plan in after.manifest.plans] == ["encoder", "decoder"]
