"""The acceptance run on a GPU: one complete report or none, and a clear message where there is no GPU."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gpu import here as gpu_here
from benchmarks.gpu import run as gpu_acceptance
from benchmarks.gpu.run import MEASURED, SOURCES, CommandResult, accepted, gpu_tests, main, write_report
from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.doctor.abilities import Ability
from fatdeploy.runtimes.doctor.cuda_driver import Cuda, CudaDevice, cuda_here
from fatdeploy.runtimes.doctor.examine import examine

ROOT = Path(__file__).parents[2]
ABSENT = "no GPU to test: no CUDA driver (libcuda.so.1) here; run it on a machine with an NVIDIA GPU"
RESULTS = """<testsuites><testsuite><testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two"><skipped message="no TensorRT"/></testcase>
<testcase classname="tests.test_b" name="test_three"><failure message="wrong">at line 3</failure></testcase>
</testsuite></testsuites>"""
without_gpu = pytest.mark.skipif(bool(cuda_here().devices), reason="there is a CUDA device here")


class Pretending:
    """Runs nothing: tests pass, exports and benches write their files, except those that must fail."""

    def __init__(self, failing: str = "", tests: str = RESULTS.replace("failure", "passing")) -> None:
        self.failing, self.tests = failing, tests
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> CommandResult:
        self.commands.append([*command])
        if self.failing and self.failing in command:
            return CommandResult(1, "", f"error: {self.failing} is not available")
        if command[1] == "pytest":
            Path(command[-1].partition("=")[2]).write_text(self.tests)
        elif command[2] == "bench":
            Path(command[-1]).write_text(json.dumps({"rows": [{"bundle": Path(command[3]).name}]}))
        return CommandResult(0, "done\n", "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU with onnxruntime-gpu and TensorRT-RTX but without TensorRT."""
    device = Cuda("12.8", (CudaDevice(0, "NVIDIA T4", (7, 5), 16 << 30),))
    missing = {"ort-cuda": (), "tensorrt": ("tensorrt",), "tensorrt-rtx": ()}
    targets = tuple(Ability(target, "run", names) for target, names in missing.items())
    report = replace(examine(), cuda=device, targets=targets)
    monkeypatch.setattr(gpu_acceptance, "cuda_here", lambda: device)
    monkeypatch.setattr(gpu_acceptance, "examine", lambda: report)


