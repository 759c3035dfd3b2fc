"""What all dialects share: caches of full capacity, masks as additions, and functions that write single ONNX ops."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fatdeploy.export.reference.attention import LayerState, Scores, Visible, attended, split_heads
from fatdeploy.export.reference.recurrent.cells import Cell, ConnectedCell
from fatdeploy.export.reference.seams import Position, Seams
from fatdeploy.export.tracing.recurrent_ops import connected_scan, recurrent_op, scanned

# Without this the branches of a condition, which torch traces differently, may not contain such an op.
symbolic = torch._dynamo.dont_skip_tracing(torch.onnx.ops.symbolic)

OPSET = 24
# Numbers per source that a slow attention compares at once, [I, J, heads, D], beyond one head: three arrays of 4 MB.
# onnxruntime keeps the memory that concurrent calls needed at the same time, so every thread would pay for more.
PAIRS = 2**20
# Added to scores of hidden keys: far below any score, and finite, because an infinite one minus itself is NaN.
HIDDEN = -1e30
FLOAT = 1  # ONNX's code for float32, in which models are traced


def emitted(op: str, inputs: tuple[Tensor | None, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    """Return the output of one ONNX op, written into the graph as it stands."""
    return symbolic(op, inputs, attributes, dtype=dtype, shape=shape, version=OPSET)


def emitted_floats(
    op: str, inputs: tuple[Tensor | None, ...], shapes: list[Any], *, ints: Any, floats: Any, strings: Any
) -> tuple[Tensor, ...]:
    """Return the float32 outputs, one per shape, of one contributed op: what ``symbolic_multi_out`` becomes.

    That function itself cannot be traced in a branch (torch 2.13).
    """
    kinds = (("i", ints), ("f", floats), ("s", strings))
    outputs: list[Tensor] = torch.ops.onnx_symbolic._symbolic_multi_out.default(
        inputs,
        op,
        [FLOAT] * len(shapes),
        shapes=shapes,
        attr_keys=[*ints, *floats, *strings],
        attr_types=[kind for kind, values in kinds for _ in values],
        attr_pos=[(place, place + 1) for _, values in kinds for place in range(len(values))],
        attr_ints=[*ints.values()],
        attr_floats=[*floats.values()],
        attr_strs=[*strings.values()],
        metadata_props_keys=[],
        metadata_props_values=[],
        domain="com.microsoft",
        version=1,
    )
    return tuple(outputs)


def number(value: int) -> Tensor:
    """Return a tensor with one axis and one whole number; ``torch.tensor`` is not allowed in a branch."""
    return torch.full((1,), value, dtype=torch.int64)


def sizes(*values: int) -> Tensor:
    """Return the sizes for a Reshape: 0 keeps an axis, -1 takes what is left."""
    return torch.cat([number(value) for value in values])


def shape_of(x: Tensor, start: int, end: int) -> Tensor:
    """Return the sizes of axes ``start`` to ``end`` as a tensor."""
    return emitted("Shape", (x,), torch.int64, (end - start,), start=start, end=end)


def score_bias(visible: Visible, like: Tensor) -> Tensor:
    """Return what to add to the scores, [B or 1, H or 1, I or 1, J]."""
    zero = torch.zeros((), dtype=like.dtype)
    shown = zero if visible.relative is None else visible.relative
    return torch.where(visible.allowed, shown, torch.full((), HIDDEN, dtype=like.dtype))


class GraphSeams(Seams):
    """What both dialects have in common: caches of full capacity, shapes that come from tensors and need no proof."""

    folds = True

    def n_keys(self, position: Position, steps: int, capacity: int) -> int:  # noqa: ARG002
        return capacity

    def slow_scores(self, queries: Tensor, keys: Tensor, longest: int) -> Tensor:
        # Features stay last: a pair is one run of heads and features, and ops are few. onnxruntime needs a fourth of
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
        # The mask is the same in all layers, and an addition costs half as much as a Where.
        return (scores + score_bias(visible, scores)).softmax(-1)

    def attend_cached(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        q, k, v = (split_heads(part, scores.heads) for part in qkv.chunk(3, -1))
        keys, values = (_written(cache, new, position) for cache, new in zip(state, (k, v), strict=True))
        # Positions that are not written yet are hidden, like the rest of the future.
        return attended((q, keys, values), scores, visible), (keys, values)

    def recur(self, x: Tensor, cell: Cell, valid: Tensor | None, past: LayerState) -> tuple[Tensor, LayerState]:
        return recurrent_op(x, cell, valid, past)

    def connected(
        self, x: Tensor, scored: Tensor, cell: ConnectedCell, context: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return connected_scan(x, scored, cell, context, hidden)

    def repeated(
        self, advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], state: Tensor, inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return scanned(advance, state, inputs)

    def by_source(self, x: Tensor, batch: Tensor) -> Tensor:
        front, back = shape_of(batch, 0, 1), shape_of(x, 1, x.ndim)
        shape = (batch.shape[0], x.shape[0] // batch.shape[0], *x.shape[1:])
        return emitted("Reshape", (x, torch.cat([front, number(-1), back])), x.dtype, shape)

    def by_row(self, x: Tensor, like: Tensor) -> Tensor:
        return emitted("Reshape", (x, shape_of(like, 0, like.ndim)), x.dtype, like.shape)

    def weights_by_row(self, weights: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
        heads = weights.shape[1]
        # Sizes come from tensors outside: both branches must have the same sizes, symbol for symbol.
        shape = (rows.shape[0], heads, rows.shape[1], valid.shape[1])
        row_sizes = torch.cat([shape_of(rows, 0, 1), number(heads), shape_of(rows, 1, 2), shape_of(valid, 1, 2)])
        return emitted("Reshape", (weights.transpose(1, 2), row_sizes), weights.dtype, shape)

    def in_source(self, tokens: Tensor, source: Tensor, valid: Tensor, like: Tensor) -> Tensor:
        batch, per_source = source.shape[0], tokens.shape[0] * tokens.shape[1] // source.shape[0]
        grouped_sizes = torch.cat([shape_of(source, 0, 1), sizes(-1, 1)])
        grouped = emitted("Reshape", (tokens, grouped_sizes), tokens.dtype, (batch, per_source, 1))
        equal = grouped == source.masked_fill(~valid, -1)[:, None]  # [B, n·t, S]
        return self.by_row(equal.to(like.dtype).amax(-1), like)

    def copied(self, probability: Tensor, weights: Tensor, source: Tensor) -> Tensor:
        # TensorRT refuses a scatter that adds, which would also need the sources repeated per row.
        places = (source[..., None] == torch.arange(probability.shape[-1])).to(weights.dtype)  # [B, S, V]
        grouped = self.by_source(weights, source) @ places[:, None]
        return probability + self.by_row(grouped, probability)


def _written(cache: Tensor, new: Tensor, position: Position) -> Tensor:
    if not isinstance(position, Tensor):
        raise TypeError("in a graph the position is a tensor")
    rows = position.reshape(1).expand(new.shape[0])
    return emitted("TensorScatter", (cache, new, rows), cache.dtype, cache.shape, axis=2)


def _positive_squares(queries: Tensor, keys: Tensor) -> Tensor:
    """Return Σ_d relu(a_id + c_jd)² as [B, I, J, H] from [B, I, H, D] and [B, J, H, D]."""
    positive = (queries[:, :, None] + keys[:, None]).relu()
    return (positive * positive).sum(-1)
