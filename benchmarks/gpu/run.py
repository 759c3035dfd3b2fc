"""``make test-gpu``: every test that needs a GPU, and the benchmark of each GPU target, in one report to send back."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from benchmarks.gpu.here import NEXT
from fatdeploy.errors import BackendUnavailable, ConfigError, FatdeployError
from fatdeploy.runtimes.doctor.cuda_driver import cuda_here
from fatdeploy.runtimes.doctor.examine import Report, examine
from fatdeploy.runtimes.doctor.gpu_clocks import gpus_here

ROOT = Path(__file__).parents[2]
REPORT = Path("gpu-report.json")
FORMAT = 1
SOURCES = ("g2p", "transformer-small")
# Targets and precisions to export and measure, if the doctor says that they run here.
MEASURED = (
    ("ort-cuda", "fp32"),
    ("ort-cuda", "fp16"),
    ("tensorrt", "fp32"),
    ("tensorrt", "fp16"),
    ("tensorrt-rtx", "fp16"),
)


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    code: int
    out: str
    error: str


Runner = Callable[[Sequence[str]], CommandResult]


def run(command: Sequence[str]) -> CommandResult:
    """Run a command of this Python in the repository."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return CommandResult(ran.returncode, ran.stdout, ran.stderr)


def accepted(folder: Path, runner: Runner = run, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return the report of all tests and measurements, including what failed."""
    doctor = examine()
    say("running the tests that need a GPU")
    tests = gpu_tests(folder, runner)
    measured = [_measured(folder, source, *kind, doctor, runner, say) for source in SOURCES for kind in MEASURED]
    done = [row for row in measured if "missing" not in row]
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "passed": tests["passed"] and bool(done) and all(row["failed"] is None for row in done),
        "gpus": gpus_here().as_dict(),
        "doctor": doctor.as_dict(),
        "tests": tests,
        "measured": measured,
    }


def gpu_tests(folder: Path, runner: Runner) -> dict[str, Any]:
    """Run every test that is marked ``gpu``, and return the outcome of each; a skipped test has not passed."""
    results = folder / "tests.xml"
    ran = runner(["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"])
    cases = [] if not results.exists() else list(ElementTree.parse(results).iter("testcase"))  # noqa: S314 - our own
    outcomes = [{"test": f"{case.get('classname')}.{case.get('name')}", **_outcome(case)} for case in cases]
    passed = ran.code == 0 and any(outcome["outcome"] == "passed" for outcome in outcomes)
    return {"passed": passed, "exit_code": ran.code, "tests": outcomes, "said": _last(ran)}


def _outcome(case: ElementTree.Element) -> dict[str, Any]:
    for outcome in ("failure", "error", "skipped"):
        element = case.find(outcome)
        if element is not None:
            return {"outcome": outcome, "message": element.get("message"), "text": element.text}
    return {"outcome": "passed"}


def _measured(
    folder: Path, source: str, target: str, precision: str, doctor: Report, runner: Runner, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the measurement of a model exported for a target, or what is missing, or what failed."""
    row: dict[str, Any] = {"source": source, "target": target, "precision": precision}
    missing = sorted({name for ability in doctor.targets if ability.target == target for name in ability.missing})
    if missing:
        return {**row, "missing": missing}
    say(f"exporting and measuring {source} for {target} in {precision}")
    bundle, result = folder / f"{source}-{target}-{precision}", folder / f"{source}-{target}-{precision}.json"
    commands = (
        ["-m", "fatdeploy", "export", source, "--out", str(bundle), "--target", target, "--precision", precision],
        ["-m", "fatdeploy", "bench", str(bundle), "--json", str(result)],
    )
    for command in commands:
        ran = runner(command)
        if ran.code:
            return {**row, "failed": {"command": command[2], "exit_code": ran.code, "said": _last(ran)}, "bench": None}
    return {**row, "failed": None, "bench": json.loads(result.read_text())}


def _last(ran: CommandResult, lines: int = 40) -> list[str]:
    """Return the last lines of a command's output."""
    return [*ran.out.splitlines(), *ran.error.splitlines()][-lines:]


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report completely or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def check_device() -> None:
    """Raise if there is no GPU, and say what to do."""
    cuda = cuda_here()
    if not cuda.devices:
        raise BackendUnavailable(f"no GPU to test: {cuda.reason}; {NEXT}")


@click.command()
@click.option("--out", default=REPORT, show_default=True, type=click.Path(dir_okay=False, path_type=Path))
def main(out: Path) -> None:
    """Run every test that needs a GPU, measure each GPU target, and write one JSON report."""
    try:
        check_device()
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"--out {out}: there is no folder {out.parent}; create it first")
        with tempfile.TemporaryDirectory(prefix="fatdeploy-gpu-") as folder:
            report = accepted(Path(folder), run, lambda line: click.echo(f"{line} …", err=True))
        write_report(report, out)
    except FatdeployError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error
    click.echo(f"{out}: {'passed' if report['passed'] else 'not passed'}; please send it back with an issue")
    raise SystemExit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
