"""Processors that favour, forbid or force tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History
from fatdeploy.runtimes.engines.protocol import Floats

# The largest score of an end that grows: infinite ones would have no log-probability.
LARGEST = 1e30


@dataclass(frozen=True)
class BiasedSequences:
    """Adds to the score of a sequence's last token in rows that end with the others; -inf forbids it."""

    biases: dict[tuple[int, ...], float]

    def __call__(self, history: History, scores: Floats) -> Floats:
        tokens = history.tokens
        for sequence, bias in self.biases.items():
            before = len(sequence) - 1
            if before > tokens.shape[1]:
                continue
            begun = (tokens[:, tokens.shape[1] - before :] == np.array(sequence[:-1], np.int64)).all(1)
            scores[begun, sequence[-1]] += np.float32(bias)
        return scores


@dataclass(frozen=True)
class AtLeast:
    """Forbids the ends until a row has ``length`` tokens, including the prompt."""

    length: int
    eos_ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:
        if history.tokens.shape[1] < self.length:
            scores[:, self.eos_ids] = NEG_INF
        return scores


@dataclass(frozen=True)
class Forced:
    """Allows only one token at some lengths: ``tokens`` maps the length of a row to its next token."""

    tokens: dict[int, int]

    def __call__(self, history: History, scores: Floats) -> Floats:
        token = self.tokens.get(history.tokens.shape[1])
        if token is not None:
            scores[...] = NEG_INF
            scores[:, token] = 0
        return scores


@dataclass(frozen=True)
class GrowingEnd:
    """Raises the scores of the ends by a factor per token, once a row has more than ``length`` tokens."""

    length: int
    factor: float
    eos_ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:
        excess = history.tokens.shape[1] - self.length
        if excess > 0:
            with np.errstate(over="ignore"):
                growth = min(np.float64(self.factor) ** excess, LARGEST)
            ends = scores[:, self.eos_ids].astype(np.float64)
            forbidden = np.isneginf(ends)
            ends[forbidden] = 0
            raised = np.minimum(ends + np.abs(ends) * (growth - 1), LARGEST)
            scores[:, self.eos_ids] = np.where(forbidden, NEG_INF, raised)
        return scores


@dataclass(frozen=True)
class Suppressed:
    """Forbids tokens at every position."""

    ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:  # noqa: ARG002
        scores[:, self.ids] = NEG_INF
        return scores


@dataclass(frozen=True)
class SuppressedAt:
    """Forbids tokens in rows that have ``length`` tokens."""

    length: int
    ids: NDArray[np.int64]

    def __call__(self, history: History, scores: Floats) -> Floats:
        if history.tokens.shape[1] == self.length:
            scores[:, self.ids] = NEG_INF
        return scores
