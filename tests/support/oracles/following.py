"""Attentions to the source that depend on where they looked before, one head and one position at a time."""

import math

from fatdeploy.export.reference.config import ModelConfig
from tests.support.oracles.formulas import Floats, Weights, dot, softmax


class Followed:
    """One sentence: what each head of a location-aware or monotonic attention has looked at so far."""

    def __init__(self, w: Weights, config: ModelConfig, length: int) -> None:
        self.w, self.config, self.length = w, config, length
        self.totals = [[0.0] * length for _ in range(config.heads)]
        self.reached = [0] * config.heads

    def weights(self, h: int, query: Floats, keys: list[Floats]) -> list[float]:
        """Return the weights of the next step, and remember them."""
        if self.config.cross_attention == "location":
            weights = softmax([self.location_score(h, j, query, keys[j]) for j in range(self.length)])
            self.totals[h] = [total + weight for total, weight in zip(self.totals[h], weights, strict=True)]
            return weights
        bias = float(self.w["head_bias"][h])
        scores = [dot(query, key) / math.sqrt(len(query)) + bias for key in keys]
        self.reached[h] = next((j for j in range(self.reached[h], self.length) if scores[j] >= 0), self.length - 1)
        return [1.0 if j == self.reached[h] else 0.0 for j in range(self.length)]

    def location_score(self, h: int, j: int, query: Floats, key: Floats) -> float:
        """Return wᵀ tanh(q + k_j + Σ_d F_d c_{j+d})."""
        width, window = len(query), self.config.location_window
        score = 0.0
        for feature in range(width):
            taps = self.w["filters"][h * width + feature][0][0]
            looked = sum(
                taps[distance + window] * self.totals[h][j + distance]
                for distance in range(-window, window + 1)
                if 0 <= j + distance < self.length
            )
            score += self.w["scores.vectors"][h][feature] * math.tanh(query[feature] + key[feature] + looked)
        return score


def expected_weights(scores: list[list[float]]) -> list[list[float]]:
    """Return the probabilities [t][j] that a monotonic head which accepts j with σ(scores[t][j]) stops there.

    It begins at 0 and never passes the last position. One choice after another, without products of many.
    """
    here = [1.0, *[0.0] * (len(scores[0]) - 1)]
    results = []
    for row in scores:
        stopped, walking = [], 0.0
        for j, score in enumerate(row):
            walking += here[j]
            accepts = 1.0 if j == len(row) - 1 else 1 / (1 + math.exp(-score))
            stopped.append(walking * accepts)
            walking *= 1 - accepts
        here = stopped
        results.append(stopped)
    return results
