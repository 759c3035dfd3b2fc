"""The quality of targets: error rates and exact match by our own count, BLEU and chrF by sacrebleu.

Each metric takes one hypothesis per source and all accepted references of each source. *Symbols* are separated by
blanks: phonemes, words or token ids. The number of blanks between them does not matter.
"""

import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from fatdeploy.errors import BackendUnavailable, ConfigError

Texts = Sequence[str]
References = Sequence[Sequence[str]]


class Score(NamedTuple):
    """The value of a metric from 0 to 100 (error rates may exceed 100), and the counts or settings behind it."""

    value: float
    detail: str


def token_error_rate(hypotheses: Texts, references: References) -> Score:
    """Return edits in percent of the references' symbols: the PER of phonemes, the WER of speech recognition.

    An edit deletes, adds or replaces one symbol. Each source counts against the reference with the fewest edits for
    its length, and among equals against the one with the fewest edits; edits and lengths are summed over all sources.
    """
    _check(hypotheses, references)
    edits, symbols = 0, 0
    for hypothesis, accepted in zip(hypotheses, references, strict=True):
        words = hypothesis.split()
        compared = [(edit_distance(words, reference), len(reference)) for reference in map(str.split, accepted)]
        nearest = min(compared, key=_edits_for_the_length)
        edits, symbols = edits + nearest[0], symbols + nearest[1]
    if not symbols:
        raise ConfigError("the references contain no symbols, so there is no error rate: ignore less of them")
    return Score(100 * edits / symbols, f"{edits} edits of {symbols} symbols")


def exact_match(hypotheses: Texts, references: References) -> Score:
    """Return the share of sources whose hypothesis has the symbols of one of their references."""
    return _share(_matches(hypotheses, references), len(hypotheses))


def sequence_error_rate(hypotheses: Texts, references: References) -> Score:
    """Return the share of sources without an exact match: what papers on grapheme-to-phoneme call WER."""
    return _share(len(hypotheses) - _matches(hypotheses, references), len(hypotheses))


def bleu(hypotheses: Texts, references: References) -> Score:
    """Return sacrebleu's BLEU of the corpus, with its signature."""
    return _by_sacrebleu("BLEU", hypotheses, references)


def chrf(hypotheses: Texts, references: References) -> Score:
    """Return sacrebleu's chrF2 of the corpus, with its signature."""
    return _by_sacrebleu("CHRF", hypotheses, references)


# The names on the command line and in JSON.
METRICS: dict[str, Callable[[Texts, References], Score]] = {
    metric.__name__: metric for metric in (bleu, chrf, token_error_rate, sequence_error_rate, exact_match)
}
OF_TEXT = ("bleu", "chrf")


def edit_distance(hypothesis: Sequence[Hashable], reference: Sequence[Hashable]) -> int:
    """Return how many symbols must be deleted, added or replaced to turn one sequence into the other.

    Myers (1999) in Hyyrö's (2003) form for whole sequences: a column of the distance table is two integers; bit i of
    ``rises`` (``falls``) says that row i + 1 exceeds row i by one (is less than row i by one).
    """
    if not reference:
        return len(hypothesis)
    places: dict[Hashable, int] = {}
    for index, symbol in enumerate(reference):
        places[symbol] = places.get(symbol, 0) | 1 << index
    every, last = (1 << len(reference)) - 1, 1 << (len(reference) - 1)
    rises, falls, distance = every, 0, len(reference)
    for symbol in hypothesis:
        same = places.get(symbol, 0)
        diagonal = ((((same & rises) + rises) ^ rises) | same | falls) & every
        # Differences to the column before, one bit per row; only the last row is summed up.
        more, less = falls | every & ~(diagonal | rises), rises & diagonal
        distance += bool(more & last) - bool(less & last)
        more, less = more << 1 | 1, less << 1
        rises, falls = (less | ~(diagonal | more)) & every, more & diagonal
    return distance


def need_sacrebleu() -> Any:
    """Return sacrebleu's metrics; raise with what to install if it is missing."""
    try:
        return importlib.import_module("sacrebleu.metrics")
    except ImportError as error:
        raise BackendUnavailable(
            f"bleu and chrf need sacrebleu ({error}): pip install 'fatdeploy[eval]', or choose another metric: "
            f"--metric {' or '.join(name for name in METRICS if name not in OF_TEXT)}"
        ) from error


def _by_sacrebleu(kind: str, hypotheses: Texts, references: References) -> Score:
    _check(hypotheses, references)
    metric = getattr(need_sacrebleu(), kind)()
    # sacrebleu takes the first reference of every source, then the second, …; None if a source has no more.
    most = max(map(len, references))
    streams = [[row[index] if index < len(row) else None for row in references] for index in range(most)]
    value = metric.corpus_score(list(hypotheses), streams).score
    return Score(float(value), metric.get_signature().format())


def _edits_for_the_length(compared: tuple[int, int]) -> tuple[float, int]:
    edits, length = compared
    return (edits / length if length else (float("inf") if edits else 0.0)), edits


def _matches(hypotheses: Texts, references: References) -> int:
    _check(hypotheses, references)
    return sum(
        hypothesis.split() in map(str.split, accepted)
        for hypothesis, accepted in zip(hypotheses, references, strict=True)
    )


def _share(count: int, sources: int) -> Score:
    return Score(100 * count / sources, f"{count} of {sources} sources")


def _check(hypotheses: Texts, references: References) -> None:
    if len(hypotheses) != len(references):
        raise ConfigError(f"expected one hypothesis per source, found {len(hypotheses)} for {len(references)} sources")
    if not hypotheses:
        raise ConfigError("expected at least one source to evaluate, found none")
    without = [index for index, accepted in enumerate(references) if not accepted]
    if without:
        raise ConfigError(f"expected a reference for every source, found none for source {without[0]} (from 0)")
