"""The formulas of the reference models as plain loops over one sentence without padding, from the description alone.

Padding must not change a real position: the result for a sentence must be the same in every padded batch. Nothing here
calls the code under test; only the names and layouts of its weights are shared. Letters: i a query, j a key,
t a target position, h a head, d a feature, M the width, D = M / H the width of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.export.reference.config import ModelConfig

Vector = NDArray[np.float64]  # [M]
Rows = list[Vector]  # one per position
Floats = Sequence[float]  # one head's features, or one query's weights
Relative = Callable[[int, int, int], float]  # of head, query, key
Seen = Callable[[int, int, int], bool]  # likewise
Vectors = Callable[[str, int, int, int], Vector]  # of keys or values, head, query, key


class Weights:
    """A model's arrays below one dotted name."""

    def __init__(self, arrays: dict[str, NDArray[Any]], config: ModelConfig, prefix: str = "") -> None:
        self.arrays, self.config, self.prefix = arrays, config, prefix

    def below(self, name: str) -> "Weights":
        return Weights(self.arrays, self.config, f"{self.prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.arrays

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[self.prefix + name]

    def linear(self, name: str, x: Vector) -> Vector:
        return self.unbiased(name, x, has_bias=True) + self[f"{name}.bias"]

    def unbiased(self, name: str, x: Vector, *, has_bias: bool = False) -> Vector:
        assert (f"{name}.bias" in self) == has_bias, f"bias of {self.prefix}{name}"
        return self[f"{name}.weight"] @ x

    def projected(self, name: str, x: Vector) -> Vector:
        """Return a projection of an attention or a feed-forward network, which may have no biases."""
        return self.linear(name, x) if self.config.biases else self.unbiased(name, x)

    def norm(self, name: str, x: Vector) -> Vector:
        rms, eps = self.config.norm_kind == "rms", self.config.norm_eps
        mean = 0.0 if rms else sum(x) / len(x)
        variance = sum((value - mean) ** 2 for value in x) / len(x)
        scaled = np.array([(value - mean) / math.sqrt(variance + eps) for value in x]) * self[f"{name}.weight"]
        assert (f"{name}.bias" in self) != rms
        return scaled if rms else scaled + self[f"{name}.bias"]


def dot(a: Floats, b: Floats) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def sigmoid(x: Vector) -> Vector:
    return np.array([1 / (1 + math.exp(-value)) for value in x])


def softmax(scores: Floats) -> list[float]:
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def mixed(weights: Floats, vectors: Sequence[Floats]) -> list[float]:
    """Return Σ_j weights_j vectors_j."""
    return [sum(a * v[d] for a, v in zip(weights, vectors, strict=True)) for d in range(len(vectors[0]))]


def activated(x: Vector, kind: str) -> Vector:
    function = {
        "relu": lambda value: max(value, 0.0),
        "gelu": lambda value: value * (1 + math.erf(value / math.sqrt(2))) / 2,
        "gelu_tanh": lambda value: value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) / 2,
        "swish": lambda value: value / (1 + math.exp(-value)),
    }[kind]
    return np.array([function(value) for value in x.tolist()])


def heads_of(x: Vector, heads: int) -> list[list[float]]:
    """Return the features of each head: head h owns features hD … (h+1)D − 1."""
    width = len(x) // heads
    return [x[h * width : (h + 1) * width].tolist() for h in range(heads)]


# --- positions ---------------------------------------------------------------------------------------------------


