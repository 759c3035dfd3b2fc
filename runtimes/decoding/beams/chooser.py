"""The best few of many scores."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.log_probs import LogProbs, row_blocks
from fatdeploy.runtimes.decoding.scoring import check_numbers
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens

# Groups of a row's scores when the best are searched, each of every n-th column: fewer take longer to scan and let more
# scores pass, more take longer to sort.
GROUPS, GROUPS_PER_COLUMN = 1024, 8


class Chooser:
    """Finds the best few columns of each row without sorting the row or allocating anything of its size."""

    def __init__(self, count: int, log_probs: LogProbs | None = None) -> None:
        self._count = count
        self._log_probs = log_probs or LogProbs()

    def best(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return scores and columns [R, count] of the best, best first."""
        return self._best(scores, normalized=False)

    def best_log_probs(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return log-probabilities and columns [R, count] of the best, best first; the scores stay as they are."""
        return self._best(scores, normalized=True)

    def _best(self, scores: Floats, *, normalized: bool) -> tuple[Floats, Tokens]:
        count = min(self._count, scores.shape[1])
        found = []
        # Everything about a block of rows at once, while the cache has it: memory is read once.
        for block in row_blocks(scores):
            part = self._log_probs.of_block(scores[block]) if normalized else scores[block]
            rows, columns = _competing(part, count)
            found.append((rows + block.start, columns, part[rows, columns]))
        rows, columns, values = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        # By row, then the best first, then the first column among equals.
        order = np.lexsort((columns, -values, rows))
        n_competing = np.bincount(rows, minlength=len(scores))
        begins = np.cumsum(n_competing) - n_competing
        chosen = order[begins[:, None] + np.arange(count)]
        return values[chosen], columns[chosen]


def _competing(scores: Floats, count: int) -> tuple[NDArray[np.int64], Tokens]:
    """Return rows and columns of some scores, at least ``count`` per row: the best are among them.

    Every group's largest score belongs to the row, so at least ``count`` columns reach the ``count``-th largest of
    them, and all that do are in groups whose largest does.
    """
    n_rows, n_columns = scores.shape
    n_groups = min(n_columns, max(GROUPS, GROUPS_PER_COLUMN * count))
    depth = n_columns // n_groups
    rest = scores[:, depth * n_groups :]
    groups = scores[:, : depth * n_groups].reshape(n_rows, depth, n_groups)
    largest = groups.max(1)
    check_numbers(largest)
    bounds = np.partition(largest, n_groups - count)[:, n_groups - count, None]
    rows, members = (largest >= bounds).nonzero()
    picked, places = (groups[rows, :, members] >= bounds[rows]).nonzero()
    competing = rows[picked], places * n_groups + members[picked]
    if not rest.shape[1]:
        return competing
    check_numbers(rest)
    rows, places = (rest >= bounds).nonzero()
    return np.concatenate([competing[0], rows]), np.concatenate([competing[1], depth * n_groups + places])
