"""Drawing tokens: each row has its own generator, so its tokens do not depend on the batch."""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.options import SAMPLING, DecodeOptions
from fatdeploy.runtimes.engines.protocol import Floats

Weights = NDArray[np.float64]


class Sampler:
    """Draws from scores after temperature, top-k, top-p, min-p and the cut-offs, in Hugging Face's order.

    At least ``fewest`` tokens of a row can always be drawn.
    """

    def __init__(self, options: DecodeOptions, fewest: int = 1) -> None:
        self.options, self.fewest = options, fewest
        names = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
        self._narrows = any(getattr(options, name) != SAMPLING[name] for name in names)
        # Reused at every step: a step allocates nothing that grows with the vocabulary.
        self._shifted = np.empty(0, np.float32)
        self._weights, self._sorted, self._sums = (np.empty(0) for _ in range(3))
        self._left_out = np.empty(0, bool)

    def generators(self, source: NDArray[np.generic], count: int = 1) -> list[np.random.Generator]:
        """Return new generators for the rows of a source; the beams of a source are drawn together, by one."""
        digest = _digest(source)
        return [np.random.default_rng([self.options.seed, index, *digest]) for index in range(count)]

    def column(self, scores: Floats, generator: np.random.Generator) -> int:
        """Return a column of scores [n], drawn by the generator of a row."""
        weights = self.weights(scores)
        sums = np.cumsum(weights, out=self._sums)
        # Below the whole sum, so that the result is always a column with a weight.
        drawn = min(generator.random() * sums[-1], np.nextafter(sums[-1], 0))
        return int(np.searchsorted(sums, drawn, side="right"))

    def narrowed(self, scores: Floats) -> Floats:
        """Return scores [n] over the temperature, -inf where the options exclude them."""
        result: Floats = (scores / self.options.temperature).astype(np.float32, copy=False)
        if self._narrows and np.isfinite(scores.max()):
            excluded = self.weights(scores) == 0
            if np.count_nonzero(~excluded) < self.fewest:
                # At a low temperature even the weights of the best may be zero.
                excluded[np.argpartition(scores, -self.fewest)[-self.fewest :]] = False
            result[excluded] = -np.inf
        return result

    def weights(self, scores: Floats) -> Weights:
        """Return a weight for each of scores [n], zero where the options exclude it; valid until the next call."""
        if len(self._weights) != len(scores):
            self._shifted = np.empty(len(scores), np.float32)
            self._weights, self._sorted, self._sums = (np.empty(len(scores)) for _ in range(3))
            self._left_out = np.empty(len(scores), bool)
        weights = self._weights
        np.subtract(scores, scores.max(), out=self._shifted)
        np.copyto(weights, self._shifted)
        np.divide(weights, self.options.temperature, out=weights)
        np.exp(weights, out=weights)
        self._narrow(weights)
        return weights

    def _narrow(self, weights: Weights) -> None:
        """Set the weights that the options exclude to zero; the heaviest is 1, and typical-p alone may exclude it."""
        options = self.options
        self._leave_out(weights, max(self._least_of_best(weights), options.min_p))
        if options.typical_p < 1:
            keep_typical(weights, options.typical_p, self.fewest)
        # At least the heaviest weight stays.
        if options.epsilon_cutoff > 0:
            self._leave_out(weights, min(options.epsilon_cutoff * float(weights.sum()), float(weights.max())))
        if options.eta_cutoff > 0:
            least = least_probability(weights, options.eta_cutoff)
            self._leave_out(weights, min(least * float(weights.sum()), float(weights.max())))

    def _leave_out(self, weights: Weights, least: float) -> None:
        """Set the weights below the least one to zero."""
        if least > 0 and self.fewest > 1:
            least = min(least, self._kth(weights, self.fewest))
        if least > 0:
            np.less(weights, least, out=self._left_out)
            np.copyto(weights, 0, where=self._left_out)

    def _least_of_best(self, weights: Weights) -> float:
        """Return the least weight that top-k and top-p keep."""
        top_p, most = self.options.top_p, len(weights)
        top_k = self.options.top_k and max(self.options.top_k, self.fewest)
        if 0 < top_k < most:
            # Weights that are equal to the last one stay as well.
            best = self._heaviest(weights, self._kth(weights, top_k))
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

    def _kth(self, weights: Weights, count: int) -> float:
        """Return the least of the ``count`` heaviest weights."""
        place = max(0, len(weights) - count)
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


def keep_typical(weights: Weights, mass: float, fewest: int = 1) -> None:
    """Set all weights to zero but those whose surprise is nearest to the mean and that reach a probability together."""
    kept = np.flatnonzero(weights)
    surprises, mean = _surprises(weights[kept])
    distances = np.abs(surprises - mean)
    order = np.argsort(distances, kind="stable")
    sums = np.cumsum(weights[kept[order]])
    last = min(max(int(np.searchsorted(sums, mass * sums[-1])), fewest - 1), len(order) - 1)
    weights[kept[distances > distances[order[last]]]] = 0


def least_probability(weights: Weights, cutoff: float) -> float:
    """Return the probability that eta sampling asks of a token: the cut-off, or less if many tokens are likely."""
    _, entropy = _surprises(weights[weights > 0])
    return min(cutoff, math.sqrt(cutoff) * math.exp(-entropy))


def _surprises(weights: Weights) -> tuple[Weights, float]:
    """Return the negative log-probability of each weight above zero, and their mean, which is the entropy."""
    total = weights.sum()
    surprises: Weights = np.log(total) - np.log(weights)
    return surprises, float((weights * surprises).sum() / total)


def _digest(source: NDArray[np.generic]) -> list[int]:
    """Return numbers that identify a source: its samples are the same at any place in a batch."""
    data = hashlib.sha256(np.ascontiguousarray(source, np.int64).tobytes()).digest()
    numbers: list[int] = np.frombuffer(data, np.uint32).tolist()
    return numbers
