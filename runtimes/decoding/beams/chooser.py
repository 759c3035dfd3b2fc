"""The best few of many scores."""

import numpy as np

from fatdeploy.runtimes.decoding.log_probs import LogProbs, row_blocks
from fatdeploy.runtimes.decoding.scoring import check_numbers
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens

# Groups of a row's scores when the best are searched: fewer take longer to scan and let more scores pass, more take
# longer to sort.
GROUPS, GROUPS_PER_COLUMN = 1024, 8


class Chooser:
    """Finds the best few columns of each row without sorting the row or allocating anything of its size."""

    def __init__(self, count: int, log_probs: LogProbs | None = None) -> None:
        self._count = count
        self._log_probs = log_probs or LogProbs()
        self._among = np.empty(0, bool)

    def best(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return scores and columns [R, count] of the best, best first."""
        return self._best(scores, normalized=False)

    def best_log_probs(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return log-probabilities and columns [R, count] of the best, best first; the scores stay as they are."""
        return self._best(scores, normalized=True)

    def _best(self, scores: Floats, *, normalized: bool) -> tuple[Floats, Tokens]:
        count = min(self._count, scores.shape[1])
        if len(self._among) != scores.shape[1]:
            self._among = np.empty(scores.shape[1], bool)
        best, columns = np.empty((len(scores), count), np.float32), np.empty((len(scores), count), np.int64)
        # Everything about a block of rows at once, while the cache has it: memory is read once.
        for rows in row_blocks(scores):
            part = self._log_probs.of_block(scores[rows]) if normalized else scores[rows]
            bounds = self._bounds(part, count)
            for row, bound, values, into in zip(part, bounds, best[rows], columns[rows], strict=True):
                into[...] = self._columns(row, bound, count)
                values[...] = row[into]
        return best, columns

    def _bounds(self, scores: Floats, count: int) -> Floats:
        """Return for each row a score that its best columns reach and few others do.

        Every group's largest score belongs to the row, so at least ``count`` columns reach the ``count``-th largest.
        """
        rows, width = scores.shape
        groups = min(width, max(GROUPS, GROUPS_PER_COLUMN * count))
        rest = width % groups
        largest = scores[:, : width - rest].reshape(rows, -1, groups).max(1)
        # Row by row: numpy would copy all three parts, because they are not contiguous.
        for row, remainder in zip(largest[:, :rest], scores[:, width - rest :], strict=True):
            np.maximum(row, remainder, out=row)
        check_numbers(largest)
        largest.partition(groups - count)
        bounds: Floats = largest[:, groups - count]
        return bounds

    def _columns(self, row: Floats, bound: np.float32, count: int) -> Tokens:
        np.greater_equal(row, bound, out=self._among)
        # The methods, not the functions of these names: for a few numbers those take twice as long.
        (among,) = self._among.nonzero()
        columns: Tokens = among[(-row[among]).argsort(kind="stable")[:count]]
        return columns
