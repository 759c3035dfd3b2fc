"""Processors that favour, forbid or force tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History
from fatdeploy.runtimes.engines.protocol import Floats

# The largest score of an end that grows: infinite ones would have no log-probability.
LARGEST = 1e30


@dataclass(frozen=True)
class BiasedSequences:
    """Adds to the score of a sequence's last token in rows that end with the others; -inf forbids it."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    biases: dict[tuple[int, ...], float]

    def __call__(self, history: History, scores: Floats) -> Floats:
        for sequence, bias in self.biases.items():
            scores[_ending_with(history, sequence[:-1]), sequence[-1]] += np.float32(bias)
        return scores


def _ending_with(history: History, sequence: Sequence[int]) -> slice | NDArray[np.int64]:
    """Return the rows whose last tokens are a sequence."""
    if not sequence:
        return slice(None)
    rows = np.flatnonzero(history.lengths >= len(sequence))
    places = history.lengths[rows, None] - len(sequence) + np.arange(len(sequence))
    same = history.tokens[rows[:, None], places] == np.array(sequence, np.int64)
    ending: NDArray[np.int64] = rows[same.all(1)]
    return ending


@dataclass(frozen=True)
class Diverse:
    """Makes tokens less likely that earlier groups of a source's beams have chosen at this step."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    penalty: float

    def __call__(self, history: History, scores: Floats) -> Floats:
        if history.chosen is not None:
            for chosen, row in zip(history.chosen, scores, strict=True):
                tokens, counts = np.unique(chosen, return_counts=True)
                row[tokens] -= np.float32(self.penalty) * counts.astype(np.float32)
        return scores


@dataclass(frozen=True)
class AtLeast:
    """Forbids the ends until a row has as many tokens as ``lengths`` says for its source, including the prompt."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    lengths: NDArray[np.int64]
    eos_ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:
        short = np.flatnonzero(history.lengths < self.lengths[history.sources])
        scores[short[:, None], self.eos_ids] = NEG_INF
        return scores


@dataclass(frozen=True)
class Forced:
    """Allows only one token at some lengths: per source, ``tokens`` maps the length of a row to its next token."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    tokens: Sequence[dict[int, int]]

    def acts(self, history: History) -> bool:
        """Whether any row has one of the lengths."""
        rows = zip(history.sources.tolist(), history.lengths.tolist(), strict=True)
        return any(length in self.tokens[source] for source, length in rows)

    def __call__(self, history: History, scores: Floats) -> Floats:
        for source, length, row in zip(history.sources.tolist(), history.lengths.tolist(), scores, strict=True):
            token = self.tokens[source].get(length)
            if token is not None:
                row[...] = NEG_INF
                row[token] = 0
        return scores


@dataclass(frozen=True)
class GrowingEnd:
    """Raises the scores of the ends by a factor per token, once a row has more tokens than ``lengths`` says."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = False
    lengths: NDArray[np.int64]
    factor: float
    eos_ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:
        excess = history.lengths - self.lengths[history.sources]
        rows = np.flatnonzero(excess > 0)[:, None]
        if rows.size:
            with np.errstate(over="ignore"):
                growth = np.minimum(np.float64(self.factor) ** excess[rows], LARGEST)
            ends = scores[rows, self.eos_ids].astype(np.float64)
            forbidden = np.isneginf(ends)
            ends[forbidden] = 0
            raised = np.minimum(ends + np.abs(ends) * (growth - 1), LARGEST)
            scores[rows, self.eos_ids] = np.where(forbidden, NEG_INF, raised)
        return scores


@dataclass(frozen=True)
class Suppressed:
    """Forbids tokens at every position."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:  # noqa: ARG002
        scores[:, self.ids] = NEG_INF
        return scores


@dataclass(frozen=True)
class SuppressedAt:
    """Forbids tokens in rows that have as many tokens as ``lengths`` says for their source."""

    ragged: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    lengths: NDArray[np.int64]
    ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:
        there = np.flatnonzero(history.lengths == self.lengths[history.sources])
        scores[there[:, None], self.ids] = NEG_INF
        return scores
