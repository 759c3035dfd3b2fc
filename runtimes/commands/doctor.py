"""``fatdeploy doctor``: what this machine can do, for people or as JSON. Runs where even numpy is broken."""

import json
from collections.abc import Iterator

import click

from fatdeploy.machine import Machine
from fatdeploy.runtimes.doctor.abilities import ability_line
from fatdeploy.runtimes.doctor.cuda_driver import Cuda
from fatdeploy.runtimes.doctor.examine import PackageReport, PackageState, Problem, Report, examine
from fatdeploy.tables import aligned


@click.command(
    epilog="""\b
Examples:
  fatdeploy doctor
  fatdeploy doctor --json > machine.json
"""
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for a program to read.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Show what this machine can do and what it lacks.

    The exit code is 1 if something must be repaired: a broken installation, or packages that overwrite each other.
    """
    report = examine()
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else "\n".join(report_lines(report)))
    context.exit(0 if report.healthy else 1)


def report_lines(report: Report) -> Iterator[str]:
    """Yield the report as sections for a human, the problems last."""
    yield from ["Machine", *aligned(machine_rows(report.machine), indent=2), ""]
    yield from ["Packages", *aligned((part_row(part) for part in report.parts), indent=2), ""]
    yield from ["CUDA", *aligned(cuda_rows(report.cuda), indent=2), ""]
    yield from ["GPU targets", *aligned(map(ability_line, report.targets), indent=2)]
    if report.problems:
        yield from ["", "Problems", *problem_lines(report.problems)]


def machine_rows(machine: Machine) -> Iterator[tuple[str, ...]]:
    """Yield a label and a value for each fact."""
    yield "cpu", f"{machine.cpu or 'unknown'}, {machine.architecture}"
    yield "instructions", "unknown" if machine.features is None else " ".join(machine.features)
    yield "cores", f"{machine.cores} usable"
    yield "memory", "unknown" if machine.memory_bytes is None else gigabytes(machine.memory_bytes)
    if machine.board:
        yield "board", machine.board
    yield "system", machine.system
    yield "python", machine.python


def part_row(part: PackageReport) -> tuple[str, ...]:
    """Return name, version or state, purpose, and what there is to say or to type."""
    status = part.version if part.state is PackageState.PRESENT and part.version else part.state.value
    return part.name, status, part.purpose, " ".join(text for text in (part.detail, part.install) if text)


def cuda_rows(cuda: Cuda) -> Iterator[tuple[str, ...]]:
    """Yield the driver, its devices, and why there are none."""
    if cuda.version:
        yield "driver", f"runs CUDA up to {cuda.version}"
    for device in cuda.devices:
        major, minor = device.compute_capability
        yield (
            f"device {device.index}",
            f"{device.name}, compute capability {major}.{minor}, {gigabytes(device.memory_bytes)}",
        )
    if cuda.reason:
        yield "devices", f"none: {cuda.reason}"


def problem_lines(problems: tuple[Problem, ...]) -> Iterator[str]:
    """Yield each problem and, below it, what to type."""
    for problem in problems:
        yield f"  {problem.kind.value}: {problem.message}"
        if problem.fix:
            yield f"    {problem.fix}"


def gigabytes(size: int) -> str:
    """Return a number of bytes in decimal gigabytes."""
    return f"{size / 1e9:.1f} GB"
