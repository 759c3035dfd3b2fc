"""Commands that need no torch, and how their results are shown."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import click

from fatdeploy.errors import ConfigError
from fatdeploy.machine import Machine
from fatdeploy.runtimes.commands.engine_options import EngineArguments, engine_options
from fatdeploy.runtimes.commands.progress import progress_bar
from fatdeploy.runtimes.doctor.abilities import ability_line
from fatdeploy.runtimes.doctor.cuda_driver import Cuda
from fatdeploy.runtimes.doctor.examine import PackageReport, PackageState, Problem, Report, examine
from fatdeploy.tables import aligned

if TYPE_CHECKING:
    # Not at run time: the doctor must run where even numpy is broken.
    from fatdeploy.bundle import Bundle
    from fatdeploy.certificate import LogitAgreement
    from fatdeploy.runtimes.engines.protocol import Engine

Batch = TypeVar("Batch")
# Of a bundle, its engine, the model's source, how many sources, their seed, and what shows how far a list has come.
LiveComparison = Callable[["Bundle", "Engine[Any]", str, int, int, Callable[..., Any]], "LogitAgreement"]


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


@click.command(
    epilog="""\b
Examples:
  fatdeploy verify my-model
  fatdeploy verify my-model --threads 1 --json
  fatdeploy verify my-model --against my-checkpoint --n 200 --seed 7
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--against",
    metavar="SOURCE",
    help="Compare also with the live model (what was given to export) on fresh random sources; needs torch.",
)
@click.option("--n", "count", default=32, show_default=True, type=click.IntRange(1), help="Sources for --against.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the sources for --against.")
@click.option("--record", is_flag=True, help="Add this kind of CPU to the certificate of a quantized bundle.")
@engine_options
@click.pass_obj
def verify(
    live_comparison: Callable[[], LiveComparison],
    bundle: Path,
    as_json: bool,
    against: str | None,
    count: int,
    seed: int,
    record: bool,
    **engine: Unpack[EngineArguments],
) -> None:
    """Check on this machine that a bundle gives the reference's tokens.

    Runs the probes that came with the bundle, every row of a batch also alone, one batch twice; needs no torch. The
    exit code is 1 if anything differs. On sources that nobody chose, a token that the reference itself decides by no
    more than the noise of fp32 is a tie, and counted apart.

    A quantized bundle brings the sources that its gate was passed with: the share of the reference's tokens must reach
    the bar on this CPU, too, and every row of a batch must get what it gets alone.
    """
    # Imported here: the doctor, beside it, must run where even numpy is broken.
    from fatdeploy.bundle import read_bundle
    from fatdeploy.manifest import PROBES
    from fatdeploy.runtimes.engines.opening import opened_engine
    from fatdeploy.runtimes.proof.probes import read_probes, verified

    found = read_bundle(bundle)
    if found.manifest.precision in ("fp16", "bf16"):
        raise ConfigError(
            f"{bundle} is in {found.manifest.precision}: its tokens need not be the reference's, and verify compares "
            f"them exactly. See what its certificate says: fatdeploy inspect {bundle}"
        )
    running = opened_engine(found, **engine)
    if found.manifest.quantization is not None:
        _verify_quantized(found, running, as_json=as_json, record=record, against=against)
        return
    if record:
        raise click.UsageError("--record is for quantized bundles: fp32 gives the reference's tokens on every CPU")
    parity = verified(running, read_probes(found.file(PROBES)))
    agreement = None
    if against is not None:
        # Of the exporter, which is imported now: only who asks for the live model needs torch.
        agreement = live_comparison()(found, running, against, count, seed, watched)
    if as_json:
        live = {} if agreement is None else {"against": asdict(agreement)}
        click.echo(json.dumps(asdict(parity) | live))
        return
    click.echo(f"{bundle}: {parity.line()}")
    if agreement is not None:
        click.echo(f"{bundle} against {against}: {agreement.line()}")


def _verify_quantized(
    bundle: "Bundle", engine: "Engine[Any]", *, as_json: bool, record: bool, against: str | None
) -> None:
    from fatdeploy.runtimes.proof.gate import recorded_here, verified_quantized

    if against is not None:
        raise click.UsageError("--against compares logits of fp32: a quantized bundle is judged by its gate")
    found = verified_quantized(engine, bundle)
    if record:
        recorded_here(bundle, found["share"])
    if as_json:
        click.echo(json.dumps(found))
        return
    bar = f"the bar is {found['bar']:.2%}" if found["enforced"] else "random weights: judged by the export's"
    apart = found["row_difference"]
    rows = f"differs from the row alone by {apart:.0e}" if apart else "is what the row alone is, bit for bit"
    click.echo(
        f"{bundle.path}: {found['same_tokens']} of {found['tokens']} tokens ({found['share']:.2%}) and "
        f"{found['same_sequences']} of {found['sequences']} targets are the reference's ({bar}; "
        f"{found['recorded_share']:.2%} when it was exported); a row of a batch {rows}"
    )


@click.command(
    epilog="""\b
Examples:
  fatdeploy inspect my-model
  fatdeploy inspect my-model --json | jq .weights
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what a bundle holds: contract, graphs, weights, origin, proof.

    Every file is checked against its hash first; no graph is opened.
    """
    import fatdeploy

    inspection = fatdeploy.inspect(bundle)
    click.echo(json.dumps(inspection.as_dict(), indent=2) if as_json else "\n".join(inspection.lines()))


def watched(batches: list[Batch]) -> AbstractContextManager[Iterable[Batch]]:
    """Show on standard error how far a list has come, unless nobody looks or --quiet was given."""
    return progress_bar(batches, "comparing")


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
    found = part.version if part.state is PackageState.PRESENT and part.version else part.state.value
    return part.name, found, part.purpose, " ".join(text for text in (part.detail, part.install) if text)


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
