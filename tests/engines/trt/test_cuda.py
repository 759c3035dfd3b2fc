"""The code that calls CUDA and TensorRT, run on fakes of both: whole decodes, every failure, only common names."""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import fatdeploy
from fatdeploy.bundle import write_manifest
from fatdeploy.cli import main
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError, DeviceFailed, OutOfDeviceMemory
from fatdeploy.runtimes.bench.plan import Setting, Turn
from fatdeploy.runtimes.bench.turn import measure_turn
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.doctor.cuda_driver import cuda_here
from fatdeploy.runtimes.engines.trt import cuda as cuda_device
from fatdeploy.runtimes.engines.trt import modules as trt_modules
from fatdeploy.runtimes.engines.trt.cuda import opened_device
from fatdeploy.runtimes.engines.trt.engine import TrtEngine
from tests.support.bundles import bundle_of
from tests.support.devices.cpu import HERE, CpuDevice, plans_of, ranges, trt_engine, with_plans
from tests.support.devices.fake_cuda import FakeCuda, cudaError_t, fake_tensorrt

API = json.loads((Path(__file__).parents[2] / "data" / "tensorrt_api.json").read_text())
BEAMS = DecodeOptions(num_beams=3, num_return_sequences=3, max_new_tokens=20)
SOURCES = [[5, 6, 7], [8] * 20, [9]]

Install = Callable[..., tuple[FakeCuda, CpuDevice]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Replace the modules by fakes that run a bundle's plans."""

    def installed(
        preset: str = "transformer-tiny", *, version: str = HERE.version, **cuda: object
    ) -> tuple[FakeCuda, CpuDevice]:
        device = CpuDevice(plans_of(preset))
        fake = FakeCuda(device, **cuda)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", fake)
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt(device, version))
        trt_modules.logger_of.cache_clear()
        return fake, device

    yield installed
    trt_modules.logger_of.cache_clear()


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny"])
def test_a_bundle_is_decoded_through_calls_of_cuda_and_tensorrt_and_leaks_nothing(
    preset: str, install: Install
) -> None:
    fake, device = install(preset)
    expected = trt_engine(preset)
    with fatdeploy.load(plans_of(preset).path) as model:
        for options in (DecodeOptions(max_new_tokens=20, prefix=[5, 6]), BEAMS):
            hypotheses = model.generate(SOURCES, options)
            assert [hypothesis.tokens for hypothesis in hypotheses] == [
                hypothesis.tokens for hypothesis in decode(expected, SOURCES, options)
            ]
            assert model.generate(SOURCES, options) == hypotheses
        assert device.n_launched > 50
        assert {strip.pitch > strip.width for _, _, strip in device.moved} == (
            {True} if "transformer" in preset else {False}
        )
    assert (device.leaked, len(fake.pinned)) == (0, 0)


def test_a_turn_of_the_bench_checks_and_times_plans(install: Install) -> None:
    install()
    settings = (Setting(batch=1, beams=1), Setting(batch=2, beams=2))
    turn = Turn(
        bundle=str(plans_of("transformer-tiny").path),
        threads=1,
        spinning=True,
        source=8,
        target=8,
        settings=settings,
        repetitions=2,
        decoder_bytes=10_000,
        thorough=True,
    )
    result = measure_turn(turn)
    assert result["onnxruntime"] is None
    assert result["fidelity"]["same"] == result["fidelity"]["tokens"] > 100
    assert [len(setting["times"]) for setting in result["settings"]] == [2, 2]


def test_more_sources_than_plans_take_at_once_are_decoded_in_several_batches(install: Install, tmp_path: Path) -> None:
    profiles = (ranges(batch=2, rows=6, source=16, step=4), ranges(batch=1, rows=3, source=64, step=4))
    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle", profiles)
    _, device = install()
    device.bundle = bundle
    sources = [[length] * length for length in (3, 40, 16, 17, 5, 9)]
    sizes: list[int] = []
    with fatdeploy.load(bundle.path) as model:
        hypotheses = model.generate(sources, BEAMS, progress=sizes.append)
    assert sizes == [1, 1, 2, 2]
    expected = decode(trt_engine("transformer-tiny"), sources, BEAMS)
    assert [hypothesis.tokens for hypothesis in hypotheses] == [hypothesis.tokens for hypothesis in expected]


