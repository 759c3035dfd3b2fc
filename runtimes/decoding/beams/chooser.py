"""The best few of many scores."""

import numpy as np

from fatdeploy.runtimes.decoding.log_sums import LogSums, row_blocks
from fatdeploy.runtimes.decoding.scoring import check_numbers
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens

# Groups of a row's scores when the best are searched: fewer take longer to scan and let more scores pass, more take
# longer to sort.
GROUPS, GROUPS_PER_COLUMN = 1024, 8


class Chooser:
    """Finds the best few columns of each row without sorting the row or allocating anything of its size."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._log_sums = LogSums()
        self._among = np.empty(0, bool)

    def best(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return scores and columns [R, count] of the best, best first."""
        values, columns, _ = self._best(scores, normalized=False)
        return values, columns

    def best_log_probs(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return log-probabilities and columns [R, count] of the best, best first; the scores stay as they are."""
        values, columns, (largest, logs) = self._best(scores, normalized=True)
        return (values - largest) - logs, columns

    def _best(self, scores: Floats, *, normalized: bool) -> tuple[Floats, Tokens, Floats]:
        """Return scores and columns of the best, and what makes the scores log-probabilities [2, R, 1]."""
        count = min(self._count, scores.shape[1])
        if len(self._among) != scores.shape[1]:
            self._among = np.empty(scores.shape[1], bool)
        columns = np.empty((len(scores), count), np.int64)
        sums = np.zeros((2, len(scores), 1), np.float32)
        # Everything about a block of rows at once, while the cache has it: memory is read once.
        for rows in row_blocks(scores):
            part = scores[rows]
            largest = self._largest_of_groups(part, count)
            if normalized:
                sums[:, rows] = self._log_sums.of(part, largest.max(-1, keepdims=True))
            largest.partition(largest.shape[1] - count)
            for row, bound, into in zip(part, largest[:, -count], columns[rows], strict=True):
                into[...] = self._columns(row, bound, count)
        return scores[np.arange(len(scores))[:, None], columns], columns, sums

    def _largest_of_groups(self, scores: Floats, count: int) -> Floats:
        """Return the largest scores [R, groups] of groups of columns.

        Every one of them belongs to the row, so at least ``count`` columns reach the ``count``-th largest.
        """
        rows, width = scores.shape
        groups = min(width, max(GROUPS, GROUPS_PER_COLUMN * count))
        rest = width % groups
        largest: Floats = scores[:, : width - rest].reshape(rows, -1, groups).max(1)
        np.maximum(largest[:, :rest], scores[:, width - rest :], out=largest[:, :rest])
        check_numbers(largest)
        return largest

    def _columns(self, row: Floats, bound: np.float32, count: int) -> Tokens:
        np.greater_equal(row, bound, out=self._among)
        # The methods, not the functions of these names: for a few numbers those take twice as long.
        (among,) = self._among.nonzero()
        columns: Tokens = among[(-row[among]).argsort(kind="stable")[:count]]
        return columns
