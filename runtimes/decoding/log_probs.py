"""Log-probabilities from scores, row by row: nothing of the size of a batch times a vocabulary is written."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.protocol import Floats

# Scores that are read together: few enough to stay in a cache, and enough that calling numpy costs little beside them.
BLOCK = 2**18
LOWEST = np.finfo(np.float32).min
# Of a power, which is at most 1: 131,072 of them are fewer parts than a float64 counts.
PARTS = np.float32(2**36)

LogSoftmax = Callable[[Floats, Floats], None]


class LogProbs:
    """Normalises scores; its buffers are used again. ``log_softmax`` is an engine's own, if that is faster.

    With ``any_order`` a row's results do not depend on the places of its columns among forbidden ones, which then takes
    longer. Where every token is forbidden, all log-probabilities are -inf.
    """

    def __init__(self, log_softmax: LogSoftmax | None = None, *, any_order: bool = False) -> None:
        self._log_softmax, self._any_order = None if any_order else log_softmax, any_order
        self._log_probs, self._powers = np.empty(0, np.float32), np.empty(0, np.float32)

    def normalize(self, scores: Floats) -> None:
        """Turn scores [R, n] into log-probabilities, in place."""
        for rows in row_blocks(scores):
            scores[rows] = self.of_block(scores[rows])

    def of_columns(self, scores: Floats, columns: NDArray[np.int64]) -> Floats:
        """Return the log-probability of one column of each row."""
        result = np.empty(len(scores), np.float32)
        for rows in row_blocks(scores):
            log_probs = self.of_block(scores[rows])
            result[rows] = log_probs[np.arange(len(log_probs)), columns[rows]]
        return result

    def of_block(self, scores: Floats) -> Floats:
        """Return the log-probabilities of a few rows, in an array that is valid until the next call."""
        if self._log_probs.size < scores.size:
            self._log_probs = np.empty(scores.size, np.float32)
        log_probs = self._log_probs[: scores.size].reshape(scores.shape)
        if self._log_softmax is not None:
            self._log_softmax(np.ascontiguousarray(scores), log_probs)
            missing = np.flatnonzero(np.isnan(log_probs[:, 0]))
            if missing.size:
                log_probs[missing[np.isneginf(scores[missing].max(-1))]] = -np.inf
        else:
            self._write(scores, log_probs)
        return log_probs

    def _write(self, scores: Floats, out: Floats) -> None:
        # The largest is a finite number even where every token is forbidden.
        np.subtract(scores, np.maximum(scores.max(-1, keepdims=True), LOWEST), out=out)
        if self._powers.size < out.size:
            self._powers = np.empty(out.size, np.float32)
        # Forbidden tokens are -inf here, and 0 after exp.
        powers = np.exp(out, out=self._powers[: out.size].reshape(out.shape))
        # The largest power is 1, so that only the sum of forbidden tokens alone is less.
        np.subtract(out, np.log(np.maximum(self._sums(powers), 1)), out=out)

    def _sums(self, powers: Floats) -> Floats:
        """Return the sums of rows [R, 1]; the powers may be changed."""
        if not self._any_order:
            sums: Floats = powers.sum(-1, keepdims=True)
            return sums
        # Whole numbers of these parts are summed without rounding.
        np.rint(np.multiply(powers, PARTS, out=powers), out=powers)
        exact: NDArray[np.float64] = powers.sum(-1, keepdims=True, dtype=np.float64)
        return (exact / PARTS).astype(np.float32)


def row_blocks(scores: Floats) -> Iterator[slice]:
    """Return the rows of scores, as many at a time as a cache has room for."""
    count = max(1, BLOCK // max(1, scores.shape[1]))
    return (slice(start, start + count) for start in range(0, len(scores), count))
