"""What may be said: processors that change scores before a token is chosen, in the order of ``transformers``."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.options import DecodeOptions, LogitsProcessor
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import ModelSpec, Tokens

NEG_INF = np.float32(-np.inf)


def processors_of(options: DecodeOptions, spec: ModelSpec) -> list[LogitsProcessor]:
    """Return what the options ask for; none of them is the common case and costs nothing."""
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
    """Makes what was said less likely: positive scores are divided by the penalty, negative ones multiplied."""

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)
        # Used from step to step: a step allocates nothing that grows with what was said.
        self._scores, self._below = np.empty(0, np.float32), np.empty(0, bool)

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        length = tokens.shape[1]
        if len(self._scores) < length:
            self._scores, self._below = np.empty(2 * length, np.float32), np.empty(2 * length, bool)
        found, below = self._scores[:length], self._below[:length]
        for said, row in zip(tokens, scores, strict=True):
            # Tokens are within range; told to check it, numpy would make a copy of its own first.
            np.take(row, said, out=found, mode="clip")
            np.less(found, 0, out=below)
            np.multiply(found, self._penalty, out=found, where=below)
            np.logical_not(below, out=below)
            np.divide(found, self._penalty, out=found, where=below)
            row[said] = found
        return scores


class NoRepeatedNgram:
    """Forbids the token that would say n tokens in a row a second time."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Used from step to step: a step allocates nothing that grows with what was said.
        self._again, self._same = np.empty(0, bool), np.empty(0, bool)

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        places = tokens.shape[1] - self._size + 1
        if places < 1:
            return scores
        if len(self._again) < places:
            self._again, self._same = np.empty(2 * places, bool), np.empty(2 * places, bool)
        # A row at a time: numpy would buffer all of a part of several rows.
        for said, row in zip(tokens, scores, strict=True):
            row[self._followers(said, places)] = NEG_INF
        return scores

    def _followers(self, said: Tokens, places: int) -> Tokens:
        """Return what came after each earlier place that reads as the end does."""
        again, same = self._again[:places], self._same[:places]
        again[...] = True
        for offset in range(self._size - 1):
            np.equal(said[offset : offset + places], said[places + offset], out=same)
            np.logical_and(again, same, out=again)
        return said[np.flatnonzero(again) + self._size - 1]


@dataclass(frozen=True)
class BadWords:
    """Forbids the last token of each word where the others have just been said."""

    words: tuple[tuple[int, ...], ...]

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        for word in self.words:
            before = len(word) - 1
            if before > tokens.shape[1]:
                continue
            said = (tokens[:, tokens.shape[1] - before :] == np.array(word[:-1], np.int64)).all(1)
            scores[said, word[-1]] = NEG_INF
        return scores


@dataclass(frozen=True)
class AtLeast:
    """Forbids EOS before so many tokens, those of the prompt included."""

    length: int
    eos_id: int

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        if tokens.shape[1] < self.length:
            scores[:, self.eos_id] = NEG_INF
        return scores


@dataclass(frozen=True)
class Forced:
    """Allows one token alone where that many were said before."""

    tokens: dict[int, int]

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        token = self.tokens.get(tokens.shape[1])
        if token is not None:
            scores[...] = NEG_INF
            scores[:, token] = 0
        return scores


@dataclass(frozen=True)
class Suppressed:
    """Forbids tokens everywhere."""

    ids: NDArray[np.int64]

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:  # noqa: ARG002
        scores[:, self.ids] = NEG_INF
        return scores
