"""Recurrent models from their formulas: one unpadded sentence, one vector at a time."""

import numpy as np

from tests.support.oracles.formulas import Rows, Vector, Weights, activated, sigmoid, softmax
from tests.support.oracles.models import Oracle

States = tuple[Vector, ...]


def lstm(w: Weights, way: str, x: Vector, past: States) -> States:
    """Return h and c after x: i, f, o = σ(…), g = tanh(…), c = f c + i g, h = o tanh(c)."""
    hidden, cell = past
    i, f, g, o = np.split(_sum(w, way, "ih", x) + _sum(w, way, "hh", hidden), 4)
    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(cell), cell


def gru(w: Weights, way: str, x: Vector, past: States) -> States:
    """Return h after x: r, z = σ(…), n = tanh(W x + r (U h)), h = (1 - z) n + z h."""
    (hidden,) = past
    (xr, xz, xn), (hr, hz, hn) = (np.split(_sum(w, way, *part), 3) for part in (("ih", x), ("hh", hidden)))
    z = sigmoid(xz + hz)
    return ((1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn) + z * hidden,)


def _sum(w: Weights, way: str, part: str, x: Vector) -> Vector:
    return w[f"weight_{part}_{way}"] @ x + w[f"bias_{part}_{way}"]


CELLS = {"lstm": (lstm, 2), "gru": (gru, 1)}


def read(w: Weights, kind: str, way: str, xs: Rows, start: States | None = None) -> Rows:
    """Return the h of a cell after each vector."""
    cell, n_states = CELLS[kind]
    width = w[f"weight_hh_{way}"].shape[1]
    state = tuple(np.zeros(width) for _ in range(n_states)) if start is None else start
    outputs = []
    for x in xs:
        state = cell(w, way, x, state)
        outputs.append(state[0])
    return outputs


class RecurrentOracle(Oracle):
    """A model with a recurrent encoder, a recurrent decoder, or both."""

    def encoded(self, source: list[int]) -> Rows:
        """Return the encoder's outputs."""
        if self.config.encoder_attention not in CELLS:
            return self.encode(source).outputs[-1]
        kind, direction = str(self.config.encoder_attention), self.config.encoder_direction
        xs = [self._embedded("source", position, token) for position, token in enumerate(source)]
        for layer in range(self.config.encoder_layers):
            w = self.weights.below(f"encoder.layers.{layer}.cell")
            if direction == "both":
                forth, back = read(w, kind, "l0", xs), read(w, kind, "l0_reverse", xs[::-1])[::-1]
                xs = [np.concatenate(pair) for pair in zip(forth, back, strict=True)]
            else:
                turn = -1 if direction == "right_to_left" else 1
                xs = read(w, kind, "l0", xs[::turn])[::turn]
        return xs

    def context(self, encoded: Rows) -> Vector:
        """Return the vector that the decoder starts from."""
        if self.config.encoder_attention not in CELLS:
            return sum(encoded) / len(encoded)
        half = self.config.width // 2
        both = np.concatenate([encoded[-1][:half], encoded[0][half:]])
        ends = {"both": both, "left_to_right": encoded[-1], "right_to_left": encoded[0]}
        return ends[self.config.encoder_direction]

    def scores(self, source: list[int], tokens: list[int]) -> Rows:
        """Return the scores of the vocabulary after each token."""
        encoded, w = self.encoded(source), self.weights.below("decoder")
        context = self.context(encoded)
        xs = [self._embedded("target", position, token) for position, token in enumerate(tokens)]
        for layer in range(self.config.decoder_layers):
            below = w.below(f"layers.{layer}")
            start = np.tanh(below.linear("start", context))
            if self.config.decoder_attention == "fully_connected":
                xs = self.connected(below.below("cell"), xs, start, context)
            else:
                kind = self.config.decoder_attention
                xs = read(below.below("cell"), kind, "l0", xs, tuple(np.split(start, CELLS[kind][1])))
        if self.config.cross_attention == "none":
            return [self._scores(h, source, [], open_=True) for h in xs]
        rows = [(t, x, x) for t, x in enumerate(xs)]
        crossed, alphas = self._cross_attention(w.below("cross"), source, encoded, rows)
        mixed = [np.tanh(w.linear("mix", np.concatenate(pair))) for pair in zip(crossed, xs, strict=True)]
        return [self._scores(h, source, alphas[t], open_=True) for t, h in enumerate(mixed)]

    def connected(self, w: Weights, xs: Rows, hidden: Vector, context: Vector) -> Rows:
        """Return AT's h_t = f(L(x_t ⊙ α_t)), α_t = softmax(V relu(H h_{t-1} + W h̄_t + U x_t))."""
        outputs = []
        for x in xs:
            mix = np.tanh(w.unbiased("mix", hidden) + w.linear("context", context))
            inner = w.unbiased("from_state", hidden) + w.unbiased("from_mix", mix) + w.linear("from_input", x)
            weights = softmax(w.linear("weigh", np.maximum(inner, 0)).tolist())
            hidden = activated(w.linear("out", x * weights), self.config.activation)
            outputs.append(hidden)
        return outputs
