"""``fatdeploy eval``: scores a bundle on a file of pairs."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fatdeploy.errors import BackendUnavailable, ConfigError
from fatdeploy.pairs import read_pairs
from fatdeploy.runtimes.commands.decode_options import decode_options, popped_changes
from fatdeploy.runtimes.commands.engine_options import (
    batch_tokens_option,
    engine_options,
    language_options,
    popped_engine_arguments,
    truncate_option,
)
from fatdeploy.runtimes.commands.progress import progress_bar
from fatdeploy.runtimes.commands.run_output import check_output_file, write_output_file
from fatdeploy.runtimes.evaluation.metrics import METRICS, OF_TEXT, Score, need_sacrebleu
from fatdeploy.runtimes.text.token_ids import PlainSource
from fatdeploy.tables import aligned

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.runtimes.evaluation.evaluate import DecodedSources, EvaluationSource

log = logging.getLogger("fatdeploy")


def names_from_text(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> list[str]:
    """Return the names of metrics in comma-separated lists, each once."""
    names = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",")))
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise click.BadParameter(f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(METRICS)}")
    return names


def pattern_from_text(_context: click.Context, _option: click.Parameter, text: str | None) -> re.Pattern[str] | None:
    """Return the regular expression in a text."""
    try:
        return None if text is None else re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise click.BadParameter(f"{text!r} is not a regular expression: {error}") from error


@click.command(
    "eval",
    epilog="""\b
Metrics (in percent; symbols are separated by blanks):
  bleu, chrf           computed by sacrebleu with its defaults, with its
                       signature
  token_error_rate     symbols deleted, added or replaced, per symbol of the
                       references: what papers call PER for phonemes and WER
                       for speech. If a source has several references, the
                       one with the fewest edits for its length counts.
  sequence_error_rate  sources whose target equals none of their references:
                       what papers on grapheme-to-phoneme call WER
  exact_match          sources whose target equals one of their references

