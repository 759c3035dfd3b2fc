"""Decodes the sources of a file of pairs, times that, and scores the targets against every reference."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

from fatdeploy.errors import ConfigError
from fatdeploy.manifest import TOKENIZER
from fatdeploy.pairs import Pair, error_of_lines
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.evaluation.metrics import METRICS, Score
from fatdeploy.runtimes.model import Model
from fatdeploy.runtimes.text.languages import DEFAULT_PAIR, LanguagePair
from fatdeploy.runtimes.text.reading import text_record
from fatdeploy.runtimes.text.token_ids import PlainSource, ids_from_text
from fatdeploy.spec import ModelSpec


@dataclass(frozen=True)
class EvaluationSource:
    """A source, text or token ids, and its references as text; ``line`` is where the source first occurs."""

    source: PlainSource
    references: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class DecodedSources:
    """The targets of all sources, as text or as token ids, and how long decoding took."""

    texts: list[str]
    n_tokens: int
    finish: dict[str, int]
    seconds: float


def examples_from_pairs(
    pairs: Sequence[Pair], limit: int | None = None, *, as_ids: bool = False
) -> list[EvaluationSource]:
    """Return each source once, at most ``limit`` of them, with every target that any line has for it."""

    def parsed(source: str) -> PlainSource:
        return ids_from_text("source", source) if as_ids else source

    lines: dict[str, int] = {}
    targets: dict[str, dict[str, None]] = {}
    for number, pair in enumerate(pairs, 1):
        lines.setdefault(pair.source, number)
        targets.setdefault(pair.source, {})[pair.target] = None
    return [
        EvaluationSource(parsed(source), tuple(targets[source]), line) for source, line in islice(lines.items(), limit)
    ]


def pairs_of_ids(pairs: Sequence[Pair], path: Path, spec: ModelSpec) -> list[Pair]:
    """Return pairs of token ids with one blank between them; raise with every line that is not one."""
    id_pairs, wrong = [], []
    for number, pair in enumerate(pairs, 1):
        try:
            source, target = ids_from_text("source", pair.source), ids_from_text("target", pair.target)
        except ConfigError as error:
            wrong.append(f"{error} at line {number}")
            continue
        reason = _wrong_target(target, spec)
        if reason:
            wrong.append(f"target {reason} at line {number}")
        id_pairs.append(Pair(" ".join(map(str, source)), " ".join(map(str, target))))
    if wrong:
        raise error_of_lines(
            path, wrong, f"{len(pairs)} lines", "with --ids a line is token ids, one TAB and token ids"
        )
    return id_pairs


def check_examples(
    model: Model,
    examples: Sequence[EvaluationSource],
    path: Path,
    *,
    truncate: bool = False,
    pair: LanguagePair = DEFAULT_PAIR,
) -> None:
    """Raise with every source that the model cannot read in its languages."""
    if any(isinstance(example.source, str) for example in examples) and text_record(model.bundle.manifest) is None:
        raise ConfigError(
            f"{model.bundle.path} has no {TOKENIZER}: pass a file with token ids in both columns, and --ids"
        )
    wrong = []
    for example in examples:
        reason = model.refusal(
            example.source, truncate=truncate, source_language=pair.source, target_language=pair.target
        )
        if reason:
            wrong.append(f"source {reason} at line {example.line}")
    if wrong:
        raise error_of_lines(path, wrong, f"{len(examples)} sources", "the model must be able to read every source")


def decoded(
    model: Model,
    examples: Sequence[EvaluationSource],
    options: DecodeOptions,
    *,
    truncate: bool = False,
    pair: LanguagePair = DEFAULT_PAIR,
    batch_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> DecodedSources:
    """Return the model's target of every source."""
    sources = [example.source for example in examples]
    start = perf_counter()
    results = model.generate(
        sources,
        options,
        truncate=truncate,
        source_language=pair.source,
        target_language=pair.target,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    seconds = perf_counter() - start
    return DecodedSources(
        [_target_column(result, source) for result, source in zip(results, sources, strict=True)],
        sum(len(result.tokens) for result in results),
        dict(Counter(result.finish for result in results)),
        seconds,
    )


def scores_of(
    texts: Sequence[str],
    examples: Sequence[EvaluationSource],
    names: Iterable[str],
    ignored: re.Pattern[str] | None = None,
) -> dict[str, Score]:
    """Return the metrics with these names, computed without the parts of all texts that match ``ignored``."""

    def kept(text: str) -> str:
        return text if ignored is None else ignored.sub("", text)

    hypotheses = [kept(text) for text in texts]
    references = [[kept(text) for text in example.references] for example in examples]
    return {name: METRICS[name](hypotheses, references) for name in names}


def _target_column(result: Hypothesis, source: PlainSource) -> str:
    """Return a target in the form of its source, text or ids, without the characters that end a column or a line."""
    if result.text is None or not isinstance(source, str):
        return " ".join(map(str, result.tokens))
    return re.sub(r"[\t\r\n]", " ", result.text)


def _wrong_target(tokens: Sequence[int], spec: ModelSpec) -> str:
    """Return why a model can never generate these tokens; empty if it can."""
    beyond = [token for token in tokens if not 0 <= token < spec.vocab_size]
    if beyond:
        return f"ids must lie in 0…{spec.vocab_size - 1}, found {beyond[0]}"
    return f"has EOS ({spec.eos_id}), which no result contains" if spec.eos_id in tokens else ""
