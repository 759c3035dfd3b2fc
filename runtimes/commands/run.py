"""``fatdeploy run``: decodes texts or token ids from the command line or standard input, one line each."""

import logging
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from fatdeploy.errors import ConfigError, FatdeployError, SpecMismatch
from fatdeploy.runtimes.commands.decode_options import decode_options, popped_changes
from fatdeploy.runtimes.commands.engine_options import (
    batch_tokens_option,
    engine_options,
    language_options,
    popped_engine_arguments,
    split_option,
    truncate_option,
)
from fatdeploy.runtimes.commands.progress import progress_bar
from fatdeploy.runtimes.commands.run_output import Output
from fatdeploy.runtimes.text.lines import InputLine, line_from_json
from fatdeploy.runtimes.text.token_ids import ids_from_text

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from click._termui_impl import ProgressBar

    from fatdeploy.runtimes.decoding.hypothesis import Finish, Hypothesis
    from fatdeploy.runtimes.model import Model

log = logging.getLogger("fatdeploy")

# Sources to read at a time: from a file enough for several workers, from a pipe few, because its lines may come slowly.
FROM_FILE, FROM_PIPE = 1024, 64

Item = TypeVar("Item")
AnyRead = TypeVar("AnyRead")


@click.command(
    epilog="""\b
Examples:
  fatdeploy run my-model "a first text" "a second one"
  fatdeploy run my-model --beams 4 --n-best 2 --scores "a text"
  fatdeploy run my-model --sample --temperature 0.8 --top-p 0.9 --seed 7 "a text"
  fatdeploy run my-model --stream --stop "." "a text"
  fatdeploy run my-model --json < texts.txt > results.jsonl
  fatdeploy run my-nllb --source-language eng_Latn --target-language deu_Latn "Hello."
  fatdeploy run my-model --split sentences < document.txt
  fatdeploy run my-model --shortlist auto < texts.txt
  fatdeploy run my-model --json-lines --json < sources.jsonl > results.jsonl
  fatdeploy run my-model --ids --max-new-tokens 12 "17 42 9" "7 8"
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--ids", "as_ids", is_flag=True, help="Read each source as token ids separated by blanks.")
@click.option(
    "--json-lines",
    is_flag=True,
    help='Read each line of standard input as {"source": ..., "prefix": ...}: texts, or lists of token ids. '
    "A line without a prefix gets that of --prefix.",
)
@truncate_option
@split_option
@language_options
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help=f"Number of sources to read at a time (default: {FROM_FILE:,} from a file or the command line, "
    f"{FROM_PIPE} from a pipe, 1 from a terminal).",
)
@batch_tokens_option
@click.option("--stream", is_flag=True, help="Write each target while it is decoded.")
@click.option("--scores", is_flag=True, help="Write the score of each target; with --json also log-probabilities.")
@click.option(
    "--alignments",
    is_flag=True,
    help="Write which source token each target token attends to; needs a bundle exported with --attention.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@decode_options()
@engine_options
def run(
    bundle: Path,
    texts: tuple[str, ...],
    as_ids: bool,
    json_lines: bool,
    truncate: bool,
    split: str | None,
    source_language: str | None,
    target_language: str | None,
    batch_size: int | None,
    batch_tokens: int | None,
    stream: bool,
    scores: bool,
    alignments: bool,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Decode texts, or the lines of standard input.

    Prints one line per source, in order: its text, or token ids if the bundle has no tokenizer. With --n-best it prints
    one line per target, after the number of its source; --scores and --alignments (source-target pairs) add columns.

    Options that are not typed come from the bundle, which has the settings of the model's authors: fatdeploy inspect
    shows them.
    """
    from fatdeploy.runtimes.loading import load

    if stream and (scores or alignments) and not as_json:
        raise click.UsageError("--stream writes targets alone: add --json to combine it with --scores or --alignments")
    if json_lines and texts:
        raise click.UsageError("--json-lines reads standard input: leave out the texts, or the option")
    if split and (stream or scores or alignments or as_ids or json_lines):
        raise click.UsageError(
            "--split joins the texts of sentences: leave out --stream, --scores, --alignments, --ids and --json-lines"
        )
    engine = popped_engine_arguments(arguments)
    begin, changes = popped_changes(arguments, as_ids=as_ids)
    changes |= {"scores": True} if scores else {}
    with load(bundle, **engine) as model:
        if alignments and model.spec.alignment is None:
            raise ConfigError(f"{bundle} has no alignments: export it again with --attention LAYER")
        options = model.options_with(begin, **changes)
        output = Output(as_json, options.num_return_sequences > 1, scores, alignments, keeps_lines=split is not None)
        languages: Any = {"source_language": source_language, "target_language": target_language}
        read = partial(read_line, model, split=split, truncate=truncate, **languages)
        sources = checked(read, read_lines(texts, as_ids=as_ids, json_lines=json_lines))
        if stream:
            finishes = Counter(
                output.write_stream(line, model.stream(readable, begin, **changes)) for line, readable in sources
            )
        else:
            size = batch_size or (FROM_FILE if texts else waiting_lines(sys.stdin))
            # The number of sentences is not known before they are read.
            with decoding_bar(0 if split else len(texts)) as bar:
                generate = partial(
                    model.generate, options=begin, batch_tokens=batch_tokens, progress=bar.update, **changes
                )
                finishes = Counter(write_batches(batches(sources, size), generate, output))
    if finishes["cancelled"]:
        log.warning(
            "%d of %d targets are incomplete: --timeout %g expired",
            *(finishes["cancelled"], finishes.total(), options.timeout_s),
        )


def write_batches(
    source_batches: Iterable[list[tuple[InputLine, AnyRead]]],
    generate: "Callable[[list[AnyRead]], list[Hypothesis]]",
    output: Output,
) -> "Iterator[Finish]":
    """Write the results of each batch as soon as they are ready; yield how each target finished."""
    numbers = count()
    for batch in source_batches:
        for (line, _), result in zip(batch, generate([readable for _, readable in batch]), strict=True):
            click.echo("\n".join(output.lines(next(numbers), line, result)))
            yield from (hypothesis.finish for hypothesis in (result, *result.alternatives))


def read_lines(texts: tuple[str, ...], *, as_ids: bool, json_lines: bool = False) -> Iterator[tuple[str, InputLine]]:
    """Yield the place and the content of each source."""
    empty = True
    for place, text in numbered_texts(texts) if texts else numbered_lines(sys.stdin.buffer):
        empty = False
        if json_lines:
            yield place, line_from_json(place, text, as_ids=as_ids)
        else:
            yield place, InputLine(ids_from_text(place, text) if as_ids else text)
    if empty:
        raise ConfigError("no source given: pass texts, or one per line on standard input")


def numbered_texts(texts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the texts of the command line with their places."""
    yield from ((f"text {number}", text) for number, text in enumerate(texts, 1))


def numbered_lines(stream: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a stream with their places, as they arrive."""
    for number, line in enumerate(stream, 1):
        try:
            yield f"line {number}", line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"line {number}: expected UTF-8, found byte {line[error.start]:#04x}") from error


def read_line(model: "Model", line: InputLine, *, split: str | None, **reading: Any) -> Any:
    """Return what the model reads of a line: a source, or the sentences of a text."""
    if split is None:
        return model.read(line.source, prefix=line.prefix, **{**reading, **line.languages()})
    return model.read_document(str(line.source), **reading)


def checked(
    read: Callable[[InputLine], AnyRead], lines: Iterable[tuple[str, InputLine]]
) -> Iterator[tuple[InputLine, AnyRead]]:
    """Yield each line and what the model reads; an error names the place of the first that it cannot read."""
    for place, line in lines:
        try:
            readable = read(line)
        except SpecMismatch as error:
            raise ConfigError(f"{place}: {error}") from error
        except ConfigError as error:
            # What the options say is wrong for all lines.
            if not line.languages():
                raise
            raise ConfigError(f"{place}: {error}") from error
        yield line, readable


def waiting_lines(stream: TextIO) -> int:
    """Return how many lines to read at a time: those typed by hand are answered one by one."""
    if stream.isatty():
        return 1
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # not a file of the system
        return FROM_PIPE
    return FROM_FILE if stat.S_ISREG(mode) else FROM_PIPE


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items, each as soon as it is full; an error comes after the items before it."""
    batch: list[Item] = []
    try:
        for item in items:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    except FatdeployError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def decoding_bar(n_texts: int) -> "ProgressBar[int]":
    """Return a bar that counts sources; it is hidden if results move the same terminal, or there is one source."""
    # The length of standard input is unknown, and waiting for its end would delay results.
    expected = range(n_texts) if n_texts else count()
    return progress_bar(expected, "decoding", show_pos=True, hidden=n_texts == 1 or sys.stdout.isatty())
