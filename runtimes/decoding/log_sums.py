"""Log-probabilities from scores, row by row: nothing of the size of a batch times a vocabulary is written."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.protocol import Floats

# Scores that are read together: they and their powers stay in a core's cache, and one call of numpy takes much longer
# than making it.
BLOCK = 2**17
LOWEST = np.finfo(np.float32).min


class LogSums:
    """Computes what is subtracted from scores to make them log-probabilities; its buffer is used again."""

    def __init__(self) -> None:
        self._powers = np.empty(0, np.float32)

    def of(self, scores: Floats, largest: Floats) -> tuple[Floats, Floats]:
        """Return two numbers [R, 1] to subtract from the scores of each row of a block, one after the other.

        ``largest`` are the largest scores [R, 1]. Where every token is forbidden, all log-probabilities are -inf.
        """
        largest = np.maximum(largest, LOWEST)
        if self._powers.size < scores.size:
            self._powers = np.empty(scores.size, np.float32)
        powers = self._powers[: scores.size].reshape(scores.shape)
        np.subtract(scores, largest, out=powers)
        # Forbidden tokens are -inf here, and 0 after exp.
        np.exp(powers, out=powers)
        # The largest power is 1, so that only the sum of forbidden tokens alone is less.
        logs: Floats = np.log(np.maximum(powers.sum(-1, keepdims=True), 1))
        return largest, logs

    def normalize(self, scores: Floats) -> None:
        """Turn scores [R, n] into log-probabilities, in place."""
        for rows in row_blocks(scores):
            part = scores[rows]
            largest, logs = self.of(part, part.max(-1, keepdims=True))
            np.subtract(part, largest, out=part)
            np.subtract(part, logs, out=part)

    def log_probs_of(self, scores: Floats, columns: NDArray[np.int64]) -> Floats:
        """Return the log-probability of one column of each row."""
        chosen = np.take_along_axis(scores, columns[:, None], 1)
        for rows in row_blocks(scores):
            part = scores[rows]
            largest, logs = self.of(part, part.max(-1, keepdims=True))
            chosen[rows] = (chosen[rows] - largest) - logs
        return chosen[:, 0]


def row_blocks(scores: Floats) -> Iterator[slice]:
    """Return the rows of scores, as many at a time as a core's cache has room for."""
    count = max(1, BLOCK // max(1, scores.shape[1]))
    return (slice(start, start + count) for start in range(0, len(scores), count))
