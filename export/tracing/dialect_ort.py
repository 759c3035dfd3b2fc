"""The ``ort`` dialect: what the reference's seams become for onnxruntime, with its contributed ops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.attention import FeatureMap, LayerState, Scores, Visible, split_heads
from fatdeploy.export.reference.seams import Added, Outputs, Position, token_scores
from fatdeploy.export.tracing.dialect_base import (
    HIDDEN,
    GraphSeams,
    emitted,
    emitted_floats,
    number,
    score_bias,
    shape_of,
    sizes,
    symbolic,
    written,
)

GROUPED = "GroupQueryAttention"
# From the op's checks: a head's width must be a multiple of it.
WIDTH_UNIT = 8


class OrtSeams(GraphSeams):
    """onnxruntime: one contributed op per attention, caches in place, and only the branches that are needed run."""

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        if scores.vectors is not None or visible.distances is not None:
            return super().attend(qkv, scores, visible, dropout)
        q, k, v = qkv.chunk(3, -1)
        return _multi_head((q, k, v, None, None, _query_bias(visible, q)), scores, q.shape)

    def attend_pairs(self, q: Tensor, kv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        if visible.distances is not None:
            return super().attend_pairs(q, kv, scores, visible, dropout)
        k, v = kv.chunk(2, -1)
        return _multi_head((q, k, v, None, None, _query_bias(visible, q)), scores, q.shape)

    def attend_cached(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        if scores.vectors is not None or visible.distances is not None or not isinstance(position, Tensor):
            return super().attend_cached(qkv, scores, visible, state, position)
        if position.ndim:
            return _grouped_by_row(qkv, scores, state, position)
        q, k, v = qkv.chunk(3, -1)
        bias = None
        if visible.relative is not None or not visible.causal:
            # The op expects as many columns as there are keys so far: a length that no shape in the graph has.
            columns = (position + qkv.shape[1]).reshape(1)
            bias = _query_bias(visible, q)
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

    def attend_ring(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        if visible.distances is not None:
            return super().attend_ring(qkv, scores, visible, state, position)
        q, k, v = qkv.chunk(3, -1)
        keys, values = (
            written(ring, split_heads(new, scores.heads), position, turns=True)
            for ring, new in zip(state, (k, v), strict=True)
        )
        # As keys and values of a source are attended to: the op's own past does not turn.
        mixed = _multi_head((q, keys, values, None, None, _query_bias(visible, q)), scores, q.shape)
        return mixed, (keys, values)

    def attend_recurrent(
        self, qkv: Tensor, features: FeatureMap, heads: int, state: LayerState, keep: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        if not features.elementwise or not state:
            return super().attend_recurrent(qkv, features, heads, state, keep)
        rows, steps, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        qk, v = torch.split(qkv, [2 * width, width], -1)
        q, k = features.queries(qk).chunk(2, -1)
        k = k if keep is None else k * keep
        sums, next_sums = _linear((q, k, v, state[0]), heads)
        # The normaliser is the same recurrence over one value per head, which is 1.
        per_head = torch.cat([shape_of(qkv, 0, 2), number(heads)])
        ones = emitted("Expand", (qkv.new_ones(1), per_head), qkv.dtype, (rows, steps, heads))
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
        folded_sizes = torch.cat([shape_of(valid, 0, 1), number(-1), shape_of(q, 2, 3)])
        shape = (valid.shape[0], q.shape[0] * q.shape[1] // valid.shape[0], q.shape[2])
        folded = emitted("Reshape", (q, folded_sizes), q.dtype, shape)
        bias = None if added is None else _added_by_source(added, q, valid)
        attended = _multi_head((folded, *memory, None, valid.to(torch.int32), bias), scores, shape)
        return self.by_row(attended, q)

    def unless(self, idle: Tensor, act: Callable[[], Outputs], blank: Callable[[], Outputs]) -> Outputs | None:
        outputs: Outputs = torch.cond(idle, blank, act)
        return outputs

    def project(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        # Reads the tied embedding as it is stored, where a folded transpose would be a second copy, and writes logits
        # where they belong: a Gemm accepts only two axes, and a Reshape of its result would be another copy.
        rows, steps, _ = hidden.shape
        return symbolic(
            "com.microsoft::FusedMatMul",
            (hidden, matrix),
            {"transB": 1},
            dtype=hidden.dtype,
            shape=(rows, steps, matrix.shape[0]),
            version=1,
        )


def _grouped_by_row(qkv: Tensor, scores: Scores, state: LayerState, position: Tensor) -> tuple[Tensor, LayerState]:
    """Return causal attention of rows that are each at a position of their own [R], and the caches.

    The op takes several tokens per row only if no row has a past, or if there is one row.
    """
    # The number of keys of each row with the new ones, minus 1; and the largest number of keys.
    lengths = (position + (qkv.shape[1] - 1)).to(torch.int32)
    total = lengths.amax(0) + 1
    # A weight that leads nowhere: exactly 0 here. With this input onnxruntime (1.31) computes attention as it does in
    # MultiHeadAttention, bit for bit. Without it, it uses a kernel for long contexts, 1.5 times slower at 64 positions.
    sink = torch.full((scores.heads,), HIDDEN, dtype=qkv.dtype)
    rows, steps, width = qkv.shape
    mixed, *caches = torch.onnx.ops.symbolic_multi_out(
        f"com.microsoft::{GROUPED}",
        (qkv, None, None, *state, lengths, total, None, None, None, None, sink),
        {"num_heads": scores.heads, "kv_num_heads": scores.heads, "scale": scores.scale},
        dtypes=(qkv.dtype,) * 3,
        shapes=((rows, steps, width // 3), *(cache.shape for cache in state)),
        version=1,
    )
    return mixed, tuple(caches)


def _query_bias(visible: Visible, like: Tensor) -> Tensor:
    """Return what to add to the scores, [B or 1, H or 1, I, J]."""
    bias = score_bias(visible, like)
    return bias.expand(*bias.shape[:2], like.shape[1], bias.shape[3])


def _linear(inputs: tuple[Tensor, ...], heads: int) -> tuple[Tensor, Tensor]:
    """Return q_t·S_t [R, t, H·D] of S_t = S_{t-1} + k_t v_t, from packed q, k, v and S [R, H, F, D]; and the last S."""
    values, state = inputs[2:]
    attended, next_state = emitted_floats(
        "LinearAttention",
        inputs,
        [values.shape, state.shape],
        ints={"q_num_heads": heads, "kv_num_heads": heads},
        floats={"scale": 1.0},
        strings={"update_rule": "linear"},
    )
    return attended, next_state


def _added_by_source(added: Added, q: Tensor, valid: Tensor) -> Tensor:
    """Return what is added to the scores of queries [R, t, M], as [B, 1, n·t, S]."""
    rows = emitted("Expand", (added.at, shape_of(q, 0, 2)), added.at.dtype, q.shape[:2])
    grouped_sizes = torch.cat([shape_of(valid, 0, 1), sizes(1, -1)])
    shape = (valid.shape[0], 1, q.shape[0] * q.shape[1] // valid.shape[0])
    at = emitted("Reshape", (rows, grouped_sizes), rows.dtype, shape)
    if added.ids is not None:
        return token_scores(added.table, at, added.ids[:, None])
    # Gathered before it is cut: the scores of one position are few, those of all positions are many.
    gathered = emitted("Gather", (added.table, at), added.table.dtype, (*shape, added.table.shape[1]))
    cut = (gathered, number(0), shape_of(valid, 1, 2), number(3))
    return emitted("Slice", cut, gathered.dtype, (*shape, valid.shape[1]))


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