@without_gpu
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_stops_at_once_with_one_line_where_there_is_no_gpu(tmp_path: Path) -> None:
    for name in ("Makefile", "benchmarks", "runtimes"):
        (tmp_path / name).symlink_to(ROOT / name)
    ran = subprocess.run(
        ["make", "test-gpu", f"PYTHON={sys.executable}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    # make prints the command's exit code, 1, and itself always exits with 2.
    assert ran.stderr.splitlines()[0].startswith(f"error: {ABSENT}")
    assert ran.stderr.splitlines()[1].endswith("Error 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "benchmarks", "runtimes"]


@without_gpu
def test_without_a_gpu_there_is_one_line_exit_code_1_and_no_file(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    ran = CliRunner().invoke(main, ["--out", str(out)])
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert ran.stderr.startswith(f"error: {ABSENT}")
    assert ran.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    first = subprocess.run([sys.executable, "-P", gpu_here.__file__], capture_output=True, text=True, check=False)
    assert (first.returncode, first.stderr) == (1, ran.stderr)


def test_the_first_check_needs_no_package_but_python(tmp_path: Path) -> None:
    code = f"import runpy; runpy.run_path({gpu_here.__file__!r}, run_name='__main__')"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == (0 if cuda_here().devices else 1)
    assert "Traceback" not in ran.stderr
    assert gpu_here.reason_against("libcuda-absent.so.1") == "no CUDA driver (libcuda-absent.so.1) here"


@pytest.mark.usefixtures("gpu")
def test_the_report_has_machine_versions_tests_and_a_bench_of_each_target_that_can_run(tmp_path: Path) -> None:
    runner = Pretending()
    report = accepted(tmp_path, runner)
    assert report["passed"] is True
    assert report["doctor"]["machine"]["cores"] >= 1
    assert {part["name"] for part in report["doctor"]["parts"]} >= {"onnxruntime", "tensorrt-rtx"}
    assert [test["outcome"] for test in report["tests"]["tests"]] == ["passed", "skipped", "passed"]
    kinds = [(row["source"], row["target"], row["precision"]) for row in report["measured"]]
    assert kinds == [(source, *kind) for source in SOURCES for kind in MEASURED]
    for row in report["measured"]:
        if row["target"] == "tensorrt":
            assert row["missing"] == ["tensorrt"]
        else:
            assert row["bench"]["rows"] == [{"bundle": f"{row['source']}-{row['target']}-{row['precision']}"}]
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report))
    assert [command[1:3] for command in runner.commands[:3]] == [
        ["pytest", "-m"],
        ["fatdeploy", "export"],
        ["fatdeploy", "bench"],
    ]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("failing", "command"), [("export", "export"), ("bench", "bench")])
def test_a_failure_is_in_the_report_and_fails_the_run(failing: str, command: str, tmp_path: Path) -> None:
    report = accepted(tmp_path, Pretending(failing))
    assert report["passed"] is False
    failed = [row["failed"] for row in report["measured"] if row.get("failed")]
    assert failed[0] == {"command": command, "exit_code": 1, "said": [f"error: {failing} is not available"]}


def test_a_test_that_fails_and_tests_that_are_all_skipped_are_not_passed(tmp_path: Path) -> None:
    def failing(command: Sequence[str]) -> CommandResult:
        (tmp_path / "tests.xml").write_text(RESULTS)
        return CommandResult(1, "1 failed", "")

    report = gpu_tests(tmp_path, failing)
    assert report["passed"] is False
    assert report["tests"][2] == {
        "test": "tests.test_b.test_three",
        "outcome": "failure",
        "message": "wrong",
        "text": "at line 3",
    }
    skipped = "<testsuite><testcase classname='t' name='one'><skipped message='no GPU'/></testcase></testsuite>"
    assert gpu_tests(tmp_path, Pretending(tests=skipped))["passed"] is False


@without_gpu
def test_the_tests_that_need_a_gpu_are_run_and_here_skipped_with_a_reason(tmp_path: Path) -> None:
    # Only the tests of one file that needs no torch: collecting all of them is slow.
    report = gpu_tests(
        tmp_path, lambda command: gpu_acceptance.run([*command, "--noconftest", "tests/doctor/test_doctor.py"])
    )
    assert (report["passed"], report["exit_code"]) == (False, 0)
    [test] = report["tests"]
    assert (test["outcome"], test["message"]) == ("skipped", "there is no CUDA device here")


@pytest.mark.usefixtures("gpu")
def test_the_command_writes_one_file_and_its_exit_code_says_whether_all_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"
    for runner, code, word in ((Pretending(), 0, "passed"), (Pretending("bench"), 1, "not passed")):
        monkeypatch.setattr(gpu_acceptance, "run", runner)
        ran = CliRunner().invoke(main, ["--out", str(out)])
        assert (ran.exit_code, ran.stdout) == (code, f"{out}: {word}; please send it back with an issue\n")
        assert json.loads(out.read_text())["passed"] is (code == 0)
        assert list(tmp_path.iterdir()) == [out]
    ran = CliRunner().invoke(main, ["--out", str(tmp_path / "no" / "report.json")])
    assert (ran.exit_code, ran.stderr.count("\n")) == (1, 1)
    assert "create it first" in ran.stderr


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_report_that_cannot_be_written_is_a_fatdeploy_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot write"):
        write_report({"any": Any.__name__}, tmp_path / "report.json")
