"""The command that measures: bundles on this machine, with how right they are beside how fast."""

import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import click
from click.core import ParameterSource

from fatdeploy.errors import ConfigError
from fatdeploy.machine import usable_cores
from fatdeploy.runtimes.bench.plan import BenchRequest, fitting_threads, plans_for

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from click._termui_impl import ProgressBar

    from fatdeploy.bundle import Bundle

STDOUT = Path("-")
NUMBER = re.compile("0*[1-9][0-9]{0,8}")
# Those that a bundle or a machine may lower if nobody typed them.
LOWERED = ("source", "target", "beams", "threads")

log = logging.getLogger("fatdeploy")

Command = TypeVar("Command", bound=Callable[..., Any])


class BenchArguments(TypedDict):
    """What is measured; the names are those of Asked."""

    batch: tuple[int, ...]
    source: int
    target: int
    beams: tuple[int, ...]
    threads: tuple[int, ...]
    repetitions: int
    spinning: bool


def numbers_from_text(_context: click.Context, _option: click.Parameter, given: str) -> tuple[int, ...]:
    """Return whole numbers from 1 up that were typed with commas between them, each once."""
    words = [word.strip() for word in given.split(",")]
    if not all(NUMBER.fullmatch(word) for word in words):
        raise click.BadParameter(f"expected whole numbers from 1 up with commas between them, found {given!r}")
    return tuple(dict.fromkeys(map(int, words)))


def numbers(name: str, default: str, text: str) -> Callable[[Command], Command]:
    """Return an option that takes several numbers."""
    return click.option(
        name, default=default, show_default=True, metavar="N,...", callback=numbers_from_text, help=text
    )


@click.command(
    epilog="""\b
Phases:
  load         the files are checked, both graphs opened
  encode       the sources are read
  first token  the first step, with the choice of its token
  per token    each later one
  end to end   from sources to targets
Of parallel models only load, encode and end to end are told.

\b
Examples:
  fatdeploy bench my-model
  fatdeploy bench my-model my-int8-model --batch 1 --beams 1 --html bench.html
  fatdeploy bench my-model --threads 1 --repetitions 100 --json - > bench.json
"""
)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@numbers("--batch", "1,8,32", "Sources that are decoded at once.")
@click.option("--source", default=32, show_default=True, type=click.IntRange(1), help="Tokens of each source.")
@click.option("--target", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each target.")
@numbers("--beams", "1,4", "Beams of a beam search; 1 is greedy.")
@numbers("--threads", "1,2", "Threads of onnxruntime.")
@click.option(
    "--repetitions",
    default=20,
    show_default=True,
    type=click.IntRange(1),
    help="Timed decodes of each setting, spread over up to four processes.",
)
@click.option(
    "--spinning/--no-spinning",
    default=True,
    show_default=True,
    help="Threads that wait keep their cores busy: quicker alone, slower beside other programs.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Write everything as JSON; - is standard output, instead of the table.",
)
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write a report with plots, one file that needs no network.",
)
@click.pass_context
def bench(
    context: click.Context,
    /,
    bundles: tuple[Path, ...],
    json_path: Path | None,
    html_path: Path | None,
    **options: Unpack[BenchArguments],
) -> None:
    """Measure how fast bundles are on this machine, and how right.

    Before a time is recorded, each bundle is checked against the reference's tokens that came with it; one of fp32
    that says another token is not measured, and the exit code is 1. Sources are random and EOS ends nothing, so that
    every decode does the same work. Each bundle and number of threads has a process of its own, and they take turns.
    """
    from fatdeploy.runtimes.bench.page import html_from_report
    from fatdeploy.runtimes.bench.processes import measured, ticks_of, turns_of
    from fatdeploy.runtimes.bench.report import report_of
    from fatdeploy.runtimes.bench.table import report_lines

    check_outputs(json_path, html_path)
    untyped = {name for name in LOWERED if context.get_parameter_source(name) is ParameterSource.DEFAULT}
    asked = fitting_threads(BenchRequest(**options, defaults=frozenset(untyped)), usable_cores())
    plans = plans_for(read_bundles(bundles), asked)
    for plan in plans:
        for note in plan.notes:
            log.warning("%s", note)
    turns = list(turns_of(plans))
    with progress_bar(sum(ticks_of(turn) for _, turn in turns)) as bar:
        report = report_of(plans, measured(turns, bar.update), asked)
    as_json = json.dumps(report, indent=2, ensure_ascii=False)
    click.echo(as_json if json_path == STDOUT else "\n".join(report_lines(report)))
    if json_path not in (None, STDOUT):
        write_text("--json", json_path, as_json + "\n")
    if html_path is not None:
        write_text("--html", html_path, html_from_report(report))


def read_bundles(paths: Sequence[Path]) -> "dict[str, Bundle]":
    """Return bundles by what they are called here; each is whole, and has probes to check it by."""
    from fatdeploy.bundle import read_bundle
    from fatdeploy.manifest import PROBES

    found = [read_bundle(path) for path in paths]
    for bundle in found:
        bundle.file(PROBES)
    folders = [bundle.path for bundle in found]
    twice = [str(path) for path, folder in zip(paths, folders, strict=True) if folders.count(folder) > 1]
    if twice:
        raise ConfigError(f"the same bundle is given more than once: {', '.join(twice)}")
    names = [folder.name for folder in folders]
    # The folders' names, unless two have the same.
    labels = names if len(set(names)) == len(names) else [str(path) for path in paths]
    return dict(zip(labels, found, strict=True))


def check_outputs(json_path: Path | None, html_path: Path | None) -> None:
    """Refuse files that cannot be written before a bench that may take long."""
    if html_path == STDOUT:
        raise click.BadParameter("expected a file, found - (standard output has the table)", param_hint="--html")
    given = {"--json": None if json_path == STDOUT else json_path, "--html": html_path}
    for name, path in given.items():
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{name} {path}: there is no folder {path.parent}; make it first")
    if html_path is not None and given["--json"] == html_path:
        raise ConfigError(f"--json and --html both name {html_path}: choose two files")


def write_text(name: str, path: Path | None, text: str) -> None:
    """Write a result."""
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {name} {path}: {error.strerror or error}") from error


def progress_bar(length: int) -> "ProgressBar[int]":
    """Return a bar on standard error, where somebody watches."""
    hidden = not log.isEnabledFor(logging.WARNING) or not sys.stderr.isatty()
    return click.progressbar(range(length), label="measuring", file=sys.stderr, hidden=hidden)
