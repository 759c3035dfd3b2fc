"""Drawing tokens: each row has its own generator, so its tokens do not depend on the batch."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Floats

Weights = NDArray[np.float64]


class Sampler:
    """Draws from scores after temperature, top-k, top-p and min-p, in Hugging Face's order."""

    def __init__(self, options: DecodeOptions, sources: Sequence[NDArray[np.generic]]) -> None:
        self.options = options
        self.generators = [
            np.random.default_rng([options.seed, index, *_digest(source)])
            for source in sources
            for index in range(options.num_return_sequences)
        ]
        # Reused at every step: a step allocates nothing that grows with the vocabulary.
        self._shifted = np.empty(0, np.float32)
        self._weights, self._sorted, self._sums = (np.empty(0) for _ in range(3))
        self._left_out = np.empty(0, bool)

    def column(self, scores: Floats, row: int) -> int:
        """Return a column of scores [n], drawn by the generator of a row."""
        if len(self._weights) != len(scores):
            self._shifted = np.empty(len(scores), np.float32)
            self._weights, self._sorted, self._sums = (np.empty(len(scores)) for _ in range(3))
            self._left_out = np.empty(len(scores), bool)
        weights, sums = self._weights, self._sums
        np.subtract(scores, scores.max(), out=self._shifted)
        np.copyto(weights, self._shifted)
        np.divide(weights, self.options.temperature, out=weights)
        np.exp(weights, out=weights)
        self._narrow(weights)
        np.cumsum(weights, out=sums)
        # Below the whole sum, so that the result is always a column with a weight.
        drawn = min(self.generators[row].random() * sums[-1], np.nextafter(sums[-1], 0))
        return int(np.searchsorted(sums, drawn, side="right"))

    def _narrow(self, weights: Weights) -> None:
        """Set the weights that top-k, top-p and min-p exclude to zero; the heaviest weight is 1 and stays."""
        least = max(self._least_of_best(weights), self.options.min_p)
        if least > 0:
            np.less(weights, least, out=self._left_out)
            np.copyto(weights, 0, where=self._left_out)

    def _least_of_best(self, weights: Weights) -> float:
        """Return the least weight that top-k and top-p keep."""
        top_p, most = self.options.top_p, len(weights)
        if 0 < self.options.top_k < most:
            # Weights that are equal to the last one stay as well.
            best = self._heaviest(weights, self._kth(weights))
            return float(best[0]) if top_p == 1 else self._least_of_nucleus(best, 0.0)
        if top_p == 1:
            return 0.0
        whole = float(weights.sum())
        # All weights below this sum to less than what top-p may exclude: only the others need sorting.
        best = self._heaviest(weights, (1 - top_p) * whole / most)
        return self._least_of_nucleus(best, 0.0 if len(best) == most else whole - float(best.sum()))

    def _least_of_nucleus(self, best: Weights, lighter: float) -> float:
        """Return the least of the sorted weights that top-p keeps; ``lighter`` is the sum of all weights below them."""
        sums = self._sums[: len(best)]
        np.cumsum(best, out=sums)
        # From the lightest up, weights are excluded while their sum is within the part that top-p drops.
        excluded = (1 - self.options.top_p) * (lighter + sums[-1]) - lighter
        n_excluded = np.searchsorted(sums, excluded, side="right")
        return float(best[min(n_excluded, len(best) - 1)])

    def _kth(self, weights: Weights) -> float:
        place = len(weights) - self.options.top_k
        np.copyto(self._sorted, weights)
        self._sorted.partition(place)
        return float(self._sorted[place])

    def _heaviest(self, weights: Weights, least: float) -> Weights:
        """Return the weights from ``least`` up, sorted."""
        np.less(weights, least, out=self._left_out)
        place = int(np.count_nonzero(self._left_out))
        np.copyto(self._sorted, weights)
        self._sorted.partition(place)
        best: Weights = self._sorted[place:]
        best.sort()
        return best


def _digest(source: NDArray[np.generic]) -> list[int]:
    """Return numbers that identify a source: its samples are the same at any place in a batch."""
    data = hashlib.sha256(np.ascontiguousarray(source, np.int64).tobytes()).digest()
    numbers: list[int] = np.frombuffer(data, np.uint32).tolist()
    return numbers