\b
Examples:
  fatdeploy eval my-model test.tsv
  fatdeploy eval my-model test.tsv --beams 5 --metric bleu,chrf --json
  fatdeploy eval my-g2p test.tsv --metric token_error_rate --ignore '[0-2]'
  fatdeploy eval my-model test.tsv --limit 200 --output targets.tsv
  fatdeploy eval my-nllb en-de.tsv --source-language eng_Latn --target-language deu_Latn
  fatdeploy eval my-model test.tsv --shortlist auto
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
    help="Metrics to compute, from the list below (default: all that are available).",
)
@click.option(
    "--ignore",
    "ignored",
    metavar="REGEX",
    callback=pattern_from_text,
    help="Remove all matches from targets and references before comparing: [0-2] is ARPAbet's stress.",
)
@click.option(
    "--ids", "as_ids", is_flag=True, help="Read both columns as token ids, targets without EOS; no bleu or chrf."
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Evaluate only the first N sources.")
@truncate_option
@language_options
@decode_options("num_beams", "length_penalty", "max_new_tokens", "shortlist")
@batch_tokens_option
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="HYPS.tsv",
    help="Write each source, a TAB and its target.",
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
    source_language: str | None,
    target_language: str | None,
    batch_tokens: int | None,
    output: Path | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Measure the quality of a bundle on pairs: lines of source, TAB, target.

    A source on several lines has several references, and matching any of them is right. If lines are not pairs, all of
    them are reported at once and nothing is decoded. Options that are not typed come from the bundle (fatdeploy inspect
    shows them).
    """
    from fatdeploy.runtimes.defaults import stated_options
    from fatdeploy.runtimes.evaluation.evaluate import (
        check_examples,
        decoded,
        examples_from_pairs,
        pairs_of_ids,
        scores_of,
    )
    from fatdeploy.runtimes.loading import load
    from fatdeploy.runtimes.text.languages import LanguagePair

    names = chosen_metrics(names, as_ids, ignored)
    check_output(output, pairs)
    engine = popped_engine_arguments(arguments)
    begin, changes = popped_changes(arguments)
    lines = read_pairs(pairs)
    with load(bundle, **engine) as model:
        options = model.options_with(begin, **changes)
        if as_ids:
            lines = pairs_of_ids(lines, pairs, model.spec)
        examples = examples_from_pairs(lines, limit, as_ids=as_ids)
        languages = LanguagePair(source_language, target_language)
        check_examples(model, examples, pairs, truncate=truncate, pair=languages)
        with progress_bar(range(len(examples)), "decoding", show_pos=True) as bar:
            results = decoded(
                model,
                examples,
                options,
                truncate=truncate,
                pair=languages,
                batch_tokens=batch_tokens,
                progress=bar.update,
            )
    scores = scores_of(results.texts, examples, names, ignored)
    report = {"bundle": str(bundle), "pairs": str(pairs), **report_of(results, examples, scores)}
    report |= {"beams": options.num_beams, "options": stated_options(options)}
    report |= {"ignore": None if ignored is None else ignored.pattern}
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else "\n".join(report_lines(report)))
    if output is not None:
        write_targets(output, examples, results.texts)


def chosen_metrics(names: Sequence[str], as_ids: bool, ignored: re.Pattern[str] | None) -> list[str]:
    """Return the metrics to compute; raise before anything is decoded if one was named and is not available."""
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
        log.warning("%s left out, sacrebleu is not installed: pip install 'fatdeploy[eval]'", " and ".join(of_text))
        return [name for name in chosen if name not in OF_TEXT]
    return chosen


def check_output(output: Path | None, pairs: Path) -> None:
    """Refuse a file that cannot or must not be written, before an evaluation that may take long."""
    if output is None:
        return
    check_output_file("--output", output)
    if output.exists() and pairs.exists() and output.samefile(pairs):
        raise ConfigError(f"--output {output} is the file of pairs itself: choose another")


def report_of(
    results: "DecodedSources", examples: "Sequence[EvaluationSource]", scores: dict[str, Score]
) -> dict[str, Any]:
    """Return all measurements as JSON values."""
    return {
        "sources": len(examples),
        "references": sum(len(example.references) for example in examples),
        "metrics": {name: score.value for name, score in scores.items()},
        "details": {name: score.detail for name, score in scores.items()},
        "finish": results.finish,
        "tokens": results.n_tokens,
        "seconds": results.seconds,
        "sources_per_s": len(examples) / results.seconds,
        "tokens_per_s": results.n_tokens / results.seconds,
    }


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield one line per metric, then the counts and the speed."""
    yield from aligned(
        (name, f"{value:.2f}".rjust(6), report["details"][name]) for name, value in report["metrics"].items()
    )
    yield f"{report['sources']} sources, {report['references']} references, {unfinished(report['finish'])}"
    yield (
        f"{report['tokens']} tokens in {report['seconds']:.2f} s: {report['sources_per_s']:.1f} sources/s, "
        f"{report['tokens_per_s']:.1f} tokens/s, {report['beams']} {'beam' if report['beams'] == 1 else 'beams'}"
    )


def unfinished(finish: dict[str, int]) -> str:
    """Return in words how many targets the model did not end itself."""
    cut = sum(count for reason, count in finish.items() if reason != "eos")
    return f"{cut} targets cut at the length limit" if cut else "every target ended by the model"


def source_column(source: PlainSource) -> str:
    """Return a source as the file of pairs has it."""
    return source if isinstance(source, str) else " ".join(map(str, source))


def write_targets(output: Path, examples: "Sequence[EvaluationSource]", texts: Sequence[str]) -> None:
    """Write each source and its target as a file of pairs."""
    lines = (f"{source_column(example.source)}\t{text}\n" for example, text in zip(examples, texts, strict=True))
    write_output_file("--output", output, "".join(lines))
