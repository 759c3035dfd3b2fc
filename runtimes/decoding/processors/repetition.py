"""Processors against repetition, of the target itself and of its source."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens


def _read(history: History) -> Iterator[Tokens]:
    """Return the tokens that each row has read."""
    return (tokens[:length] for tokens, length in zip(history.tokens, history.lengths.tolist(), strict=True))


class Penalty:
    """Makes tokens less likely: positive scores are divided by the penalty, negative ones multiplied."""

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)
        # Reused at every step: a step allocates nothing that grows with the target.
        self._scores, self._below = np.empty(0, np.float32), np.empty(0, bool)

    def apply(self, row: Floats, ids: Tokens) -> None:
        """Change the scores [V] of some tokens; an id that occurs twice counts once."""
        if len(self._scores) < len(ids):
            self._scores, self._below = np.empty(2 * len(ids), np.float32), np.empty(2 * len(ids), bool)
        penalized, below = self._scores[: len(ids)], self._below[: len(ids)]
        # The tokens are within range; in its checking mode numpy would make a copy first.
        np.take(row, ids, out=penalized, mode="clip")
        np.less(penalized, 0, out=below)
        np.multiply(penalized, self._penalty, out=penalized, where=below)
        np.logical_not(below, out=below)
        np.divide(penalized, self._penalty, out=penalized, where=below)
        row[ids] = penalized


class RepetitionPenalty:
    """Makes earlier tokens less likely."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = False

    def __init__(self, penalty: float) -> None:
        self._penalty = Penalty(penalty)

    def __call__(self, history: History, scores: Floats) -> Floats:
        for tokens, row in zip(_read(history), scores, strict=True):
            self._penalty.apply(row, tokens)
        return scores


class SourcePenalty:
    """Makes the tokens of the source more likely, the higher the penalty: it is one for inventing tokens."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = False

    def __init__(self, penalty: float, sources: Sequence[NDArray[np.generic]]) -> None:
        self._penalty = Penalty(1 / penalty)
        self._sources = [np.asarray(source, np.int64) for source in sources]

    def __call__(self, history: History, scores: Floats) -> Floats:
        for source, row in zip(history.sources.tolist(), scores, strict=True):
            self._penalty.apply(row, self._sources[source])
        return scores


class Ngrams:
    """Finds the tokens that complete a sequence of n tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Reused at every step: a step allocates nothing that grows with the target.
        self._again, self._same = np.empty(0, bool), np.empty(0, bool)

    def followers(self, text: Tokens, tokens: Tokens) -> Tokens:
        """Return the tokens that follow the last n - 1 ``tokens`` wherever these occur in a text."""
        places, begin = len(text) - self.size + 1, len(tokens) - self.size + 1
        if places < 1 or begin < 0:
            return text[:0]
        if len(self._again) < places:
            self._again, self._same = np.empty(2 * places, bool), np.empty(2 * places, bool)
        again, same = self._again[:places], self._same[:places]
        again[...] = True
        for offset in range(self.size - 1):
            np.equal(text[offset : offset + places], tokens[begin + offset], out=same)
            np.logical_and(again, same, out=again)
        return text[np.flatnonzero(again) + self.size - 1]


class NoRepeatedNgram:
    """Forbids every token that would repeat a sequence of n tokens."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        self._ngrams = Ngrams(size)

    def __call__(self, history: History, scores: Floats) -> Floats:
        # Row by row: for a slice of several rows numpy would buffer all of it.
        for tokens, row in zip(_read(history), scores, strict=True):
            row[self._ngrams.followers(tokens, tokens)] = NEG_INF
        return scores


class NoSourceNgram:
    """Forbids every token that would repeat a sequence of n tokens of the source."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True

    def __init__(self, size: int, sources: Sequence[NDArray[np.generic]]) -> None:
        self._ngrams = Ngrams(size)
        self._sources = [np.asarray(source, np.int64) for source in sources]

    def __call__(self, history: History, scores: Floats) -> Floats:
        for source, tokens, row in zip(history.sources.tolist(), _read(history), scores, strict=True):
            row[self._ngrams.followers(self._sources[source], tokens)] = NEG_INF
        return scores