def test_without_recordings_nothing_is_launched_and_the_tokens_are_the_same(install: Install) -> None:
    _, device = install()
    with fatdeploy.load(plans_of("transformer-tiny").path, cuda_graphs=False) as model:
        hypotheses = model.generate(SOURCES, BEAMS)
    assert device.n_launched == 0
    assert [hypothesis.tokens for hypothesis in hypotheses] == [
        hypothesis.tokens for hypothesis in decode(trt_engine("transformer-tiny"), SOURCES, BEAMS)
    ]


def test_run_verify_and_eval_use_the_device_that_a_bundle_is_for(install: Install, tmp_path: Path) -> None:
    _, device = install()
    bundle, standard = plans_of("transformer-tiny").path, bundle_of("transformer-tiny", "standard").path
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("5 6 7\t8 9\n9\t5\n")
    for command in (["run", "--ids", "5 6 7", "9"], ["eval", str(pairs), "--ids"]):
        name, *rest = command
        on_device, on_cpu = (CliRunner().invoke(main, [name, str(folder), *rest]) for folder in (bundle, standard))
        assert on_device.exit_code == 0, on_device.output
        # Timings come last.
        lines, expected_lines = (
            result.stdout.splitlines()[: 2 if name == "run" else 3] for result in (on_device, on_cpu)
        )
        assert lines == expected_lines
    before = device.n_launched
    verified = CliRunner().invoke(main, ["verify", str(bundle)])
    assert verified.exit_code == 0, verified.output
    assert "rows are the reference's; chosen logits within" in verified.stdout
    assert device.n_launched - before > 100


@pytest.mark.parametrize(
    ("reason", "code", "count"),
    [
        ("cudaErrorInsufficientDriver", cudaError_t.cudaErrorInsufficientDriver, None),
        ("cudaErrorNoDevice", cudaError_t.cudaErrorNoDevice, None),
        ("CUDA finds no GPU", cudaError_t.cudaSuccess, 0),
    ],
)
def test_without_a_gpu_the_error_is_ours_and_tensorrt_is_not_imported(
    reason: str, code: cudaError_t, count: int | None, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(code=code, count=count)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)  # an import of it would be reported
    with pytest.raises(
        BackendUnavailable, match=r"plans of tensorrt-rtx cannot run here: CUDA finds.*fatdeploy doctor"
    ) as caught:
        fatdeploy.load(plans_of("transformer-tiny").path)
    assert reason in str(caught.value)
    assert "tensorrt-rtx, which cannot be imported" not in str(caught.value)


def test_missing_packages_are_reported_with_what_to_type(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendUnavailable, match=r"needs tensorrt, .*pip install 'fatdeploy\[tensorrt\]'"):
        opened_device("tensorrt")
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(BackendUnavailable, match=r"cuda-python cannot be imported .*pip install 'fatdeploy\["):
        opened_device("tensorrt-rtx")


@pytest.mark.skipif(bool(cuda_here().devices), reason="this machine has a GPU")
@pytest.mark.parametrize("command", [["run", "--ids", "5 6"], ["verify"], ["bench"]], ids=lambda words: words[0])
def test_a_machine_without_gpu_ends_a_command_with_one_line_and_code_1(command: list[str]) -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="the real package, which works without a driver")
    name, *rest = command
    result = CliRunner().invoke(main, [name, str(plans_of("transformer-tiny").path), *rest])
    assert result.exit_code == 1, result.output
    assert "plans of tensorrt-rtx cannot run here: CUDA finds no GPU: cudaError" in result.stderr


def test_options_of_the_other_runtime_are_refused() -> None:
    with pytest.raises(ConfigError, match="is for tensorrt-rtx, which has no use for threads, providers: leave it out"):
        fatdeploy.load(plans_of("transformer-tiny").path, threads=2, providers=("cuda", "cpu"))
    with pytest.raises(ConfigError, match="is for ort-cpu, which has no use for cuda_graphs"):
        fatdeploy.load(bundle_of("transformer-tiny").path, cuda_graphs=False)


