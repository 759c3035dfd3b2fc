"""Scores of the next token: those of the vocabulary or of a shortlist, changed by processors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.decoding.log_probs import LogProbs
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History, Occasional, Processor
from fatdeploy.runtimes.engines.protocol import Engine, Floats, Ranking, State, StepOut, Want
from fatdeploy.runtimes.shortlist.lists import Shortlists, product_of, shortlists_of


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
        ranking = engine if isinstance(engine, Ranking) else None
        self.topk_pays = ranking is None or ranking.topk_pays
        self._lists = shortlists_of(options, engine.spec) if lists is None else lists
        self._product = None if self._lists is None else product_of(engine)
        if self._lists is not None and self._product is not None:
            self._product.choose(self._lists.ids)
        self._scattered = False  # whether the last scores had a column for every token
        # What looks at all columns must find them at the same places whatever else is in the batch.
        occasional = all(isinstance(processor, Occasional) for processor in processors)
        by_source = self._lists is not None and self._lists.per_source
        self._scatters = by_source and (options.sample or not occasional)
        log_softmax = None if ranking is None or ranking.topk_pays else ranking.log_softmax
        # The columns of a row's own list are at other places in another batch.
        self.log_probs = LogProbs(log_softmax, any_order=by_source)
        self._buffer: Floats = np.empty((0, 0), np.float32)

    @property
    def want(self) -> Want:
        """What a step must compute; with a shortlist, the product with the output matrix is computed here."""
        return Want.LOGITS if self._product is None else Want.HIDDEN

    @property
    def ids(self) -> NDArray[np.int64] | None:
        """The token of each column of the last scores; None if the column is the token."""
        return None if self._lists is None or self._scattered else self._lists.ids

    def logits(self, out: StepOut, sources: NDArray[np.int64] | None = None) -> Floats:
        """Return the scores of a step's last position before any processor; the array may belong to the engine.

        ``sources`` [R] are the sources of all rows, which leave and join; only lists by source need them.
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

    @property
    def relative(self) -> bool:
        """Whether processors see differences of scores alone."""
        return all(processor.relative for processor in self.processors)

    def normalize(self, scores: Floats) -> None:
        """Turn scores into log-probabilities, in place."""
        self.log_probs.normalize(scores)

    def log_probs_of(self, scores: Floats, columns: NDArray[np.int64]) -> Floats:
        """Return the log-probability of one column of each row."""
        return self.log_probs.of_columns(scores, columns)

    def processed(self, scores: Floats, history: History) -> Floats:
        """Return scores after every processor, for the rows of a step.

        They are changed in place, the engine's own if ``scores`` are: a copy of a large vocabulary takes longer than
        all processors. The columns of a shortlist become those of the vocabulary if any processor acts.
        """
        acting = [one for one in self.processors if not isinstance(one, Occasional) or one.acts(history)]
        if acting and self.ids is not None:
            scores = self._scatter(scores, self.ids)
        for processor in acting:
            scores = processor(history, scores)
        return scores

    def _scatter(self, scores: Floats, ids: NDArray[np.int64]) -> Floats:
        """Return scores with a column for every token, in an array that is reused at every step."""
        self._scattered = True
        shape = len(scores), self.spec.vocab_size
        if self._buffer.shape != shape:
            self._buffer = np.empty(shape, np.float32)
        self._buffer[...] = NEG_INF
        self._buffer[:, ids] = scores
        return self._buffer


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
