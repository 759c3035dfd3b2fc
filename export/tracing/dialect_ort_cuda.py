"""The ``ort`` dialect for onnxruntime's CUDA provider in half precision: what its attention kernels accept.

From onnxruntime's sources (``contrib_ops/cuda/bert``, August 2026) and the schemas of its package:

- ``MultiHeadAttention`` with ``past_sequence_length`` has CUDA kernels for any number of tokens and rows. In float32
  they are two products and a softmax over the shared cache, and correct: float32 graphs are those of the CPU. In
  float16, GPUs of compute capability 9.0 and above prefer cuDNN's kernel, which receives the number of written keys
  but not the capacity of the cache, and would read the keys of other rows: no float16 graph has this op with a past.
- ``GroupQueryAttention`` has fused kernels for float16 and bfloat16 only. It refuses several tokens after a past for
  more than one row, and heads whose width is not a multiple of eight.

So in float16 a call with one token, the usual case, is one op, and any other call is written as standard ops. A shape
decides this on the host: nothing waits for the device.
"""

import torch
from torch import Tensor

from fatdeploy.export.reference.attention import LayerState, Scores, Visible
from fatdeploy.export.reference.seams import Outputs, Position
from fatdeploy.export.tracing.dialect_base import GraphSeams, emitted, emitted_floats, number, shape_of
from fatdeploy.export.tracing.dialect_ort import GROUPED, WIDTH_UNIT, OrtSeams

# From the op's fastest kernel.
MOST_WIDTH = 256


class CudaHalfSeams(OrtSeams):
    """onnxruntime on CUDA in half precision: one token at a time through the op that has fused kernels there."""

    def attend_cached(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        plain = scores.vectors is None and visible.relative is None and visible.distances is None and visible.causal
        width = qkv.shape[2] // 3 // scores.heads
        if not plain or width % WIDTH_UNIT or width > MOST_WIDTH or not isinstance(position, Tensor):
            return GraphSeams.attend_cached(self, qkv, scores, visible, state, position)
        # Before the branch, so that all layers share them. The op expects the number of keys with the new one, minus 1.
        before = position.reshape(1).to(torch.int32)
        lengths = emitted("Expand", (before, shape_of(qkv, 0, 1)), torch.int32, (qkv.shape[0],))
        total = before + 1

        def one_token() -> Outputs:
            return _grouped((*qkv.chunk(3, -1), *state, lengths, total), scores)

        def several_tokens() -> Outputs:
            mixed, caches = GraphSeams.attend_cached(self, qkv, scores, visible, state, position)
            return mixed, *caches

        mixed, *caches = torch.cond((shape_of(qkv, 1, 2) == number(1)).reshape(()), one_token, several_tokens)
        return mixed, tuple(caches)

    def attend_ring(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        return GraphSeams.attend_ring(self, qkv, scores, visible, state, position)


def _grouped(inputs: tuple[Tensor, ...], scores: Scores) -> Outputs:
    """Return attention [R, 1, M] of one token per row to all tokens so far, and the caches."""
    query, _, _, keys, values, *_ = inputs
    attributes = {"num_heads": scores.heads, "kv_num_heads": scores.heads}
    shapes = [query.shape, keys.shape, values.shape]
    return emitted_floats(GROUPED, inputs, shapes, ints=attributes, floats={"scale": scores.scale}, strings={})
