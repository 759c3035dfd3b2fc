"""The two dialects of one graph: what the reference's seams become for onnxruntime, and for every other ONNX tool."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.attention import FeatureMap, LayerState, Scores, Visible, merge_heads, split_heads
from fatdeploy.export.reference.seams import Added, Outputs, Position, Seams

# Without this the branches of a condition, which torch traces another way, may not hold such an op.
symbolic = torch._dynamo.dont_skip_tracing(torch.onnx.ops.symbolic)

OPSET = 24
# Numbers of one source that a slow attention compares at once, [I, J, heads, D], beyond one head: three arrays of 4 MB.
# onnxruntime keeps what concurrent calls have needed at the same time, so more would be paid for by every thread.
PAIRS = 2**20
# Added to scores of hidden keys: far below any score, and finite, because an infinite one minus itself is NaN.
HIDDEN = -1e30


def emitted(op: str, inputs: tuple[Tensor | None, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    """Return the output of one ONNX op, written into the graph as it stands."""
    return symbolic(op, inputs, attributes, dtype=dtype, shape=shape, version=OPSET)


def number(value: int) -> Tensor:
    """Return a tensor with one axis and one whole number; ``torch.tensor`` may not stand in a branch."""
    return torch.full((1,), value, dtype=torch.int64)


def sizes(*values: int) -> Tensor:
    """Return the sizes that a Reshape is given: 0 keeps an axis, -1 is what is left."""
    return torch.cat([number(value) for value in values])


def shape_of(x: Tensor, start: int, end: int) -> Tensor:
    """Return some axes' sizes as a tensor."""
    return emitted("Shape", (x,), torch.int64, (end - start,), start=start, end=end)


