"""Processors that change scores before a token is chosen, in the order of ``transformers``."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.options import DecodeOptions, LogitsProcessor
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import ModelSpec, Tokens

NEG_INF = np.float32(-np.inf)


def processors_of(options: DecodeOptions, spec: ModelSpec) -> list[LogitsProcessor]:
    """Return the processors for the options; usually there are none, which costs nothing."""
    return list(_processors(options, spec, prompt=1 + len(options.prefix)))


def _processors(options: DecodeOptions, spec: ModelSpec, prompt: int) -> Iterator[LogitsProcessor]:
    if options.repetition_penalty != 1.0:
        yield RepetitionPenalty(options.repetition_penalty)
    if options.no_repeat_ngram_size:
        yield NoRepeatedNgram(options.no_repeat_ngram_size)
    if options.bad_words:
        yield BadWords(tuple(tuple(word) for word in options.bad_words))
    if options.min_new_tokens:
        yield AtLeast(prompt + options.min_new_tokens, spec.eos_id)
    if options.forced_tokens:
        yield Forced({prompt + place: token for place, token in options.forced_tokens})
    if options.suppress_tokens:
        yield Suppressed(np.array(options.suppress_tokens))
    yield from options.processors


class RepetitionPenalty:
    """Makes earlier tokens less likely: positive scores are divided by the penalty, negative ones multiplied."""

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)
        # Reused at every step: a step allocates nothing that grows with the target.
        self._scores, self._below = np.empty(0, np.float32), np.empty(0, bool)

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        length = tokens.shape[1]
        if len(self._scores) < length:
            self._scores, self._below = np.empty(2 * length, np.float32), np.empty(2 * length, bool)
        penalized, below = self._scores[:length], self._below[:length]
        for history, row in zip(tokens, scores, strict=True):
            # The tokens are within range; in its checking mode numpy would make a copy first.
            np.take(row, history, out=penalized, mode="clip")
            np.less(penalized, 0, out=below)
            np.multiply(penalized, self._penalty, out=penalized, where=below)
            np.logical_not(below, out=below)
            np.divide(penalized, self._penalty, out=penalized, where=below)
            row[history] = penalized
        return scores


class NoRepeatedNgram:
    """Forbids every token that would repeat a sequence of n tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Reused at every step: a step allocates nothing that grows with the target.
        self._again, self._same = np.empty(0, bool), np.empty(0, bool)

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        places = tokens.shape[1] - self._size + 1
        if places < 1:
            return scores
        if len(self._again) < places:
            self._again, self._same = np.empty(2 * places, bool), np.empty(2 * places, bool)
        # Row by row: for a slice of several rows numpy would buffer all of it.
        for history, row in zip(tokens, scores, strict=True):
            row[self._followers(history, places)] = NEG_INF
        return scores

    def _followers(self, history: Tokens, places: int) -> Tokens:
        """Return the tokens that followed each earlier occurrence of the last n - 1 tokens."""
        again, same = self._again[:places], self._same[:places]
        again[...] = True
        for offset in range(self._size - 1):
            np.equal(history[offset : offset + places], history[places + offset], out=same)
            np.logical_and(again, same, out=again)
        return history[np.flatnonzero(again) + self._size - 1]


@dataclass(frozen=True)
class BadWords:
    """Forbids the last token of each word in rows that end with the others."""

    words: tuple[tuple[int, ...], ...]

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        for word in self.words:
            before = len(word) - 1
            if before > tokens.shape[1]:
                continue
            begun = (tokens[:, tokens.shape[1] - before :] == np.array(word[:-1], np.int64)).all(1)
            scores[begun, word[-1]] = NEG_INF
        return scores


@dataclass(frozen=True)
class AtLeast:
    """Forbids EOS until a row has ``length`` tokens, including the prompt."""

    length: int
    eos_id: int

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        if tokens.shape[1] < self.length:
            scores[:, self.eos_id] = NEG_INF
        return scores


@dataclass(frozen=True)
class Forced:
    """Allows only one token at some lengths: ``tokens`` maps the length of a row to its next token."""

    tokens: dict[int, int]

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        token = self.tokens.get(tokens.shape[1])
        if token is not None:
            scores[...] = NEG_INF
            scores[:, token] = 0
        return scores


@dataclass(frozen=True)
class Suppressed:
    """Forbids tokens at every position."""

    ids: NDArray[np.int64]

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:  # noqa: ARG002
        scores[:, self.ids] = NEG_INF
        return scores