def sinusoid(position: int, width: int) -> Vector:
    """Return PE(p, 2i) = sin(p / 10000^(2i/M)), PE(p, 2i+1) = cos(same)."""
    vector = np.zeros(width)
    for i in range(width // 2):
        angle = position / 10000 ** (2 * i / width)
        vector[2 * i], vector[2 * i + 1] = math.sin(angle), math.cos(angle)
    return vector


def position_vector(w: Weights, config: ModelConfig, position: int) -> Vector:
    if config.positions == "learned":
        return w["table"][position]
    # The model keeps its table in float32 even when the rest is float64.
    return sinusoid(position, config.width).astype(np.float32).astype(np.float64)


def placed(w: Weights, config: ModelConfig, position: int, x: Vector) -> Vector:
    """Return x plus the position vector and the output of the Positional MLP."""
    if config.positions == "none":
        return x
    own = position_vector(w, config, position)
    x = x + own
    if not config.positional_mlp:
        return x
    correlations = [0.0] * config.positional_mlp
    for back in range(1, config.positional_mlp + 1):
        if position - back >= 0:
            correlations[back - 1] = dot(own, position_vector(w, config, position - back)) / config.width
    return x + w.linear("out", activated(w.linear("into", np.array(correlations)), "relu"))


def relative_of(w: Weights, config: ModelConfig, length: int) -> Relative:
    """Return the term of self-attention scores; ``length`` is the stack's maximum."""
    if config.relative in ("none", "matrix"):
        return lambda h, i, j: 0.0
    numbers = w["relative.weights"]
    if not config.relative_self:
        with_itself = relative_of(w, replace(config, relative_self=True), length)
        return lambda h, i, j: 0.0 if i == j else with_itself(h, i, j)
    if config.relative == "table":
        window = config.relative_window
        return lambda h, i, j: numbers[h][max(-window, min(window, j - i)) + window]

    def angle(h: int, i: int, j: int) -> float:
        turn = math.pi * (i - j) / length
        return numbers[h][0] * math.sin(turn) + numbers[h][1] * math.cos(turn)

    return angle


def vectors_of(w: Weights, config: ModelConfig) -> Vectors:
    """Return what is added to the key or the value of a pair of positions: a vector of their clipped distance."""

    def vector(part: str, h: int, i: int, j: int) -> Vector:
        if config.relative != "matrix" or (i == j and not config.relative_self):
            return np.zeros(1)
        window = config.relative_window
        return w[f"relative.{part}"][h][max(-window, min(window, j - i)) + window]

    return vector


# --- softmax attentions ------------------------------------------------------------------------------------------


def score(kind: object, w: Weights, h: int, pair: tuple[Floats, Floats]) -> float:
    """Return the score of a query and a key of head h; everything but dot and additive is scaled_dot."""
    query, key = pair
    if kind == "additive":
        vector = w["scores.vectors"][h]
        return sum(vector[d] * math.tanh(query[d] + key[d]) for d in range(len(query)))
    return dot(query, key) if kind == "dot" else dot(query, key) / math.sqrt(len(query))


def qkv_of(w: Weights, config: ModelConfig, xs: Rows) -> tuple[list[Any], list[Any], list[Any]]:
    """Return queries, keys and values, each [position][head][feature]."""
    projected = [np.split(w.projected("qkv", x), 3) for x in xs]
    q, k, v = ([heads_of(x, config.heads) for x in part] for part in zip(*projected, strict=True))
    return q, k, v


def softmax_attention(
    w: Weights, config: ModelConfig, kind: object, xs: Rows, seen: Any, relative: tuple[Relative, Vectors]
) -> Rows:
    """Return W_o of every query's mean over the keys it sees; ``seen(h, i, j)`` says which those are."""
    term, vector = relative
    q, k, v = qkv_of(w, config, xs)
    results = []
    for i in range(len(xs)):
        parts: list[float] = []
        for h in range(config.heads):
            js = [j for j in range(len(xs)) if seen(h, i, j)]
            keys = [(k[j][h] + vector("keys", h, i, j)).tolist() for j in js]
            values = [(v[j][h] + vector("values", h, i, j)).tolist() for j in js]
            alphas = softmax(
                [score(kind, w, h, (q[i][h], key)) + term(h, i, j) for j, key in zip(js, keys, strict=True)]
            )
            parts += mixed(alphas, values)
        results.append(w.projected("out", np.array(parts)))
    return results


def slow_attention(w: Weights, config: ModelConfig, embedded: Rows, xs: Rows, seen: Any, relative: Relative) -> Rows:
    """Return Slow Multi-Head Attention: queries and gate from x̂, keys and values from the layer below."""
    heads, width = config.heads, config.width // config.heads
    queries = [heads_of(w.linear("q", x), heads) for x in embedded]
    pairs = [np.split(w.linear("kv", x), 2) for x in xs]
    keys, values = ([heads_of(x, heads) for x in part] for part in zip(*pairs, strict=True))
    results = []
    for i in range(len(xs)):
        parts: list[float] = []
        for h in range(heads):
            a = (w["turn_queries"][h] @ queries[i][h]).tolist()
            js = [j for j in range(len(xs)) if seen(h, i, j)]
            scores = []
            for j in js:
                c = (w["turn_keys"][h] @ keys[j][h]).tolist()
                total = sum(max(a[d] + c[d], 0.0) ** 2 for d in range(width))
                scores.append(math.sqrt(total + 1e-6) / math.sqrt(width) + relative(h, i, j))
            parts += mixed(softmax(scores), [values[j][h] for j in js])
        results.append(w.linear("out", np.array(parts) * sigmoid(w.linear("gate", embedded[i]))))
    return results


def shortened(w: Weights, config: ModelConfig, rows: Rows, name: str) -> Rows:
    """Return keys or values along the source: ``linformer`` multiplies, ``compressed`` convolves."""
    if config.encoder_attention == "linformer":
        matrix = w[f"shorten_{name}"]
        return [sum(matrix[row][j] * x for j, x in enumerate(rows)) for row in range(config.linformer_rows)]
    kernel, bias, ratio = w[f"compress_{name}.weight"], w[f"compress_{name}.bias"], config.compression
    results = []
    for first in range(0, len(rows), ratio):
        window = rows[first : first + ratio]
        results.append(bias + sum(kernel[:, :, tap] @ x for tap, x in enumerate(window)))
    return results


def shortened_attention(w: Weights, config: ModelConfig, xs: Rows) -> Rows:
    queries, keys, values = zip(*(np.split(w.projected("qkv", x), 3) for x in xs), strict=True)
    k = [heads_of(x, config.heads) for x in shortened(w, config, list(keys), "keys")]
    v = [heads_of(x, config.heads) for x in shortened(w, config, list(values), "values")]
    results = []
    for query in queries:
        parts: list[float] = []
        for h, q in enumerate(heads_of(query, config.heads)):
            alphas = softmax([score("scaled_dot", w, h, (q, key[h])) for key in k])
            parts += mixed(alphas, [value[h] for value in v])
        results.append(w.linear("out", np.array(parts)))
    return results


def synthesizer(w: Weights, config: ModelConfig, xs: Rows, seen: Any) -> Rows:
    values = [heads_of(w.linear("values", x), config.heads) for x in xs]
    results = []
    for i, x in enumerate(xs):
        parts: list[float] = []
        for h in range(config.heads):
            js = [j for j in range(len(xs)) if seen(h, i, j)]
            if config.synthesizer == "random":
                scores = [w["scores"][h][i][j] for j in js]
            else:
                inner = heads_of(activated(w.linear("into", x), "relu"), config.heads)[h]
                scores = [dot(w["scores"][h][j], inner) + w["bias"][h][j] for j in js]
            parts += mixed(softmax(scores), [values[j][h] for j in js])
        results.append(w.linear("out", np.array(parts)))
    return results


# --- linear attentions -------------------------------------------------------------------------------------------


def phi(w: Weights, config: ModelConfig, x: Floats, h: int) -> list[float]:
    """Return the features of a query or a key; those of ``softmax`` are in ``linear_attention``."""
    if config.features == "elu":
        return [(value if value > 0 else math.exp(value) - 1) + 1 for value in x]
    projection = w["features.projection"][h].tolist()
    count = len(projection)
    if config.features == "random":
        length = math.sqrt(dot(x, x))
        angles = [dot(row, [value / length for value in x]) for row in projection]
        return [f(angle) / math.sqrt(count) for f in (math.sin, math.cos) for angle in angles]
    x = [value / len(x) ** 0.25 for value in x]
    return [math.exp(dot(row, x) - dot(x, x) / 2) / math.sqrt(count) for row in projection]


def quotient(config: ModelConfig, sums: Floats, normaliser: float) -> list[float]:
    denominator = normaliser + 1e-6
    if config.features == "random":
        denominator = max(denominator, 1e-3)
    return [value / denominator for value in sums]


def linear_attention(w: Weights, config: ModelConfig, xs: Rows, seen: Any) -> Rows:
    """Return φ(q)(Σ_j φ(k_j)v_jᵀ) / (φ(q)·Σ_j φ(k_j) + 1e-6) over the keys a query sees."""
    q, k, v = qkv_of(w, config, xs)
    n, results = len(xs), [list[float]() for _ in xs]
    for h in range(config.heads):
        if config.features == "softmax":
            queries = [softmax(q[i][h]) for i in range(n)]
            columns = [softmax([k[j][h][d] for j in range(n)]) for d in range(len(k[0][h]))]
            keys = [[column[j] for column in columns] for j in range(n)]
        else:
            queries, keys = ([phi(w, config, part[i][h], h) for i in range(n)] for part in (q, k))
        for i in range(n):
            js = [j for j in range(n) if seen(h, i, j)]
            kernel = [dot(queries[i], keys[j]) for j in js]
            results[i] += quotient(config, mixed(kernel, [v[j][h] for j in js]), sum(kernel))
    return [w.projected("out", np.array(result)) for result in results]


def recurrent_attention(w: Weights, config: ModelConfig, xs: Rows) -> Rows:
    """Return the decoder's linear attention as its recurrence: S += φ(k)vᵀ, z += φ(k), then φ(q)S / (φ(q)·z + 1e-6)."""
    q, k, v = qkv_of(w, config, xs)
    results = [list[float]() for _ in xs]
    for h in range(config.heads):
        n_features, width = len(phi(w, config, k[0][h], h)), len(v[0][h])
        sums = [[0.0] * width for _ in range(n_features)]
        normaliser = [0.0] * n_features
        for t in range(len(xs)):
            for f, feature in enumerate(phi(w, config, k[t][h], h)):
                normaliser[f] += feature
                for d in range(width):
                    sums[f][d] += feature * v[t][h][d]
            query = phi(w, config, q[t][h], h)
            results[t] += quotient(config, mixed(query, sums), dot(query, normaliser))
    return [w.projected("out", np.array(result)) for result in results]


@dataclass
class Trace:
    """Intermediate results of an oracle: self-attentions and outputs of a stack, and more for the decoder."""

    attended: list[Rows] = field(default_factory=list)  # per layer
    outputs: list[Rows] = field(default_factory=list)  # per layer; in the encoder through the final norm if it is pre
    crossed: list[Rows] = field(default_factory=list)  # per layer, before the hybrid gate
    scores: list[Vector] = field(default_factory=list)  # per target position, [V]
    places: list[int] = field(default_factory=list)  # the target positions where layers run