class GraphSeams(Seams):
    """What both dialects say alike: caches of full capacity, shapes that come from tensors and need no proof."""

    folds = True

    def n_keys(self, position: Position, steps: int, capacity: int) -> int:  # noqa: ARG002
        return capacity

    def slow_scores(self, queries: Tensor, keys: Tensor, longest: int) -> Tensor:
        # Features stay last: a pair is one run of heads and features, and ops are few. onnxruntime takes a fourth of
        # the time of planes of features at S = 8 and 0.7 of it at S = 512.
        heads, width = queries.shape[-2:]
        at_once = max(1, PAIRS // (width * longest**2))
        if at_once >= heads:
            total = _positive_squares(queries, keys)
        else:
            parts = zip(torch.split(queries, at_once, 2), torch.split(keys, at_once, 2), strict=True)
            total = torch.cat([_positive_squares(q, k) for q, k in parts], -1)
        return (total.permute(0, 3, 1, 2) + 1e-6).sqrt() / math.sqrt(width)

    def weights(self, visible: Visible, scores: Tensor) -> Tensor:
        # What is hidden is the same in all layers, and an addition costs half of a choice.
        return (scores + _hidden(visible, scores)).softmax(-1)

    def attend_cached(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        q, k, v = (split_heads(part, scores.heads) for part in qkv.chunk(3, -1))
        keys, values = (_written(cache, new, position) for cache, new in zip(state, (k, v), strict=True))
        # Positions that are not written yet are hidden like all of the future.
        return merge_heads(visible.weights(scores(q, keys)) @ values), (keys, values)

    def by_source(self, x: Tensor, batch: Tensor) -> Tensor:
        front, back = shape_of(batch, 0, 1), shape_of(x, 1, x.ndim)
        shape = (batch.shape[0], x.shape[0] // batch.shape[0], *x.shape[1:])
        return emitted("Reshape", (x, torch.cat([front, number(-1), back])), x.dtype, shape)

    def by_row(self, x: Tensor, like: Tensor) -> Tensor:
        return emitted("Reshape", (x, shape_of(like, 0, like.ndim)), x.dtype, like.shape)

    def weights_by_row(self, weights: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
        heads = weights.shape[1]
        # The sizes of tensors from outside: a branch must have those of the branch beside it, symbol for symbol.
        shape = (rows.shape[0], heads, rows.shape[1], valid.shape[1])
        sizes = torch.cat([shape_of(rows, 0, 1), number(heads), shape_of(rows, 1, 2), shape_of(valid, 1, 2)])
        return emitted("Reshape", (weights.transpose(1, 2), sizes), weights.dtype, shape)

    def in_source(self, tokens: Tensor, source: Tensor, valid: Tensor, like: Tensor) -> Tensor:
        batch, each = source.shape[0], tokens.shape[0] * tokens.shape[1] // source.shape[0]
        together = torch.cat([shape_of(source, 0, 1), sizes(-1, 1)])
        grouped = emitted("Reshape", (tokens, together), tokens.dtype, (batch, each, 1))
        equal = grouped == source.masked_fill(~valid, -1)[:, None]  # [B, n·t, S]
        return self.by_row(equal.to(like.dtype).amax(-1), like)

    def copied(self, probability: Tensor, weights: Tensor, source: Tensor) -> Tensor:
        # A scatter that adds is refused by TensorRT, and would need the sources repeated a row.
        places = (source[..., None] == torch.arange(probability.shape[-1])).to(weights.dtype)  # [B, S, V]
        grouped = self.by_source(weights, source) @ places[:, None]
        return probability + self.by_row(grouped, probability)


class OrtSeams(GraphSeams):
    """onnxruntime: one contributed op an attention, caches in place, and no branch is computed that is not taken."""

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        if scores.vectors is not None:
            return super().attend(qkv, scores, visible, dropout)
        q, k, v = qkv.chunk(3, -1)
        return _multi_head((q, k, v, None, None, _bias(visible, q)), scores, q.shape)

    def attend_cached(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        if scores.vectors is not None or not isinstance(position, Tensor):
            return super().attend_cached(qkv, scores, visible, state, position)
        q, k, v = qkv.chunk(3, -1)
        bias = None
        if visible.relative is not None or not visible.causal:
            # The op wants as many columns as there are keys so far: a length that no shape in the graph has.
            columns = (position + qkv.shape[1]).reshape(1)
            bias = _bias(visible, q)
            bias = emitted("Slice", (bias, number(0), columns, number(3)), bias.dtype, bias.shape)
        mixed, *caches = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::MultiHeadAttention",
            (q, k, v, None, None, bias, *state, position.reshape(1).to(torch.int32)),
            {"num_heads": scores.heads, "scale": scores.scale, "unidirectional": 1},
            dtypes=(q.dtype,) * 3,
            shapes=(q.shape, *(cache.shape for cache in state)),
            version=1,
        )
        return mixed, tuple(caches)

    def attend_recurrent(
        self, qkv: Tensor, features: FeatureMap, heads: int, state: LayerState
    ) -> tuple[Tensor, LayerState]:
        if not features.of_each_number or not state:
            return super().attend_recurrent(qkv, features, heads, state)
        rows, steps, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        both, v = torch.split(qkv, [2 * width, width], -1)
        q, k = features.queries(both).chunk(2, -1)
        sums, next_sums = _linear((q, k, v, state[0]), heads)
        # The normaliser is the same recurrence over values of one 1 a head.
        together = torch.cat([shape_of(qkv, 0, 2), number(heads)])
        ones = emitted("Expand", (qkv.new_ones(1), together), qkv.dtype, (rows, steps, heads))
        normaliser, next_normaliser = _linear((q, k, ones, state[1][..., None]), heads)
        by_head = emitted("Reshape", (sums, sizes(0, 0, heads, -1)), sums.dtype, (rows, steps, heads, width // heads))
        mixed = features.quotient(by_head, normaliser[..., None])
        merged = emitted("Reshape", (mixed, sizes(0, 0, width)), mixed.dtype, (rows, steps, width))
        return merged, (next_sums, next_normaliser.squeeze(-1))

    def attend_memory(
        self, q: Tensor, memory: tuple[Tensor, Tensor], scores: Scores, valid: Tensor, added: Added | None
    ) -> Tensor | None:
        if scores.vectors is not None:
            return None
        together = torch.cat([shape_of(valid, 0, 1), number(-1), shape_of(q, 2, 3)])
        shape = (valid.shape[0], q.shape[0] * q.shape[1] // valid.shape[0], q.shape[2])
        folded = emitted("Reshape", (q, together), q.dtype, shape)
        bias = None if added is None else _added_by_source(added, q, valid)
        attended = _multi_head((folded, *memory, None, valid.to(torch.int32), bias), scores, shape)
        return self.by_row(attended, q)

    def unless(self, idle: Tensor, act: Callable[[], Outputs], blank: Callable[[], Outputs]) -> Outputs | None:
        outputs: Outputs = torch.cond(idle, blank, act)
        return outputs

    def project(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        # It reads the tied embedding as it is stored, where a folded transpose would be a second copy of it, and writes
        # logits where they are wanted: a Gemm takes two axes alone, and a Reshape of its result is another copy.
        rows, steps, _ = hidden.shape
        return symbolic(
            "com.microsoft::FusedMatMul",
            (hidden, matrix),
            {"transB": 1},
            dtype=hidden.dtype,
            shape=(rows, steps, matrix.shape[0]),
            version=1,
        )


class StandardSeams(GraphSeams):
    """Ops that every ONNX tool has: no branch, no shape that depends on a value."""

    def unless(self, idle: Tensor, act: Callable[[], Outputs], blank: Callable[[], Outputs]) -> Outputs | None:  # noqa: ARG002
        return act()


def _written(cache: Tensor, new: Tensor, position: Position) -> Tensor:
    if not isinstance(position, Tensor):
        raise TypeError("in a graph the position is a tensor")
    rows = position.reshape(1).expand(new.shape[0])
    return emitted("TensorScatter", (cache, new, rows), cache.dtype, cache.shape, axis=2)


def _positive_squares(queries: Tensor, keys: Tensor) -> Tensor:
    """Return Σ_d relu(a_id + c_jd)² as [B, I, J, H] from [B, I, H, D] and [B, J, H, D]."""
    positive = (queries[:, :, None] + keys[:, None]).relu()
    return (positive * positive).sum(-1)


def _hidden(visible: Visible, like: Tensor) -> Tensor:
    """Return what to add to the scores, [B or 1, H or 1, I or 1, J]."""
    zero = torch.zeros((), dtype=like.dtype)
    shown = zero if visible.relative is None else visible.relative
    return torch.where(visible.allowed, shown, torch.full((), HIDDEN, dtype=like.dtype))


def _bias(visible: Visible, like: Tensor) -> Tensor:
    """Return what to add to the scores, [B or 1, H or 1, I, J]."""
    bias = _hidden(visible, like)
    return bias.expand(*bias.shape[:2], like.shape[1], bias.shape[3])


def _linear(inputs: tuple[Tensor, ...], heads: int) -> tuple[Tensor, Tensor]:
    """Return q_t·S_t [R, t, H·D] of S_t = S_{t-1} + k_t v_t, from packed q, k, v and S [R, H, F, D]; and the last S."""
    values, state = inputs[2:]
    attended, following = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        inputs,
        {"q_num_heads": heads, "kv_num_heads": heads, "scale": 1.0, "update_rule": "linear"},
        dtypes=(values.dtype, state.dtype),
        shapes=(values.shape, state.shape),
        version=1,
    )
    return attended, following


def _added_by_source(added: Added, q: Tensor, valid: Tensor) -> Tensor:
    """Return what is added to the scores of queries [R, t, M], as [B, 1, n·t, S]."""
    rows = emitted("Expand", (added.at, shape_of(q, 0, 2)), added.at.dtype, q.shape[:2])
    together = torch.cat([shape_of(valid, 0, 1), sizes(1, -1)])
    shape = (valid.shape[0], 1, q.shape[0] * q.shape[1] // valid.shape[0])
    at = emitted("Reshape", (rows, together), rows.dtype, shape)
    # Gathered before it is cut: one position's scores are few, those of all positions are many.
    everywhere = emitted("Gather", (added.table, at), added.table.dtype, (*shape, added.table.shape[1]))
    cut = (everywhere, number(0), shape_of(valid, 1, 2), number(3))
    return emitted("Slice", cut, everywhere.dtype, (*shape, valid.shape[1]))


def _multi_head(inputs: tuple[Tensor | None, ...], scores: Scores, shape: Any) -> Tensor:
    query = inputs[0]
    if query is None:
        raise TypeError("attention needs queries")
    return symbolic(
        "com.microsoft::MultiHeadAttention",
        inputs,
        {"num_heads": scores.heads, "scale": scores.scale, "mask_filter_value": HIDDEN},
        dtype=query.dtype,
        shape=shape,
        version=1,
    )
