"""Patterns and mixing without attention from their formulas: one unpadded sentence, one pair of positions at a time."""

import math
from collections.abc import Sequence

import numpy as np

from fatdeploy.export.reference.config import ModelConfig
from tests.support.oracles.formulas import (
    Floats,
    Relative,
    Rows,
    Seen,
    Vector,
    Vectors,
    Weights,
    activated,
    dot,
    sigmoid,
    softmax_attention,
)


def routing(w: Weights, config: ModelConfig, xs: Rows, seen: Seen, relative: tuple[Relative, Vectors]) -> Rows:
    """Return attention of queries to the keys with the same nearest centroid, and to their own position."""
    centroids = [row / math.sqrt(dot(row, row)) for row in w["centroids"]]

    def cluster(x: Vector) -> int:
        likeness = [dot(x, centroid) for centroid in centroids]
        return likeness.index(max(likeness))

    parts = [np.split(w.projected("qkv", x), 3) for x in xs]
    queries, keys = [cluster(q) for q, _, _ in parts], [cluster(k) for _, k, _ in parts]
    assert len(set(queries + keys)) > 1 or len(xs) == 1
    return softmax_attention(
        w,
        config,
        "scaled_dot",
        xs,
        lambda h, i, j: seen(h, i, j) and (queries[i] == keys[j] or i == j),
        relative,
    )


def sinkhorn(w: Weights, config: ModelConfig, xs: Rows, relative: tuple[Relative, Vectors]) -> Rows:
    """Return attention of every block to itself and to the block that the sorted matrix gives it."""
    length = config.block_length
    blocks = [xs[first : first + length] for first in range(0, len(xs), length)]
    shares = []
    for block in blocks:
        scores = w.unbiased("sort", activated(w.linear("into", sum(block) / len(block)), "relu"))
        shares.append([math.exp(score) for score in scores[: len(blocks)]])
    for _ in range(config.sinkhorn_rounds):
        shares = [[share / sum(row) for share in row] for row in shares]
        totals = [sum(row[column] for row in shares) for column in range(len(blocks))]
        shares = [[share / total for share, total in zip(row, totals, strict=True)] for row in shares]
    partners: list[int] = []
    for row in shares:
        free = [column for column in range(len(blocks)) if column not in partners]
        partners.append(max(free, key=row.__getitem__))

    def seen(_: int, i: int, j: int) -> bool:
        return j // length in (i // length, partners[i // length])

    return softmax_attention(w, config, "scaled_dot", xs, seen, relative)


def spatial(w: Weights, config: ModelConfig, xs: Rows, seen: Seen) -> Rows:
    """Return out(u ⊙ (W norm(v) + b)) for [u; v] = activation(into(x))."""
    us, vs = zip(*(np.split(activated(w.linear("into", x), config.activation), 2) for x in xs), strict=True)
    normed = [w.norm("norm", v) for v in vs]
    results = []
    for i, u in enumerate(us):
        spread = sum(w["matrix"][i][j] * v for j, v in enumerate(normed) if seen(0, i, j))
        results.append(w.linear("out", u * (spread + w["bias"][i])))
    return results


def attention_free(w: Weights, xs: Rows, biases: Sequence[Sequence[Floats]], seen: Seen) -> Rows:
    """Return out(σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij)), ``biases`` w [i][j][channel]."""
    parts = [np.split(w.projected("qkv", x), 3) for x in xs]
    results = []
    for i, (q, _, _) in enumerate(parts):
        averages = []
        for m in range(len(q)):
            pairs = [(math.exp(k[m] + biases[i][j][m]), v[m]) for j, (_, k, v) in enumerate(parts) if seen(0, i, j)]
            averages.append(sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs))
        results.append(w.projected("out", sigmoid(q) * np.array(averages)))
    return results


def table_biases(w: Weights, config: ModelConfig, length: int) -> list[list[list[float]]]:
    """Return the encoder's position biases: one number per pair of positions."""
    table = w["position_scores"].tolist()
    return [[[table[i][j]] * config.attention_width for j in range(length)] for i in range(length)]


def decaying_biases(w: Weights, config: ModelConfig, length: int) -> list[list[list[float]]]:
    """Return the decoder's position biases: −λ(i − j), where λ is the softplus of a number per head."""
    rates = [math.log(1 + math.exp(decay)) for decay in w["decay"].tolist()]
    channels = [rates[m * len(rates) // config.attention_width] for m in range(config.attention_width)]
    return [[[-rate * (i - j) for rate in channels] for j in range(length)] for i in range(length)]
