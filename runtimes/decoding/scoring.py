"""Scores of the next token: those of the vocabulary or of a shortlist, changed by processors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History, Occasional, Processor
from fatdeploy.runtimes.engines.protocol import Engine, Floats, State, StepOut, Want
from fatdeploy.runtimes.shortlist.lists import Shortlists, product_of, shortlists_of

LOWEST = np.finfo(np.float32).min
# Of a power, which is at most 1: 131,072 of them are fewer parts than a float64 counts.
PARTS = np.float32(2**36)


class Scorer:
    """Turns the output of an engine into scores [R, n] of ``ids``; without ids, n is the vocabulary."""

    def __init__(
        self,
        engine: Engine[State],
        options: DecodeOptions,
        processors: Sequence[Processor] = (),
        lists: Shortlists | None = None,
    ) -> None:
        """``lists`` are those of the options' shortlist; without them, the same for all rows."""
        self.spec, self.processors = engine.spec, processors
        self._lists = shortlists_of(options, engine.spec) if lists is None else lists
        self._product = None if self._lists is None else product_of(engine)
        self._scattered = False  # whether the last scores had a column for every token
        # What looks at all columns must find them at the same places whatever else is in the batch.
        occasional = all(isinstance(processor, Occasional) for processor in processors)
        self._scatters = self.by_source and (options.sample or not occasional)
        if self._lists is not None and self._product is not None:
            self._product.choose(self._lists.ids)
        self._scratch: dict[str, Floats] = {}

    @property
    def want(self) -> Want:
        """What a step must compute; with a shortlist, the product with the output matrix is computed here."""
        return Want.LOGITS if self._product is None else Want.HIDDEN

    @property
    def by_source(self) -> bool:
        """Whether the source of a row decides which tokens it may choose."""
        return self._lists is not None and self._lists.per_source

    @property
    def ids(self) -> NDArray[np.int64] | None:
        """The token of each column of the last scores; None if the column is the token."""
        return None if self._lists is None or self._scattered else self._lists.ids

    def logits(self, out: StepOut, sources: NDArray[np.int64] | None = None) -> Floats:
        """Return the scores of a step's last position before any processor; the array may belong to the engine.

        ``sources`` [R] are the sources of all rows; only lists by source need them.
        """
        self._scattered = False
        lists = self._lists
        if lists is None:
            return _needed_logits(out)[:, -1]
        if sources is not None and lists.cover(sources) and self._product is not None:
            self._product.choose(lists.ids)
        if self._product is not None and out.hidden is not None:
            scores = self._product(out.hidden[:, -1])
        else:
            scores = _needed_logits(out)[:, -1, lists.ids]
        lists.restrict(scores)
        return self._scatter(scores, lists.ids) if self._scatters else scores

    def log_probs(self, scores: Floats) -> Floats:
        """Return log-probabilities of scores, in an array that is valid until the next call.

        Where every token is forbidden, all of them are -inf.
        """
        result = self._buffer("log_probs", scores.shape)
        np.subtract(scores, _largest(scores), out=result)
        np.subtract(result, self._log_sums(result), out=result)
        return result

    def log_probs_of(self, scores: Floats, columns: NDArray[np.int64]) -> Floats:
        """Return the log-probability of one column of each row."""
        shifted = self._buffer("log_probs", scores.shape)
        np.subtract(scores, _largest(scores), out=shifted)
        chosen: Floats = shifted[np.arange(len(scores)), columns] - self._log_sums(shifted)[:, 0]
        return chosen

    def processed(self, scores: Floats, history: History) -> Floats:
        """Return scores after every processor, for the rows of a step; ``scores`` stay as they are."""
        acting = [one for one in self.processors if not isinstance(one, Occasional) or one.acts(history)]
        if not acting:
            return scores
        if self._lists is None or self._scattered:
            result = self._buffer("processed", (len(scores), self.spec.vocab_size))
            np.copyto(result, scores)
        else:
            result = self._scatter(scores, self._lists.ids)
        for processor in acting:
            result = processor(history, result)
        return result

    def _scatter(self, scores: Floats, ids: NDArray[np.int64]) -> Floats:
        """Return scores with a column for every token."""
        self._scattered = True
        result = self._buffer("scattered", (len(scores), self.spec.vocab_size))
        result[...] = NEG_INF
        result[:, ids] = scores
        return result

    def _log_sums(self, shifted: Floats) -> Floats:
        powers = self._buffer("powers", shifted.shape)
        # Forbidden tokens are -inf here, and 0 after exp.
        np.exp(shifted, out=powers)
        if self.by_source:
            # The columns of a row's list are at other places in another batch: the sum must not depend on their order.
            # Whole numbers of these parts are summed without rounding.
            np.rint(np.multiply(powers, PARTS, out=powers), out=powers)
            total = powers.sum(-1, keepdims=True, dtype=np.float64) / PARTS
        else:
            total = powers.sum(-1, keepdims=True)
        # The largest power is 1, so that only the sum of forbidden tokens alone is less.
        sums: Floats = np.log(np.maximum(total, 1)).astype(np.float32)
        return sums

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Return an array that is reused at every step: a step allocates nothing that grows with the vocabulary."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.shape != shape:
            buffer = self._scratch[name] = np.empty(shape, np.float32)
        return buffer


def _largest(scores: Floats) -> Floats:
    """Return the largest score [R, 1] of each row, a finite number even where processors forbid every token."""
    largest: Floats = np.maximum(scores.max(-1, keepdims=True), LOWEST)
    return largest


def _needed_logits(out: StepOut) -> Floats:
    if out.logits is None:
        raise SpecMismatch("the engine returned no logits although they were wanted")
    return out.logits


def check_numbers(scores: Floats) -> None:
    """Raise if any score is NaN."""
    if np.isnan(scores).any():
        raise SpecMismatch("the engine's scores are not numbers: fatdeploy verify finds where that begins")


def check_something_is_left(best: Floats, lengths: NDArray[np.int64]) -> None:
    """Raise if the processors forbid every token of a row, or its best score [R] is NaN."""
    left = np.isfinite(best)
    if left.all():
        return
    check_numbers(best)
    raise ConfigError(
        f"the options (bad_words, shortlist, processors …) forbid every token after {lengths[~left][0]} new ones"
    )
