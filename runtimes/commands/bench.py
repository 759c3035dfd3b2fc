"""``fatdeploy bench``: measures how fast bundles are on this machine, and how many tokens are the reference's."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from fatdeploy.errors import ConfigError
from fatdeploy.machine import usable_cores
from fatdeploy.runtimes.bench.plan import BenchRequest, fitting_threads, plans_for
from fatdeploy.runtimes.commands.engine_options import spinning_option
from fatdeploy.runtimes.commands.progress import progress_bar
from fatdeploy.runtimes.commands.run_output import check_output_file, write_output_file

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.bundle import Bundle

STDOUT = Path("-")
NUMBER = re.compile("0*[1-9][0-9]{0,8}")
# A bundle or a machine may lower the defaults of these options.
LOWERED = ("source", "target", "beams", "threads")

log = logging.getLogger("fatdeploy")

Command = TypeVar("Command", bound=Callable[..., Any])


def numbers_from_text(_context: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the positive integers in a comma-separated list, each once."""
    words = [word.strip() for word in text.split(",")]
    if not all(NUMBER.fullmatch(word) for word in words):
        raise click.BadParameter(f"expected whole numbers from 1 up with commas between them, found {text!r}")
    return tuple(dict.fromkeys(map(int, words)))


def numbers(name: str, default: str, text: str) -> Callable[[Command], Command]:
    """Return an option that takes several numbers."""
    return click.option(
        name, default=default, show_default=True, metavar="N,...", callback=numbers_from_text, help=text
    )


@click.command(
    epilog="""\b
Phases:
  load         check the files and open both graphs
  encode       read the sources
  first token  the first step, with the choice of its token
  per token    each later step
  end to end   from sources to targets
Parallel models have only load, encode and end to end, and need --beams 1.

\b
Examples:
  fatdeploy bench my-model
  fatdeploy bench my-model my-int8-model --batch 1 --beams 1 --html bench.html
  fatdeploy bench my-model --threads 1 --repetitions 100 --json - > bench.json
"""
)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@numbers("--batch", "1,8,32", "Number of sources to decode at once.")
@click.option("--source", default=32, show_default=True, type=click.IntRange(1), help="Tokens per source.")
@click.option("--target", default=64, show_default=True, type=click.IntRange(1), help="Tokens per target.")
@numbers("--beams", "1,4", "Number of beams; 1 is greedy.")
@numbers("--threads", "1,2", "Number of onnxruntime threads.")
@click.option(
    "--repetitions",
    default=20,
    show_default=True,
    type=click.IntRange(1),
    help="Timed decodes of each setting, spread over up to four processes.",
)
@click.option("--no-defaults", is_flag=True, help="Measure without the bundles' default options.")
@spinning_option
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Write all measurements as JSON; - prints them instead of the table.",
)
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write a report with plots: one file that needs no network.",
)
@click.pass_context
def bench(
    context: click.Context,
    /,
    bundles: tuple[Path, ...],
    json_path: Path | None,
    html_path: Path | None,
    **options: Any,
) -> None:
    """Measure how fast and how accurate bundles are on this machine.

    Each bundle is checked against the reference's tokens before it is timed. An fp32 bundle that returns a different
    token is not measured, and the exit code is 1. Sources are random and EOS is ignored, so every decode does the same
    work. Each bundle runs in a process of its own for each number of threads, and the processes take turns.

    A bundle is measured with those of its default options that change scores (fatdeploy inspect shows them), because
    they cost time in every step. Without --beams, the second number of beams is the bundle's own.
    """
    from fatdeploy.runtimes.bench.page import html_from_report
    from fatdeploy.runtimes.bench.processes import measured, ticks_of, turns_of
    from fatdeploy.runtimes.bench.report import report_of
    from fatdeploy.runtimes.bench.table import report_lines

    check_outputs(json_path, html_path)
    defaults = {name for name in LOWERED if context.get_parameter_source(name) is ParameterSource.DEFAULT}
    request = fitting_threads(BenchRequest(**options, defaults=frozenset(defaults)), usable_cores())
    plans = plans_for(read_bundles(bundles), request)
    for plan in plans:
        for note in plan.notes:
            log.warning("%s", note)
    turns = list(turns_of(plans))
    with progress_bar(range(sum(ticks_of(turn) for _, turn in turns)), "measuring") as bar:
        report = report_of(plans, measured(turns, bar.update), request)
    as_json = json.dumps(report, indent=2, ensure_ascii=False)
    click.echo(as_json if json_path == STDOUT else "\n".join(report_lines(report)))
    if json_path is not None and json_path != STDOUT:
        write_output_file("--json", json_path, as_json + "\n")
    if html_path is not None:
        write_output_file("--html", html_path, html_from_report(report))


def read_bundles(paths: Sequence[Path]) -> "dict[str, Bundle]":
    """Return complete bundles by their labels; each must have probes to check it with."""
    from fatdeploy.bundle import read_bundle
    from fatdeploy.manifest import PROBES

    bundles = [read_bundle(path) for path in paths]
    for bundle in bundles:
        bundle.file(PROBES)
    folders = [bundle.path for bundle in bundles]
    repeated = [str(path) for path, folder in zip(paths, folders, strict=True) if folders.count(folder) > 1]
    if repeated:
        raise ConfigError(f"the same bundle is given more than once: {', '.join(repeated)}")
    names = [folder.name for folder in folders]
    # Folder names, or whole paths if two folders have the same name.
    labels = names if len(set(names)) == len(names) else [str(path) for path in paths]
    return dict(zip(labels, bundles, strict=True))


def check_outputs(json_path: Path | None, html_path: Path | None) -> None:
    """Refuse files that cannot be written, before a bench that may take long."""
    if html_path == STDOUT:
        raise click.BadParameter("expected a file, found - (standard output has the table)", param_hint="--html")
    paths = {"--json": None if json_path == STDOUT else json_path, "--html": html_path}
    for option, path in paths.items():
        if path is not None:
            check_output_file(option, path)
    if html_path is not None and paths["--json"] == html_path:
        raise ConfigError(f"--json and --html both name {html_path}: choose two files")
