"""The command that decodes: texts or ids from the command line or standard input, a line each."""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.commands.decode_options import decode_options, options_from_arguments
from fatdeploy.runtimes.commands.engine_options import EngineArguments, engine_options
from fatdeploy.runtimes.commands.run_output import Given, Output

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from click._termui_impl import ProgressBar

    from fatdeploy.runtimes.decoding.hypothesis import Finish, Hypothesis
    from fatdeploy.runtimes.model import Model, ReadSource

log = logging.getLogger("fatdeploy")

Item = TypeVar("Item")


@click.command(
    epilog="""\b
Examples:
  fatdeploy run my-model "a first text" "a second one"
  fatdeploy run my-model --beams 4 --n-best 2 --scores "a text"
  fatdeploy run my-model --sample --temperature 0.8 --top-p 0.9 --seed 7 "a text"
  fatdeploy run my-model --stream --stop "." "a text"
  fatdeploy run my-model --json < texts.txt > results.jsonl
  fatdeploy run my-model --ids --max-new-tokens 12 "17 42 9" "7 8"
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--ids", "as_ids", is_flag=True, help="A source is token ids with blanks between them.")
@click.option("--truncate", is_flag=True, help="Cut sources that are too long, instead of refusing them.")
@click.option(
    "--batch-size", default=64, show_default=True, type=click.IntRange(1), help="How many sources to take at a time."
)
@click.option(
    "--batch-tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    help="Positions to decode together: targets times the lengths of source and target. Changes no result.",
)
@click.option("--stream", is_flag=True, help="Write a target while it is decoded.")
@click.option("--scores", is_flag=True, help="Write each target's score; with --json also log-probabilities.")
@click.option(
    "--alignments", is_flag=True, help="Write what each token looks at; of bundles exported with --attention."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
@decode_options()
@engine_options
def run(
    bundle: Path,
    texts: tuple[str, ...],
    as_ids: bool,
    truncate: bool,
    batch_size: int,
    batch_tokens: int,
    stream: bool,
    scores: bool,
    alignments: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Decode texts, or lines of standard input.

    Prints a line for each source, in order: its text, or token ids where the bundle has no tokenizer. With --n-best a
    line for each target, after the number of its source; --scores and --alignments (source-target pairs) add columns.
    """
    from fatdeploy.runtimes.model import load

    if stream and (scores or alignments) and not as_json:
        raise click.UsageError("--stream writes targets alone: --scores and --alignments go with it only in --json")
    engine = cast("EngineArguments", {name: arguments.pop(name) for name in EngineArguments.__annotations__})
    options = options_from_arguments(arguments, as_ids=as_ids, scores=scores)
    output = Output(as_json, options.num_return_sequences > 1, scores, alignments)
    with load(bundle, **engine) as model:
        if alignments and model.spec.alignment is None:
            raise ConfigError(f"{bundle} tells no alignments: export it again with --attention LAYER")
        sources = checked(model, given_sources(texts, as_ids), truncate)
        if stream:
            finishes = Counter(
                output.write_stream(source, model.stream(readable, options)) for source, readable in sources
            )
        else:
            # What is typed by hand is answered line by line.
            size = 1 if not texts and sys.stdin.isatty() else batch_size
            with progress_bar(len(texts)) as bar:
                decoded = partial(model.generate, options=options, batch_tokens=batch_tokens, progress=bar.update)
                finishes = Counter(write_batches(batches(sources, size), decoded, output))
    if finishes["cancelled"]:
        log.warning(
            "%d of %d targets are not complete: --timeout %g was over",
            *(finishes["cancelled"], finishes.total(), options.timeout_s),
        )


def write_batches(
    given: "Iterable[list[tuple[Given, ReadSource]]]",
    decoded: "Callable[[list[ReadSource]], list[Hypothesis]]",
    output: Output,
) -> "Iterator[Finish]":
    """Write the results of each batch as soon as they are there; yield what ended each target."""
    numbers = count()
    for batch in given:
        for (source, _), found in zip(batch, decoded([readable for _, readable in batch]), strict=True):
            click.echo("\n".join(output.lines(next(numbers), source, found)))
            yield from (one.finish for one in (found, *found.alternatives))


def given_sources(texts: tuple[str, ...], as_ids: bool) -> Iterator[tuple[str, Given]]:
    """Yield where each source stands, and the source: text or token ids."""
    from fatdeploy.runtimes.decoding.sources import ids_from_text

    empty = True
    found = numbered_texts(texts) if texts else numbered_lines(sys.stdin.buffer)
    for place, text in found:
        empty = False
        yield place, ids_from_text(place, text) if as_ids else text
    if empty:
        raise ConfigError("no source given: pass texts, or a line for each on standard input")


def numbered_texts(texts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the texts of the command line."""
    yield from ((f"text {number}", text) for number, text in enumerate(texts, 1))


def numbered_lines(stream: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a stream as they come."""
    for number, line in enumerate(stream, 1):
        try:
            yield f"line {number}", line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"line {number}: expected UTF-8, found byte {line[error.start]:#04x}") from error


def checked(
    model: "Model", sources: Iterable[tuple[str, Given]], truncate: bool
) -> "Iterator[tuple[Given, ReadSource]]":
    """Yield each source and what the model reads; an error names the place of the first that it cannot read."""
    for place, source in sources:
        try:
            readable = model.read(source, truncate=truncate)
        except SpecMismatch as error:
            raise ConfigError(f"{place}: {error}") from error
        yield source, readable


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of so many items, as soon as each is full."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def progress_bar(n_texts: int) -> "ProgressBar[int]":
    """Return a bar on standard error that counts sources, where somebody watches and nothing else moves."""
    several = n_texts != 1
    watched = sys.stderr.isatty() and not sys.stdout.isatty()
    quiet = not logging.getLogger("fatdeploy").isEnabledFor(logging.WARNING)
    # Of standard input nobody knows the length: waiting for its end would keep results back.
    expected = range(n_texts) if n_texts else count()
    return click.progressbar(
        expected, label="decoding", file=sys.stderr, show_pos=True, hidden=quiet or not (several and watched)
    )
