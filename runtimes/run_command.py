"""The command that decodes: texts or ids from the command line or standard input, a line each."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Unpack

import click

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.command_options import EngineArguments, engine_options

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.runtimes.hypothesis import Hypothesis
    from fatdeploy.runtimes.model import Model

Given = str | list[int]
Item = TypeVar("Item")


@click.command(
    epilog="""\b
Examples:
  fatdeploy run my-model "a first text" "a second one"
  fatdeploy run my-model --json < texts.txt > results.jsonl
  fatdeploy run my-model --ids --max-new-tokens 12 "17 42 9" "7 8"
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--ids", "as_ids", is_flag=True, help="A source is token ids with blanks between them.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Most tokens a target; the model's limit unless said.")
@click.option("--truncate", is_flag=True, help="Cut sources that are too long, instead of refusing them.")
@click.option(
    "--batch-size", default=8, show_default=True, type=click.IntRange(1), help="How many sources to decode together."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
@engine_options
def run(
    bundle: Path,
    texts: tuple[str, ...],
    as_ids: bool,
    max_new_tokens: int | None,
    truncate: bool,
    batch_size: int,
    as_json: bool,
    **engine: Unpack[EngineArguments],
) -> None:
    """Decode texts, or lines of standard input.

    Prints a line for each source, in order: its text, or token ids where the bundle has no tokenizer.
    """
    from fatdeploy.runtimes.model import load
    from fatdeploy.runtimes.options import DecodeOptions

    options = DecodeOptions(max_new_tokens=max_new_tokens)
    with load(bundle, **engine) as model:
        sources = checked(model, given_sources(texts, as_ids), truncate)
        for batch in with_progress(batches(sources, batch_size), len(texts), batch_size):
            for source, found in zip(batch, model.generate(batch, options, truncate=truncate), strict=True):
                click.echo(json_line(source, found) if as_json else plain_line(found))


def given_sources(texts: tuple[str, ...], as_ids: bool) -> Iterator[tuple[str, Given]]:
    """Yield where each source stands, and the source: text or token ids."""
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


def ids_from_text(place: str, text: str) -> list[int]:
    """Return the token ids that stand in a text."""
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise ConfigError(f"{place}: expected token ids with blanks between them, found {text[:40]!r}") from error


def checked(model: "Model", sources: Iterable[tuple[str, Given]], truncate: bool) -> Iterator[Given]:
    """Yield sources that the model takes; the first that it does not is named by its place."""
    for place, source in sources:
        reason = model.refusal(source, truncate=truncate)
        if reason:
            raise ConfigError(f"{place}: {reason}")
        yield source


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of so many items, as soon as each is full."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def with_progress(found: Iterator[list[Item]], n_texts: int, size: int) -> Iterator[list[Item]]:
    """Yield batches and show on standard error how far they are, where somebody watches and nothing else moves."""
    several = n_texts == 0 or n_texts > size
    watched = sys.stderr.isatty() and not sys.stdout.isatty()
    quiet = not logging.getLogger("fatdeploy").isEnabledFor(logging.WARNING)
    # Of standard input nobody knows the length: waiting for its end would keep results back.
    length = -(-n_texts // size) or None
    with click.progressbar(
        found, length, label="decoding", file=sys.stderr, hidden=quiet or not (several and watched)
    ) as bar:
        yield from bar


def plain_line(found: "Hypothesis") -> str:
    """Return a result in one line: the text, or the ids where there is none."""
    return " ".join(map(str, found.tokens)) if found.text is None else " ".join(found.text.splitlines())


def json_line(source: Given, found: "Hypothesis") -> str:
    """Return a result for a program to read."""
    values = {"source": source, "tokens": found.tokens, "text": found.text, "finish": found.finish}
    return json.dumps({**values, "dropped": found.dropped}, ensure_ascii=False)
