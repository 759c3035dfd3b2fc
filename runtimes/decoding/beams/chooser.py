"""The best few of many scores."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.log_probs import LogProbs, row_blocks
from fatdeploy.runtimes.decoding.scoring import check_numbers
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens

# Groups of a row's scores when the best are searched: fewer take longer to scan and let more scores pass, more take
# longer to sort.
GROUPS, GROUPS_PER_COLUMN = 1024, 8


class _Competing(NamedTuple):
    """Rows and columns of scores that may be among the best of their row."""

    rows: NDArray[np.int64]
    columns: Tokens
    values: Floats


class _Buffers:
    """Arrays that are used again, each as large as it ever had to be."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.generic]] = {}

    def of(self, name: str, shape: tuple[int, int], dtype: type[np.generic]) -> NDArray[np.generic]:
        """Return an array of this name, with any content."""
        size = shape[0] * shape[1]
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, dtype)
        return array[:size].reshape(shape)


class Chooser:
    """Finds the best few columns of each row without sorting the row or allocating anything of its size.

    All rows at once: a call of numpy for each row would make workers wait for each other between the calls.
    """

    def __init__(self, count: int, log_probs: LogProbs | None = None) -> None:
        self._count = count
        self._log_probs = log_probs or LogProbs()
        self._buffers = _Buffers()

    def best(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return scores and columns [R, count] of the best, best first."""
        return self._best(scores, normalized=False)

    def best_log_probs(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return log-probabilities and columns [R, count] of the best, best first; the scores stay as they are."""
        return self._best(scores, normalized=True)

    def _best(self, scores: Floats, *, normalized: bool) -> tuple[Floats, Tokens]:
        count = min(self._count, scores.shape[1])
        found: list[_Competing] = []
        # Everything about a block of rows at once, while the cache has it: memory is read once.
        for block in row_blocks(scores):
            part = self._log_probs.of_block(scores[block]) if normalized else np.ascontiguousarray(scores[block])
            found += [each._replace(rows=each.rows + block.start) for each in self._competing(part, count)]
        rows, columns, values = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        # By row, then the best first, then the first column among equals.
        order = np.lexsort((columns, -values, rows))
        n_competing = np.bincount(rows, minlength=len(scores))
        begins = np.cumsum(n_competing) - n_competing
        chosen = order[begins[:, None] + np.arange(count)]
        return values[chosen], columns[chosen]

    def _competing(self, scores: Floats, count: int) -> list[_Competing]:
        """Return some scores, at least ``count`` per row: the best are among them.

        Every group's largest score belongs to the row, so at least ``count`` columns reach the ``count``-th largest of
        them, and all that do are in groups whose largest does, or in the rest that is in no group.
        """
        n_rows, n_columns = scores.shape
        n_groups = min(n_columns, max(GROUPS, GROUPS_PER_COLUMN * count))
        depth = n_columns // n_groups
        largest = scores[:, : depth * n_groups].reshape(n_rows, depth, n_groups).max(1)
        rest = scores[:, depth * n_groups :]
        check_numbers(largest)
        check_numbers(rest.max(-1, initial=-np.inf))
        bounds = np.partition(largest, n_groups - count)[:, n_groups - count, None].copy()
        chosen = (largest >= bounds).nonzero()
        del largest  # less memory at a time
        members = self._members(scores, chosen, n_groups, bounds)
        if not rest.shape[1]:
            return [members]
        among = np.greater_equal(rest, bounds, out=self._buffers.of("rest", rest.shape, np.bool_))
        rows, places = among.nonzero()
        return [members, _Competing(rows, places + depth * n_groups, rest[rows, places])]

    def _members(
        self, scores: Floats, chosen: tuple[NDArray[np.int64], ...], n_groups: int, bounds: Floats
    ) -> _Competing:
        """Return the scores that reach the bound of their row, of groups that are chosen by row and number."""
        rows, groups = chosen
        depth = scores.shape[1] // n_groups
        shape = len(rows), depth
        columns = self._buffers.of("columns", shape, np.int64)
        np.add(groups[:, None], np.arange(0, depth * n_groups, n_groups), out=columns)
        places = np.add(columns, rows[:, None] * scores.shape[1], out=self._buffers.of("places", shape, np.int64))
        # The places are within range; in its checking mode numpy would make a copy first.
        values = self._buffers.of(f"values {scores.dtype}", shape, scores.dtype.type)
        np.take(scores.reshape(-1), places, out=values, mode="clip")
        among = np.greater_equal(values, bounds[rows], out=self._buffers.of("among", shape, np.bool_)).nonzero()
        return _Competing(rows[among[0]], columns[among], values[among])