def test_a_plan_that_tensorrt_cannot_read_is_reported_with_its_message(install: Install, tmp_path: Path) -> None:
    _, device = install()
    bundle = with_plans(bundle_of("transformer-tiny", "standard"), tmp_path / "bundle")
    bundle.file(bundle.manifest.plans[1].file).write_bytes(b"half of a plan")
    write_manifest(bundle.path, bundle.manifest)
    message = r"cannot be loaded by tensorrt-rtx 1\.7\.1: .*Error Code 1: magic tag does not match\. Build it again"
    with pytest.raises(BundleError, match=message):
        fatdeploy.load(bundle.path)
    assert device.leaked == 0


def test_another_version_is_refused_before_its_plan_is_read(install: Install) -> None:
    _, device = install(version="1.8.0")
    with pytest.raises(
        BackendUnavailable, match=r"has no plans for tensorrt-rtx 1\.8\.0 on test GPU .* is for tensorrt-rtx 1\.7\.1"
    ):
        fatdeploy.load(plans_of("transformer-tiny").path)
    assert device.leaked == 0


def test_a_full_or_lost_device_and_a_failed_run_raise_our_errors(install: Install) -> None:
    fake, device = install()
    with fatdeploy.load(plans_of("transformer-tiny").path) as model:
        device.limit = 4 * 4096
        with pytest.raises(OutOfDeviceMemory, match=r"cudaMalloc \[\d+\]: cudaErrorMemoryAllocation, what CUDA says"):
            model.generate(SOURCES, BEAMS)
        device.limit = None
        device.fail_execution = True
        with pytest.raises(
            DeviceFailed, match=r"encoder-.*TensorRT does not run the plan: the device could not be asked to run"
        ):
            model.generate(SOURCES, BEAMS)
        device.fail_execution = False
        assert model.generate(SOURCES, BEAMS)
        fake.lost = True
        with pytest.raises(DeviceFailed, match="cudaEventSynchronize: cudaErrorIllegalAddress"):
            model.generate(SOURCES, BEAMS)
    assert (device.leaked, len(fake.pinned)) == (0, 0)


def test_a_failure_while_a_step_is_recorded_ends_the_recording(install: Install) -> None:
    fake, device = install()
    bundle = plans_of("transformer-tiny")
    opened = opened_device("tensorrt-rtx")

    def work() -> None:
        raise DeviceFailed("in the middle")

    with pytest.raises(DeviceFailed, match="in the middle"):
        opened.captured(work)
    assert device.recording is None
    engine = TrtEngine(bundle, opened)
    assert decode(engine, SOURCES, BEAMS)
    engine.close()
    assert (device.leaked, len(fake.pinned)) == (0, 0)


def attributes(*modules: object) -> set[str]:
    """Return every name after a dot in the code of modules."""
    trees = [ast.parse(Path(module.__file__).read_text()) for module in modules]  # type: ignore[attr-defined]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("version", API)
def test_the_fakes_have_only_names_of_every_version_of_tensorrt(version: str) -> None:
    module = vars(fake_tensorrt(CpuDevice(plans_of("transformer-tiny")), "1"))
    for name, fake in module.items():
        if name == "__version__":
            continue
        offered = fake.__members__ if issubclass(fake, IntEnum) else vars(fake.__mro__[-2])
        used = {attribute for attribute in offered if not attribute.startswith("_")}
        assert used
        assert sorted(used - set(API[version][name])) == []


def test_the_real_package_has_every_cuda_name_the_code_calls() -> None:
    real = pytest.importorskip("cuda.bindings.runtime", reason="comes with the extra rtx")
    tree = ast.parse(Path(cuda_device.__file__).read_text())
    texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {name for name in texts | attributes(cuda_device) if re.fullmatch("cuda[A-Z]\\w+", name)}
    assert len(names) > 30
    enums = (real.cudaError_t, real.cudaMemcpyKind, real.cudaDeviceAttr, real.cudaStreamCaptureMode)
    assert [name for name in sorted(names) if not any(hasattr(owner, name) for owner in (real, *enums))] == []
