"""The doctor, run as a command in environments made for it: packages on a path, a compiled driver."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from fatdeploy.runtimes.doctor import examine as doctor
from fatdeploy.runtimes.doctor.cuda_driver import Cuda, CudaDevice, cuda_here
from fatdeploy.runtimes.doctor.packages import PACKAGES

REPOSITORY = Path(__file__).parents[2]
START = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]; from fatdeploy.cli import main; main()"
CPU = "get_available_providers = lambda: ['CPUExecutionProvider']"
GPU = "get_available_providers = lambda: ['TensorrtExecutionProvider', 'CUDAExecutionProvider', 'CPUExecutionProvider']"

DRIVER = """
#include <stddef.h>
#include <string.h>
static const char *names[] = {"Orin", "NVIDIA GeForce RTX 4090"};
static const int minors[] = {7, 9};
static const size_t memories[] = {7990001664u, 25757220864u};
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuInit(unsigned flags) { return flags == 0 ? INIT_RESULT : 1; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *handle, int index) { *handle = 40 + index; return 0; }
int cuDeviceGetName(char *name, int length, int handle) { strncpy(name, names[handle - 40], length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int handle) {
  if (attribute != 75 && attribute != 76) return 1;
  *value = attribute == 75 ? 8 : minors[handle - 40];
  return 0;
}
#ifndef OLD
int cuDeviceTotalMem_v2(size_t *bytes, int handle) { *bytes = memories[handle - 40]; return 0; }
int cuGetErrorName(int code, const char **name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : NULL;
  return 0;
}
#endif
"""
TWO_DEVICES = (
    CudaDevice(0, "Orin", (8, 7), 7_990_001_664),
    CudaDevice(1, "NVIDIA GeForce RTX 4090", (8, 9), 25_757_220_864),
)

Compile = Callable[..., Path]


class Environment:
    """A folder of installed packages, and the doctor run with it in place of everything that is installed here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Hides devices from a real driver; a driver compiled by a test ignores it.
        self.variables = {"CUDA_VISIBLE_DEVICES": "-1"}
        (folder / "click").symlink_to(Path(click.__file__).parent)

    def install(self, name: str, module: str | None = None, code: str = "", version: str | None = "1.2.3") -> None:
        metadata = self.folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\n" + (f"Version: {version}\n" if version else ""))
        if module:
            (self.folder / module).mkdir(parents=True, exist_ok=True)
            (self.folder / module / "__init__.py").write_text(code)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", "-c", START, str(self.folder), str(REPOSITORY), "doctor", *arguments]
        return subprocess.run(
            command, env={**os.environ, **self.variables}, capture_output=True, text=True, check=False
        )

    def report(self) -> dict[str, Any]:
        ran = self.run("--json")
        assert ran.stderr == ""
        report: dict[str, Any] = json.loads(ran.stdout)
        assert ran.returncode == (0 if report["healthy"] else 1)
        return report

    def part(self, name: str) -> dict[str, Any]:
        return next(part for part in self.report()["parts"] if part["name"] == name)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    (tmp_path / "packages").mkdir()
    return Environment(tmp_path / "packages")


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    """Return a function that compiles a driver: how many devices, and what cuInit returns."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a CUDA driver with")

    def make(devices: int = 2, init: int = 0, *options: str) -> Path:
        source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
        source.write_text(DRIVER)
        defines = [f"-DDEVICES={devices}", f"-DINIT_RESULT={init}", *options]
        subprocess.run([compiler, "-shared", "-fPIC", *defines, "-o", str(library), str(source)], check=True)
        return library

    return make


def test_where_nothing_is_installed_every_package_has_its_command(environment: Environment) -> None:
    report = environment.report()
    assert {part["name"]: part["install"] for part in report["parts"]} == {
        "onnxruntime": "pip install 'fatdeploy[cpu]'",
        "onnxruntime-gpu": "pip install 'fatdeploy[cuda]'",
        "tensorrt": "pip install 'fatdeploy[tensorrt]'",
        "tensorrt-rtx": "pip install 'fatdeploy[rtx]'",
        "cuda-python": "pip install 'fatdeploy[tensorrt]'",
        "tokenizers": "pip install 'fatdeploy[text]'",
        "sentencepiece": "pip install 'fatdeploy[sentencepiece]'",
        "sacrebleu": "pip install 'fatdeploy[eval]'",
        "torch": "pip install 'fatdeploy[export]'",
        "onnx": "pip install 'fatdeploy[export]'",
        "onnxscript": "pip install 'fatdeploy[export]'",
        "onnxsim": "pip install 'fatdeploy[export]'",
        "safetensors": "pip install 'fatdeploy[export]'",
    }
    assert {part["state"] for part in report["parts"]} == {"missing"}
    assert report["healthy"] is True
    assert report["problems"] == []


def test_the_extra_that_is_named_for_a_package_does_bring_it() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brings = {extra: {need.partition(">")[0] for need in needs} for extra, needs in extras.items()}
    assert [package.name for package in PACKAGES if package.name not in brings[package.extra]] == []
    assert "cuda-python" in brings["rtx"]


def test_onnxruntime_is_shown_with_its_version_and_providers(environment: Environment) -> None:
    environment.install("onnxruntime", "onnxruntime", CPU)
    assert environment.part("onnxruntime") == {
        "name": "onnxruntime",
        "purpose": "run bundles on the CPU",
        "state": "present",
        "version": "1.2.3",
        "detail": "CPUExecutionProvider",
        "install": None,
    }


def test_the_gpu_package_is_offered_only_in_place_of_the_cpu_package(environment: Environment) -> None:
    environment.install("onnxruntime", "onnxruntime", CPU)
    part = environment.part("onnxruntime-gpu")
    assert part["install"] == "pip uninstall -y onnxruntime && pip install 'fatdeploy[cuda]'"
    assert part["detail"] == "no CUDA device here; with one:"


def test_gpu_providers_that_are_listed_are_not_called_working(environment: Environment) -> None:
    environment.install("onnxruntime-gpu", "onnxruntime", GPU)
    assert environment.part("onnxruntime-gpu")["detail"] == (
        "CPUExecutionProvider; TensorrtExecutionProvider, CUDAExecutionProvider listed; not proved until a session runs"
    )


def test_packages_that_would_overwrite_the_gpu_package_are_not_offered(environment: Environment) -> None:
    environment.install("onnxruntime-gpu", "onnxruntime", GPU)
    parts = {part["name"]: part for part in environment.report()["parts"]}
    assert parts["onnxruntime"]["install"] is None
    assert parts["onnxruntime"]["detail"] == "not needed: onnxruntime-gpu runs on the CPU too"
    assert parts["torch"]["detail"].startswith("in another environment, for it brings onnxruntime")


def test_both_onnxruntimes_are_a_conflict_with_one_repair_named_last(environment: Environment) -> None:
    environment.install("onnxruntime", "onnxruntime", CPU)
    environment.install("onnxruntime-gpu", "onnxruntime", GPU)
    ran = environment.run()
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-2:] == [
        "  conflict: onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files",
        "    pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'fatdeploy[cuda]'",
    ]


def test_two_onnxruntimes_that_broke_each_other_need_no_second_repair(environment: Environment) -> None:
    environment.install("onnxruntime", "onnxruntime", "raise ImportError")
    environment.install("onnxruntime-gpu")
    kinds = [problem["kind"] for problem in environment.report()["problems"]]
    assert kinds == ["limit", "conflict"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('libstdc++.so.6: no\\nversion')", "ImportError: libstdc++.so.6: no version"),
        ("raise RuntimeError('numpy is too old')", "RuntimeError: numpy is too old"),
        ("", "AttributeError: module 'onnxruntime' has no attribute 'get_available_providers'"),
    ],
    ids=["library-missing", "any-other-error", "half-a-package"],
)
def test_an_onnxruntime_that_cannot_be_imported_is_broken_and_says_why(
    environment: Environment, code: str, reason: str
) -> None:
    environment.install("onnxruntime", "onnxruntime", code)
    report = environment.report()
    assert report["parts"][0]["state"] == "broken"
    assert report["problems"] == [
        {
            "kind": "broken",
            "message": f"onnxruntime is broken: import onnxruntime: {reason}",
            "fix": "pip uninstall -y onnxruntime && pip install 'fatdeploy[cpu]'",
        }
    ]


def test_a_folder_that_an_uninstall_left_behind_is_broken(environment: Environment) -> None:
    environment.install("onnxruntime-gpu")
    (environment.folder / "onnxruntime" / "capi").mkdir(parents=True)
    part = environment.part("onnxruntime-gpu")
    assert (part["state"], part["detail"]) == ("broken", "its module onnxruntime is gone")


def test_metadata_without_a_version_is_broken(environment: Environment) -> None:
    environment.install("tokenizers", "tokenizers", version=None)
    part = environment.part("tokenizers")
    assert (part["state"], part["version"], part["detail"]) == ("broken", None, "its metadata has no version")


def test_torch_is_found_without_being_imported(environment: Environment) -> None:
    environment.install("torch", "torch", "raise SystemExit('torch was imported')", "2.13.0+cpu")
    assert environment.part("torch")["version"] == "2.13.0+cpu"


@pytest.mark.parametrize(("chosen", "seen"), [(None, "1"), ("0", "0")], ids=["by-default", "unless-chosen"])
def test_onnxruntime_s_telemetry_is_off(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, chosen: str | None, seen: str
) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    if chosen is not None:
        environment.variables["ORT_DISABLE_TELEMETRY"] = chosen
    at_import = "import os; value = os.environ.get('ORT_DISABLE_TELEMETRY'); get_available_providers = lambda: [value]"
    environment.install("onnxruntime", "onnxruntime", at_import)
    assert environment.part("onnxruntime")["detail"] == seen


def test_cuda_python_is_known_by_its_inner_module(environment: Environment) -> None:
    environment.install("cuda-python")
    environment.install("tensorrt-rtx", "tensorrt_rtx")
    part = environment.part("cuda-python")
    assert (part["state"], part["detail"]) == ("broken", "its module cuda.bindings is gone")
    assert part["install"] == "pip uninstall -y cuda-python && pip install 'fatdeploy[rtx]'"
    (environment.folder / "cuda" / "bindings").mkdir(parents=True)
    (environment.folder / "cuda" / "bindings" / "__init__.py").touch()
    assert environment.part("cuda-python")["state"] == "present"


@pytest.mark.parametrize(
    ("name", "module", "limit"),
    [
        ("tensorrt", "tensorrt", "engines can be neither built nor run"),
        (
            "tensorrt-rtx",
            "tensorrt_rtx",
            "engines can be built ahead of time for chosen compute capabilities; to run needs a GPU",
        ),
        ("onnxruntime-gpu", "onnxruntime", "it runs bundles on the CPU only"),
    ],
)
def test_a_gpu_package_without_a_gpu_is_a_limit_and_no_failure(
    environment: Environment, name: str, module: str, limit: str
) -> None:
    environment.install(name, module, GPU)
    ran = environment.run()
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == f"  limit: {name} is installed, but there is no CUDA device: {limit}"


def test_a_human_sees_versions_commands_and_devices(environment: Environment, compiled: Compile) -> None:
    environment.install("onnxruntime", "onnxruntime", CPU)
    environment.install("tensorrt", "tensorrt")
    environment.variables["LD_LIBRARY_PATH"] = str(compiled().parent)
    ran = environment.run()
    sections = ran.stdout.split("\n\n")
    assert [section.splitlines()[0] for section in sections] == ["Machine", "Packages", "CUDA", "GPU targets"]
    packages = [" ".join(line.split()) for line in sections[1].splitlines()[1:]]
    assert packages[0] == "onnxruntime 1.2.3 run bundles on the CPU CPUExecutionProvider"
    assert packages[5] == "tokenizers missing text in and out pip install 'fatdeploy[text]'"
    assert sections[2].splitlines() == [
        "CUDA",
        "  driver    runs CUDA up to 12.8",
        "  device 0  Orin, compute capability 8.7, 8.0 GB",
        "  device 1  NVIDIA GeForce RTX 4090, compute capability 8.9, 25.8 GB",
    ]
    assert [" ".join(line.split()) for line in sections[3].splitlines()[1:]] == [
        "ort-cuda run missing: onnxruntime-gpu",
        "tensorrt build engines works here, as far as can be seen without doing it",
        "tensorrt run missing: cuda-python",
        "tensorrt-rtx build engines missing: tensorrt-rtx",
        "tensorrt-rtx run missing: tensorrt-rtx, cuda-python",
    ]
    assert ran.returncode == 0


def missing_of(report: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    assert all(target["works"] == (not target["missing"]) for target in report["targets"])
    return {(target["target"], target["work"]): target["missing"] for target in report["targets"]}


def test_without_a_gpu_rtx_engines_can_be_compiled_and_everything_else_says_what_is_missing(
    environment: Environment,
) -> None:
    device = "a CUDA device"
    assert missing_of(environment.report()) == {
        ("ort-cuda", "run"): ["onnxruntime-gpu", device],
        ("tensorrt", "build engines"): ["tensorrt", device],
        ("tensorrt", "run"): ["tensorrt", "cuda-python", device],
        ("tensorrt-rtx", "build engines"): ["tensorrt-rtx"],
        ("tensorrt-rtx", "run"): ["tensorrt-rtx", "cuda-python", device],
    }
    environment.install("tensorrt-rtx", "tensorrt_rtx")
    environment.install("cuda-python", "cuda/bindings")
    missing = missing_of(environment.report())
    assert missing["tensorrt-rtx", "build engines"] == []
    assert missing["tensorrt-rtx", "run"] == [device]


def test_with_a_gpu_and_its_packages_every_target_works_and_a_broken_package_is_missing(
    environment: Environment, compiled: Compile
) -> None:
    environment.variables["LD_LIBRARY_PATH"] = str(compiled().parent)
    environment.install("onnxruntime-gpu", "onnxruntime", GPU)
    environment.install("tensorrt", "tensorrt")
    environment.install("tensorrt-rtx", "tensorrt_rtx")
    environment.install("cuda-python", "cuda/bindings")
    assert set(map(tuple, missing_of(environment.report()).values())) == {()}
    shutil.rmtree(environment.folder / "tensorrt")
    missing = missing_of(environment.report())
    assert missing["tensorrt", "build engines"] == missing["tensorrt", "run"] == ["tensorrt"]
    assert missing["tensorrt-rtx", "run"] == []


def test_a_driver_that_does_not_work_is_a_problem(environment: Environment, compiled: Compile) -> None:
    environment.variables["LD_LIBRARY_PATH"] = str(compiled(2, 803).parent)
    ran = environment.run()
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1] == (
        "  broken: the CUDA driver does not work: cuInit returned 803 (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"
    )


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((2,), Cuda("12.8", TWO_DEVICES)),
        ((0,), Cuda("12.8", reason="the CUDA driver finds no device")),
        ((2, 100), Cuda("12.8", reason="cuInit returned 100 (CUDA_ERROR_NO_DEVICE)")),
        ((2, 999), Cuda("12.8", reason="cuInit returned 999 (no name)", broken=True)),
        ((2, 999, "-DOLD"), Cuda("12.8", reason="cuInit returned 999 (no name)", broken=True)),
        ((2, 0, "-DOLD"), Cuda("12.8", reason="the CUDA driver has no function cuDeviceTotalMem_v2", broken=True)),
    ],
    ids=["two-devices", "no-device", "no-device-by-code", "unknown-code", "no-names", "no-function"],
)
def test_any_answer_of_the_driver_is_shown(compiled: Compile, made: tuple[Any, ...], expected: Cuda) -> None:
    assert cuda_here(str(compiled(*made))) == expected


def test_a_machine_without_a_driver_says_so() -> None:
    assert cuda_here("libcuda-absent.so.1") == Cuda(reason="no CUDA driver (libcuda-absent.so.1) here")


@pytest.mark.skipif(cuda_here().version is not None, reason="there is a CUDA driver here")
def test_this_machine_has_no_driver_and_says_so() -> None:
    assert doctor.examine().cuda == Cuda(reason="no CUDA driver (libcuda.so.1) here")


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_here().devices, reason="there is no CUDA device here")
def test_this_machine_s_device_is_one_that_cuda_still_supports() -> None:
    device = cuda_here().devices[0]
    assert device.name
    assert device.compute_capability >= (5, 0)
    assert device.memory_bytes > 1e9
