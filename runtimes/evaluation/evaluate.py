"""A model against pairs: sources with all their references, decoded, timed and scored."""

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
from fatdeploy.runtimes.commands.run_output import Given
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sources import ids_from_text
from fatdeploy.runtimes.evaluation.metrics import METRICS, Score
from fatdeploy.runtimes.model import BATCH_TOKENS, Model
from fatdeploy.spec import ModelSpec


@dataclass(frozen=True)
class EvaluationSource:
    """A source, text or token ids, and its references as text; ``line`` is the first that the source stands on."""

    source: Given
    references: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class DecodedSources:
    """What a model said of some examples, as text or as token ids, and how long that took."""

    texts: list[str]
    n_tokens: int
    finish: dict[str, int]
    seconds: float


def examples_from_pairs(
    pairs: Sequence[Pair], limit: int | None = None, *, as_ids: bool = False
) -> list[EvaluationSource]:
    """Return each source once, at most ``limit`` of them, with every target that any line has for it."""

    def given(source: str) -> Given:
        return ids_from_text("source", source) if as_ids else source

    lines: dict[str, int] = {}
    targets: dict[str, dict[str, None]] = {}
    for number, pair in enumerate(pairs, 1):
        lines.setdefault(pair.source, number)
        targets.setdefault(pair.source, {})[pair.target] = None
    return [
        EvaluationSource(given(source), tuple(targets[source]), line) for source, line in islice(lines.items(), limit)
    ]


def pairs_of_ids(pairs: Sequence[Pair], path: Path, spec: ModelSpec) -> list[Pair]:
    """Return pairs of token ids with one blank between them; refuse what is none, every line at once."""
    found, wrong = [], []
    for number, pair in enumerate(pairs, 1):
        try:
            source, target = ids_from_text("source", pair.source), ids_from_text("target", pair.target)
        except ConfigError as error:
            wrong.append(f"{error} at line {number}")
            continue
        reason = _wrong_target(target, spec)
        if reason:
            wrong.append(f"target {reason} at line {number}")
        found.append(Pair(" ".join(map(str, source)), " ".join(map(str, target))))
    if wrong:
        raise error_of_lines(
            path, wrong, f"{len(pairs)} lines", "with --ids a line is token ids, one TAB and token ids"
        )
    return found


def check_examples(model: Model, examples: Sequence[EvaluationSource], path: Path, *, truncate: bool = False) -> None:
    """Refuse sources that the model cannot read, every one at once."""
    if any(isinstance(example.source, str) for example in examples) and TOKENIZER not in model.bundle.manifest.files:
        raise ConfigError(
            f"{model.bundle.path} has no {TOKENIZER}: pass a file with token ids in both columns, and --ids"
        )
    wrong = []
    for example in examples:
        reason = model.refusal(example.source, truncate=truncate)
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
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> DecodedSources:
    """Return what the model says of every source."""
    sources = [example.source for example in examples]
    start = perf_counter()
    found = model.generate(sources, options, truncate=truncate, batch_tokens=batch_tokens, progress=progress)
    seconds = perf_counter() - start
    return DecodedSources(
        [_said(one, source) for one, source in zip(found, sources, strict=True)],
        sum(len(one.tokens) for one in found),
        dict(Counter(one.finish for one in found)),
        seconds,
    )


def scores_of(
    texts: Sequence[str],
    examples: Sequence[EvaluationSource],
    names: Iterable[str],
    ignored: re.Pattern[str] | None = None,
) -> dict[str, Score]:
    """Return the metrics of these names, what is ignored removed from hypotheses and references."""

    def kept(text: str) -> str:
        return text if ignored is None else ignored.sub("", text)

    hypotheses = [kept(text) for text in texts]
    references = [[kept(text) for text in example.references] for example in examples]
    return {name: METRICS[name](hypotheses, references) for name in names}


def _said(found: Hypothesis, source: Given) -> str:
    """Return a target as its source was given, in one line and one column as a file of pairs can hold it."""
    if found.text is None or not isinstance(source, str):
        return " ".join(map(str, found.tokens))
    return re.sub(r"[\t\r\n]", " ", found.text)


def _wrong_target(tokens: Sequence[int], spec: ModelSpec) -> str:
    """Return why a model can never say these tokens; empty if it can."""
    beyond = [token for token in tokens if not 0 <= token < spec.vocab_size]
    if beyond:
        return f"ids must lie in 0…{spec.vocab_size - 1}, found {beyond[0]}"
    return f"has EOS ({spec.eos_id}), which no result holds" if spec.eos_id in tokens else ""
