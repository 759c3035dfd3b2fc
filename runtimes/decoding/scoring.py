"""Scores of the next token: those of the vocabulary or of a shortlist, changed by processors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.decoding.log_probs import LogProbs
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History, Processor
from fatdeploy.runtimes.engines.protocol import Engine, Floats, Ranking, State, StepOut, Want

# The largest product, in multiplications, that OpenBLAS (numpy's library) runs in one thread: 65536 * 4, its defaults.
IN_ONE_THREAD = 2**18


class Scorer:
    """Turns the output of an engine into scores [R, n] of ``ids``; without ids, n is the vocabulary."""

    def __init__(self, engine: Engine[State], options: DecodeOptions, processors: Sequence[Processor] = ()) -> None:
        self.spec, self.processors = engine.spec, processors
        ranking = engine if isinstance(engine, Ranking) else None
        self.topk_pays = ranking is None or ranking.topk_pays
        self._listed: NDArray[np.int64] | None = None
        self._matrix: Floats | None = None  # [n, M]
        self._bias: Floats | None = None  # [n]
        if options.shortlist is not None:
            self._listed = np.unique([*options.shortlist, *options.end_ids(engine.spec)]).astype(np.int64)
            self._matrix = engine.output_rows(self._listed)
            self._bias = engine.output_bias(self._listed)
        self.log_softmax = None if ranking is None or ranking.topk_pays else ranking.log_softmax
        self._log_probs = LogProbs(self.log_softmax)
        self._scratch: dict[str, Floats] = {}

    @property
    def want(self) -> Want:
        """What a step must compute; with a shortlist, the product with the output matrix is computed here."""
        return Want.LOGITS if self._matrix is None else Want.HIDDEN

    @property
    def ids(self) -> NDArray[np.int64] | None:
        """The token of each column; None if the column is the token."""
        return None if self.processors else self._listed

    def logits(self, out: StepOut) -> Floats:
        """Return the scores of a step's last position before any processor; the array may belong to the engine."""
        if self._matrix is not None and out.hidden is not None:
            return self._product(out.hidden[:, -1], self._matrix)
        if out.logits is None:
            raise SpecMismatch("the engine returned no logits although they were wanted")
        return out.logits[:, -1] if self._listed is None else out.logits[:, -1, self._listed]

    @property
    def relative(self) -> bool:
        """Whether processors see differences of scores alone."""
        return all(processor.relative for processor in self.processors)

    def normalize(self, scores: Floats) -> None:
        """Turn scores into log-probabilities, in place."""
        self._log_probs.normalize(scores)

    def log_probs_of(self, scores: Floats, columns: NDArray[np.int64]) -> Floats:
        """Return the log-probability of one column of each row."""
        return self._log_probs.of_columns(scores, columns)

    def processed(self, scores: Floats, history: History) -> Floats:
        """Return scores after every processor, for the rows of a step.

        They are changed in place, the engine's own if ``scores`` are: a copy of a large vocabulary takes longer than
        all processors. The columns of a shortlist become those of the vocabulary.
        """
        if not self.processors:
            return scores
        if self._listed is not None:
            listed = self._buffer("processed", (len(scores), self.spec.vocab_size))
            listed[...] = NEG_INF
            listed[:, self._listed] = scores
            scores = listed
        for processor in self.processors:
            scores = processor(history, scores)
        return scores

    def _product(self, hidden: Floats, matrix: Floats) -> Floats:
        # For one row numpy's library uses another routine, which starts threads at a smaller size: two rows are faster.
        rows = hidden if len(hidden) > 1 else np.repeat(hidden, 2, 0)
        result = self._buffer("product", (len(rows), len(matrix)))
        multiply(rows, matrix, result)
        if self._bias is not None:
            np.add(result, self._bias, out=result)
        return result[: len(hidden)]

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Return an array that is reused at every step: a step allocates nothing that grows with the vocabulary."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.shape != shape:
            buffer = self._scratch[name] = np.empty(shape, np.float32)
        return buffer


def multiply(rows: Floats, matrix: Floats, out: Floats) -> None:
    """Write rows [R, M], two or more, times the rows of a matrix [n, M] into an array [R, n], in this thread only.

    For a large product numpy's library would wake its own threads, which wait for cores on which onnxruntime's threads
    spin: 5 ms instead of 0.05 were measured. So the product is cut into small ones. The matrix is used as it was read:
    transposing it takes longer than a few steps.
    """
    width = max(1, IN_ONE_THREAD // rows.size)
    for start in range(0, len(matrix), width):
        part = slice(start, start + width)
        np.matmul(rows, matrix[part].T, out=out[:, part])


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
