"""The command that evaluates: a bundle against a file of pairs."""

import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from fatdeploy.errors import BackendUnavailable, ConfigError
from fatdeploy.pairs import read_pairs
from fatdeploy.runtimes.commands.decode_options import decode_options
from fatdeploy.runtimes.commands.engine_options import EngineArguments, engine_options
from fatdeploy.runtimes.commands.run_output import Given
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.evaluation.metrics import METRICS, OF_TEXT, Score, need_sacrebleu
from fatdeploy.tables import aligned

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from click._termui_impl import ProgressBar

    from fatdeploy.runtimes.evaluation.evaluate import DecodedSources, EvaluationSource


log = logging.getLogger("fatdeploy")


def names_from_text(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> list[str]:
    """Return the names of metrics that were typed, each once."""
    names = list(dict.fromkeys(name.strip() for text in given for name in text.split(",")))
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise click.BadParameter(f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(METRICS)}")
    return names


def pattern_from_text(_context: click.Context, _option: click.Parameter, given: str | None) -> re.Pattern[str] | None:
    """Return a regular expression that was typed."""
    try:
        return None if given is None else re.compile(given)
    except (re.error, OverflowError, RecursionError) as error:
        raise click.BadParameter(f"{given!r} is no regular expression: {error}") from error


@click.command(
    "eval",
    epilog="""\b
Metrics (in percent; a symbol is what blanks separate):
  bleu, chrf           sacrebleu's, with its defaults and its signature
  token_error_rate     symbols left out, added or replaced, of all symbols of
                       the references: what papers call PER of phonemes, and
                       WER of speech. Of several references the one with the
                       fewest edits for its length counts.
  sequence_error_rate  sources whose target equals none of their references:
                       what papers on grapheme-to-phoneme call WER
  exact_match          sources whose target equals one of their references

\b
Examples:
  fatdeploy eval my-model test.tsv
  fatdeploy eval my-model test.tsv --beams 5 --metric bleu,chrf --json
  fatdeploy eval my-g2p test.tsv --metric token_error_rate --ignore '[0-2]'
  fatdeploy eval my-model test.tsv --limit 200 --output said.tsv
  fatdeploy eval my-model ids.tsv --ids
""",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("pairs", type=click.Path(path_type=Path), metavar="PAIRS.tsv")
@click.option(
    "--metric",
    "names",
    multiple=True,
    metavar="NAME,...",
    callback=names_from_text,
    help="What to compute, of the names below; all that can be had unless said.",
)
@click.option(
    "--ignore",
    "ignored",
    metavar="REGEX",
    callback=pattern_from_text,
    help="Remove what matches from targets and references before they are compared: [0-2] is ARPAbet's stress.",
)
@click.option("--ids", "as_ids", is_flag=True, help="Both columns are token ids, targets without EOS; no bleu, chrf.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Take the first N sources only.")
@click.option("--truncate", is_flag=True, help="Cut sources that are too long, instead of refusing them.")
@decode_options("num_beams", "length_penalty", "max_new_tokens")
@click.option(
    "--batch-tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    help="Positions to decode together: targets times the lengths of source and target. Changes no result.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="HYPS.tsv",
    help="Write each source, a TAB and what the model said.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, with all digits.")
@engine_options
def eval(  # noqa: A001 - the name of the command
    bundle: Path,
    pairs: Path,
    names: list[str],
    ignored: re.Pattern[str] | None,
    as_ids: bool,
    limit: int | None,
    truncate: bool,
    batch_tokens: int,
    output: Path | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Measure a bundle on pairs: lines of source, TAB, target.

    A source that stands on several lines has several references, and any of them is right. Lines that are not a pair
    are all told at once, and nothing is decoded.
    """
    from fatdeploy.runtimes.evaluation.evaluate import (
        check_examples,
        decoded,
        examples_from_pairs,
        pairs_of_ids,
        scores_of,
    )
    from fatdeploy.runtimes.model import load

    names = wanted(names, as_ids, ignored)
    check_output(output, pairs)
    engine = cast("EngineArguments", {name: arguments.pop(name) for name in EngineArguments.__annotations__})
    options = DecodeOptions(**arguments)
    given = read_pairs(pairs)
    with load(bundle, **engine) as model:
        if as_ids:
            given = pairs_of_ids(given, pairs, model.spec)
        examples = examples_from_pairs(given, limit, as_ids=as_ids)
        check_examples(model, examples, pairs, truncate=truncate)
        with progress_bar(len(examples)) as bar:
            found = decoded(model, examples, options, truncate=truncate, batch_tokens=batch_tokens, progress=bar.update)
    scores = scores_of(found.texts, examples, names, ignored)
    report = {"bundle": str(bundle), "pairs": str(pairs), **report_of(found, examples, scores)}
    report |= {"beams": options.num_beams, "ignore": None if ignored is None else ignored.pattern}
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else "\n".join(report_lines(report)))
    if output is not None:
        write_said(output, examples, found.texts)


def wanted(names: Sequence[str], as_ids: bool, ignored: re.Pattern[str] | None) -> list[str]:
    """Return the metrics to compute; one that was named and cannot be had is an error before anything is decoded."""
    chosen = list(names) or [name for name in METRICS if not (as_ids and name in OF_TEXT)]
    of_text = [name for name in chosen if name in OF_TEXT]
    reasons = [f"--metric {name}" for name in of_text if as_ids] + ["--ignore"] * (as_ids and ignored is not None)
    if reasons:
        raise click.UsageError(f"--ids compares token ids, but {', '.join(reasons)} needs text: leave one out")
    try:
        if of_text:
            need_sacrebleu()
    except BackendUnavailable:
        if names:
            raise
        log.warning("%s left out, sacrebleu is not here: pip install 'fatdeploy[eval]'", " and ".join(of_text))
        return [name for name in chosen if name not in OF_TEXT]
    return chosen


def check_output(output: Path | None, pairs: Path) -> None:
    """Refuse a file that cannot be written, or must not be, before an evaluation that may take long."""
    if output is None:
        return
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.exists() and pairs.exists() and output.samefile(pairs):
        raise ConfigError(f"--output {output} is the file of pairs itself: choose another")


def progress_bar(n_sources: int) -> "ProgressBar[int]":
    """Return a bar on standard error that counts sources, where somebody watches."""
    quiet = not logging.getLogger("fatdeploy").isEnabledFor(logging.WARNING)
    hidden = quiet or not sys.stderr.isatty()
    return click.progressbar(range(n_sources), label="decoding", file=sys.stderr, show_pos=True, hidden=hidden)


def report_of(
    found: "DecodedSources", examples: "Sequence[EvaluationSource]", scores: dict[str, Score]
) -> dict[str, Any]:
    """Return all that was measured as JSON values."""
    return {
        "sources": len(examples),
        "references": sum(len(example.references) for example in examples),
        "metrics": {name: score.value for name, score in scores.items()},
        "details": {name: score.detail for name, score in scores.items()},
        "finish": found.finish,
        "tokens": found.n_tokens,
        "seconds": found.seconds,
        "sources_per_s": len(examples) / found.seconds,
        "tokens_per_s": found.n_tokens / found.seconds,
    }


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line a metric, then what was decoded and how fast."""
    yield from aligned(
        (name, f"{value:.2f}".rjust(6), report["details"][name]) for name, value in report["metrics"].items()
    )
    yield f"{report['sources']} sources, {report['references']} references, {unfinished(report['finish'])}"
    yield (
        f"{report['tokens']} tokens in {report['seconds']:.2f} s: {report['sources_per_s']:.1f} sources/s, "
        f"{report['tokens_per_s']:.1f} tokens/s, {report['beams']} {'beam' if report['beams'] == 1 else 'beams'}"
    )


def unfinished(finish: dict[str, int]) -> str:
    """Return how many targets the model did not end itself."""
    cut = sum(count for reason, count in finish.items() if reason != "eos")
    return f"{cut} targets cut at the limit of length" if cut else "every target ended by the model"


def one_column(source: Given) -> str:
    """Return a source as it stood in the file of pairs."""
    return source if isinstance(source, str) else " ".join(map(str, source))


def write_said(output: Path, examples: "Sequence[EvaluationSource]", texts: Sequence[str]) -> None:
    """Write sources and what the model said of them, a pair a line."""
    lines = [f"{one_column(example.source)}\t{text}\n" for example, text in zip(examples, texts, strict=True)]
    try:
        with output.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror or error}") from error
