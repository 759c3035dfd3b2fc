"""Whole models, assembled from the loops in ``formulas``: both stacks, cross-attention, gate, copying, heads."""

import math
from dataclasses import replace

import numpy as np
from torch import nn

from fatdeploy.export.reference.config import ModelConfig
from tests.support.oracles.following import Followed
from tests.support.oracles.formulas import (
    Rows,
    Trace,
    Vector,
    Weights,
    activated,
    heads_of,
    linear_attention,
    mixed,
    placed,
    recurrent_attention,
    relative_of,
    score,
    shortened_attention,
    sigmoid,
    slow_attention,
    softmax,
    softmax_attention,
    synthesizer,
    vectors_of,
)


class Oracle:
    """A model's formulas with its weights, one unpadded sentence at a time."""

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        self.config = config
        # The decoder's own number of heads, for the functions that know one number.
        self.above = replace(config, encoder_attention="dot", heads=config.decoder_heads or config.heads)
        arrays = {name: tensor.numpy(force=True) for name, tensor in model.state_dict().items()}
        self.weights = Weights(arrays, config)

    def encode(self, source: list[int]) -> Trace:
        """Return the encoder's trace; decoder layers project their keys from its outputs."""
        w, trace = self.weights.below("encoder"), Trace()
        xs = [self._embedded("source", position, token) for position, token in enumerate(source)]
        embedded = [w.norm("query_norm", x) for x in xs] if "query_norm.weight" in w else xs
        assert ("query_norm.weight" in w) == (self.config.encoder_attention == "slow" and self.config.norm == "pre")
        for layer in range(self.config.encoder_layers):
            weights = w.below(f"layers.{layer}")
            attended = self._encoder_attention(weights, embedded, self._enter(weights, "residual.norm", xs))
            xs = self._feed_forward(weights, self._leave(weights, "residual.norm", xs, attended, attention=True))
            trace.attended.append(attended)
            trace.outputs.append(self._final(w, xs))
        return trace

    def decode(self, source: list[int], encoded: Trace, tokens: list[int]) -> Trace:
        """Return the decoder's trace for a whole target, with the scores of the vocabulary."""
        w, trace, gate = self.weights.below("decoder"), Trace(), self.gate(source, tokens)
        everything = [self._embedded("target", t, token, gate[t]) for t, token in enumerate(tokens)]
        skips = self.config.hybrid_skips == "layer"
        # What is skipped is not there for the layers: neither for the position itself nor for those after it.
        trace.places = places = [t for t in range(len(tokens)) if gate[t] or not skips]
        xs, alphas = [everything[t] for t in places], dict[int, list[list[float]]]()
        for layer in range(self.config.decoder_layers):
            weights, memory = w.below(f"layers.{layer}"), self.memory(encoded, layer)
            if self.config.decoder_attention != "none":
                attended = self._decoder_attention(weights, self._enter(weights, "self_residual.norm", xs))
                xs = self._leave(weights, "self_residual.norm", xs, attended, attention=True)
                trace.attended.append(attended)
            inner = queries = self._enter(weights, "cross_residual.norm", xs)
            if self.config.decoder_attention == "none":
                context = sum(encoded.outputs[-1]) / len(encoded.outputs[-1])
                queries = [np.tanh(weights.linear("previous.start", context)), *inner[:-1]]
            rows = list(zip(places, queries, inner, strict=True))
            crossed, alphas = self._cross_attention(weights.below("cross"), source, memory, rows)
            gated = [y if gate[t] else np.zeros_like(y) for t, y in zip(places, crossed, strict=True)]
            left = self._leave(weights, "cross_residual.norm", xs, gated, attention=True)
            xs = self._feed_forward(weights, left)
            trace.crossed.append(crossed)
        for t, x in zip(places, xs, strict=True):
            everything[t] = x
        nothing = [[0.0] * len(source)]
        for t, h in enumerate(self._final(w, everything)):
            trace.scores.append(self._scores(h, source, alphas.get(t, nothing), open_=gate[t]))
        return trace

    def memory(self, encoded: Trace, layer: int) -> Rows:
        """Return the encoder output that decoder layer ``layer`` reads."""
        if self.config.cross_wiring == "mixed":
            shares = softmax(self.weights["decoder.mixture"][layer].tolist())
            return [
                sum(share * rows[j] for share, rows in zip(shares, encoded.outputs, strict=True))
                for j in range(len(encoded.outputs[0]))
            ]
        return encoded.outputs[layer if self.config.cross_wiring == "matched" else -1]

    def memory_pairs(self, source: list[int], encoded: Trace, layer: int) -> tuple[Rows, Rows]:
        """Return the projected keys and values [position][M] of a decoder layer."""
        w = self.weights.below(f"decoder.layers.{layer}.cross")
        return self._pairs(w, source, self.memory(encoded, layer))

    def _pairs(self, w: Weights, source: list[int], memory: Rows) -> tuple[Rows, Rows]:
        if self.config.fc_keys == "embedded":
            xs = [self._embedded("source", position, token) for position, token in enumerate(source)]
            xs = [w.norm("key_norm", x) for x in xs] if self.config.norm == "pre" else xs
            return [w.linear("keys", x) for x in xs], [w.linear("values", m) for m in memory]
        keys, values = zip(*(np.split(w.projected("kv", m), 2) for m in memory), strict=True)
        return list(keys), list(values)

    def length_logits(self, encoded: Trace) -> Vector:
        outputs = encoded.outputs[-1]
        return self.weights.linear("length", sum(outputs) / len(outputs))

    def gate(self, source: list[int], tokens: list[int]) -> list[bool]:
        """Return which tokens carry source information; all of them without the hybrid forward pass."""
        if not self.config.hybrid:
            return [True] * len(tokens)
        keep, config = self.weights["keep"], self.config
        return [
            token != config.pad_id and bool(token == config.bos_id or keep[token] or token in source)
            for token in tokens
        ]

    def _embedded(self, side: str, position: int, token: int, open_: bool = True) -> Vector:
        x = self.weights[f"{side}_embedding.weight"][token]
        x = x * math.sqrt(self.config.width) if self.config.scale_embeddings else x
        x = x if open_ else np.zeros_like(x)
        norm = getattr(self.config, f"{side}_embedding_norm")
        x = self.weights.norm(f"{side}_norm", x) if norm == "before" else x
        x = placed(self.weights.below(f"{side}_positions"), self.config, position, x)
        return self.weights.norm(f"{side}_norm", x) if norm == "after" else x

    def _enter(self, w: Weights, norm: str, xs: Rows) -> Rows:
        """Return the input of a sub-layer f in x + f(LN(x)) or LN(x + f(x))."""
        return [w.norm(norm, x) for x in xs] if self.config.norm == "pre" else xs

    def _leave(self, w: Weights, norm: str, xs: Rows, ys: Rows, *, attention: bool = False) -> Rows:
        added = [x + y for x, y in zip(xs, ys, strict=True)]
        if attention and self.config.attention_relu:
            added = [activated(x, "relu") for x in added]
        return added if self.config.norm == "pre" else [w.norm(norm, x) for x in added]

    def _feed_forward(self, w: Weights, xs: Rows) -> Rows:
        hs = self._enter(w, "ffn.residual.norm", xs)
        ys = [w.projected("ffn.out", self._inner(w, h) + (h if self.config.ffn_skip else 0)) for h in hs]
        return self._leave(w, "ffn.residual.norm", xs, ys)

    def _inner(self, w: Weights, x: Vector) -> Vector:
        inner = w.projected("ffn.into", x)
        if not self.config.gated:
            return activated(inner, self.config.activation)
        gate, up = np.split(inner, 2)
        return activated(gate, self.config.activation) * up

    def _final(self, w: Weights, xs: Rows) -> Rows:
        assert ("norm.weight" in w) == (self.config.norm == "pre")
        return [w.norm("norm", x) for x in xs] if self.config.norm == "pre" else xs

    def _encoder_attention(self, layer: Weights, embedded: Rows, xs: Rows) -> Rows:
        config, kind = self.config, self.config.encoder_attention
        place = layer if config.relative_each_layer else self.weights.below("encoder")
        relative = relative_of(place, config, config.max_source)
        w = layer.below("attention")
        if kind == "slow":
            return slow_attention(w, config, embedded, xs, self._sees_source, relative)
        if kind in ("linformer", "compressed"):
            return shortened_attention(w, config, xs)
        if kind == "linear":
            return linear_attention(w, config, xs, self._sees_source)
        if kind == "synthesizer":
            return synthesizer(w, config, xs, self._sees_source)
        return softmax_attention(w, config, kind, xs, self._sees_source, (relative, vectors_of(place, config)))

    def _sees_source(self, h: int, i: int, j: int) -> bool:
        config, kind = self.config, self.config.encoder_attention
        if (config.encoder_direction == "left_to_right" and j > i) or (
            config.encoder_direction == "right_to_left" and j < i
        ):
            return False
        mask = kind[h] if isinstance(kind, tuple) else kind
        if mask == "local":
            return abs(i - j) <= config.window
        if mask == "strided":
            return abs(i - j) % config.stride == 0
        if mask == "global_tokens":
            return i < config.n_global_tokens or j < config.n_global_tokens or i == j
        return True

    def _decoder_attention(self, layer: Weights, xs: Rows) -> Rows:
        config, kind, w = self.above, self.config.decoder_attention, layer.below("attention")
        if kind == "linear":
            return recurrent_attention(w, config, xs)

        def sees(h: int, i: int, j: int) -> bool:
            return kind == "full" or (j <= i and (kind != "local" or i - j <= config.window))

        place = layer if config.relative_each_layer else self.weights.below("decoder")
        relative = relative_of(place, config, config.max_target), vectors_of(place, config)
        return softmax_attention(w, config, kind, xs, sees, relative)

    def _cross_attention(
        self, w: Weights, source: list[int], memory: Rows, rows: list[tuple[int, Vector, Vector]]
    ) -> tuple[Rows, dict[int, list[list[float]]]]:
        """Return the sub-layer's outputs, and its weights [head][source position] by target position.

        Each row is a target position, what its query is made of, and what the sub-layer reads.
        """
        config = self.above
        kind = config.cross_attention if config.fc_scale else "dot"
        k, v = ([heads_of(x, config.heads) for x in part] for part in self._pairs(w, source, memory))
        results, weights = [], {}
        followed = Followed(w, config, len(memory))
        for t, asking, x in rows:
            queries = heads_of(w.projected("q", asking), config.heads)
            columns = source if config.fc_table == "vocabulary" else list(range(len(source)))
            alphas = [
                followed.weights(h, queries[h], [key[h] for key in k])
                if kind in ("location", "monotonic")
                else self._cross_weights(w, (t, columns), h, [score(kind, w, h, (queries[h], key[h])) for key in k])
                for h in range(config.heads)
            ]
            context = np.concatenate([mixed(alphas[h], [value[h] for value in v]) for h in range(config.heads)])
            if config.cross_attention == "fast_fc":
                results.append(w.unbiased("out", sigmoid(w.linear("gate", x)) * context))
            else:
                results.append(w.projected("out", context))
            weights[t] = alphas
        return results, weights

    def _cross_weights(self, w: Weights, place: tuple[int, list[int]], h: int, products: list[float]) -> list[float]:
        if self.config.cross_attention != "fast_fc":
            return softmax(products)
        (t, columns), u = place, w["position_scores"]
        scores = [s + u[t][column] + w["head_bias"][h] for column, s in zip(columns, products, strict=True)]
        if self.config.fc_softmax == "softmax":
            return softmax(scores)
        total = sum(math.exp(s) for s in scores) + (1 if self.config.fc_softmax == "tanh_bounded" else 0)
        return [math.tanh(s) / total for s in scores]

    def _scores(self, h: Vector, source: list[int], alphas: list[list[float]], *, open_: bool) -> Vector:
        top, config = h, self.config
        if config.head == "mlp":
            top = self.weights.linear("head.out", activated(self.weights.linear("head.into", h), config.activation))
        if config.head == "dense_norm":
            top = self.weights.norm("head.norm", activated(self.weights.linear("head.into", h), config.activation))
        logits = (self.weights["output.weight"] @ top).tolist()
        if config.output_bias:
            logits = [x + bias for x, bias in zip(logits, self.weights["output_bias"], strict=True)]
        if not config.copy:
            return np.array(logits)
        generated = float(sigmoid(self.weights.unbiased("copy", h))[0]) if open_ else 1.0
        probabilities = [generated * p for p in softmax(logits)]
        for j, token in enumerate(source):
            mean = sum(alphas[head][j] for head in range(len(alphas))) / len(alphas)
            probabilities[token] += (1 - generated) * mean
        return np.array([math.log(p + 1e-9) for p in probabilities])
