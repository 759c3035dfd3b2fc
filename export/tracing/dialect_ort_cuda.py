"""The ``ort`` dialect for onnxruntime's CUDA provider in half precision: what its attention kernels take, and how.

Read in onnxruntime's sources (``contrib_ops/cuda/bert``, August 2026) and in the schemas of its package:

- ``MultiHeadAttention`` with ``past_sequence_length`` has CUDA kernels for any number of tokens and rows. In float32
  they are two products and a softmax over the shared cache, and right: float32 graphs are those of the CPU. In float16
  GPUs of compute capability 9.0 and more prefer cuDNN's kernel, which is told how many keys are written and not how
  many the cache holds, and would read the keys of other rows: no float16 graph has this op with a past.
- ``GroupQueryAttention`` has fused kernels of float16 and bfloat16 alone. It refuses several tokens after a past for
  more than one row, and heads whose width is no multiple of eight.

So in float16 a call of one token, which nearly all are, is one op, and any other is written as standard ops. A shape
decides, on the host: nothing waits for the device.
"""

import torch
from torch import Tensor

from fatdeploy.export.reference.attention import LayerState, Scores, Visible
from fatdeploy.export.reference.seams import Outputs, Position
from fatdeploy.export.tracing.dialects import GraphSeams, OrtSeams, emitted, number, shape_of

GROUPED = "GroupQueryAttention"
FLOAT = 1  # of ONNX: models are traced in float32
# Of the op's checks, and of its quickest kernel.
WIDTH_UNIT, MOST_WIDTH = 8, 256


class CudaHalfSeams(OrtSeams):
    """onnxruntime on CUDA in half precision: one token at a time by the op that has fused kernels there."""

    def attend_cached(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        plain = scores.vectors is None and visible.relative is None and visible.causal
        width = qkv.shape[2] // 3 // scores.heads
        if not plain or width % WIDTH_UNIT or width > MOST_WIDTH or not isinstance(position, Tensor):
            return GraphSeams.attend_cached(self, qkv, scores, visible, state, position)
        # Before the branch, so that all layers share them. The op counts the new token among the keys, but one less.
        before = position.reshape(1).to(torch.int32)
        lengths = emitted("Expand", (before, shape_of(qkv, 0, 1)), torch.int32, (qkv.shape[0],))
        total = before + 1

        def alone() -> Outputs:
            return _grouped((*qkv.chunk(3, -1), *state, lengths, total), scores)

        def several() -> Outputs:
            mixed, caches = GraphSeams.attend_cached(self, qkv, scores, visible, state, position)
            return mixed, *caches

        mixed, *caches = torch.cond((shape_of(qkv, 1, 2) == number(1)).reshape(()), alone, several)
        return mixed, tuple(caches)


def _grouped(inputs: tuple[Tensor, ...], scores: Scores) -> Outputs:
    """Return attention [R, 1, M] of one token a row to all that was said, and the caches."""
    query, _, _, keys, values, *_ = inputs
    # What ``symbolic_multi_out`` becomes: the function itself cannot be traced in a branch (torch 2.13).
    return tuple(
        torch.ops.onnx_symbolic._symbolic_multi_out.default(
            inputs,
            GROUPED,
            [FLOAT] * 3,
            shapes=[query.shape, keys.shape, values.shape],
            attr_keys=["num_heads", "kv_num_heads", "scale"],
            attr_types=["i", "i", "f"],
            attr_pos=[(0, 1), (1, 2), (0, 1)],
            attr_ints=[scores.heads, scores.heads],
            attr_floats=[scores.scale],
            attr_strs=[],
            metadata_props_keys=[],
            metadata_props_values=[],
            domain="com.microsoft",
            version=1,
        )
    )
