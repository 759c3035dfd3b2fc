"""The best few of many scores."""

import numpy as np

from fatdeploy.runtimes.decoding.scoring import check_numbers
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens

# Groups of a row's scores when the best are searched: more take longer to scan, fewer let more scores pass.
GROUPS, GROUPS_PER_COLUMN = 256, 8


class Chooser:
    """Finds the best few columns of each row without sorting the row or allocating anything of its size."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._among = np.empty(0, bool)

    def best(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return scores and columns [R, count] of the best, best first."""
        count = min(self._count, scores.shape[1])
        if len(self._among) != scores.shape[1]:
            self._among = np.empty(scores.shape[1], bool)
        bounds = self._bounds(scores, count)
        columns = np.stack([self._columns(row, bound, count) for row, bound in zip(scores, bounds, strict=True)])
        return np.take_along_axis(scores, columns, 1), columns

    def _bounds(self, scores: Floats, count: int) -> Floats:
        """Return for each row a score that its best columns reach and few others do.

        Every group's largest score belongs to the row, so at least ``count`` columns reach the ``count``-th largest.
        """
        rows, width = scores.shape
        groups = min(width, max(GROUPS, GROUPS_PER_COLUMN * count))
        rest = width % groups
        largest = scores[:, : width - rest].reshape(rows, -1, groups).max(1)
        np.maximum(largest[:, :rest], scores[:, width - rest :], out=largest[:, :rest])
        check_numbers(largest)
        largest.partition(groups - count)
        bounds: Floats = largest[:, groups - count]
        return bounds

    def _columns(self, row: Floats, bound: np.float32, count: int) -> Tokens:
        np.greater_equal(row, bound, out=self._among)
        among = np.flatnonzero(self._among)
        return among[np.argsort(-row[among], kind="stable")[:count]]
