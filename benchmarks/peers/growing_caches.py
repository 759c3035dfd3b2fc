"""A reference ``transformer`` as a user of ``torch.onnx.export`` would export it: caches grow by concatenation.

It uses nothing of our exporter: two modules, PyTorch's own attention, default opset and optimiser. Cross keys and
values come out of the encoder graph.
"""

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from benchmarks.peers.growing_caches_decoding import DECODER, ENCODER, SPEC
from fatdeploy.export.reference.attention import LayerState, Scores, Visible, merge_heads, split_heads
from fatdeploy.export.reference.cross.attention import SourceMemory
from fatdeploy.export.reference.decoder import DecoderState
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.seams import Added, Position, Seams, speaking
from fatdeploy.folders import replaced_folder
from fatdeploy.spec import TensorSpec

# All sizes of different axes differ, or torch would merge the axes; none is 1, which torch would make a constant.
EXAMPLE = {"batch": 3, "rows": 3, "source": 5, "capacity": 7}
AT_ONCE = {"step": 1}


class GrowingSeams(Seams):
    """The reference in plain PyTorch, for one token per call."""

    def n_keys(self, position: Position, steps: int, capacity: int) -> int:  # noqa: ARG002
        """Return the number of positions after a call: those of the past and its own."""
        return capacity + steps

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:  # noqa: ARG002
        """Return self-attention of the encoder."""
        q, k, v = (split_heads(part, scores.heads) for part in qkv.chunk(3, -1))
        return merge_heads(functional.scaled_dot_product_attention(q, k, v, visible.allowed))

    def attend_cached(
        self,
        qkv: Tensor,
        scores: Scores,
        visible: Visible,  # noqa: ARG002 - one token sees the whole past
        state: LayerState,
        position: Position,  # noqa: ARG002
    ) -> tuple[Tensor, LayerState]:
        """Append this token's keys and values to those of the past, and attend to all."""
        q, k, v = (split_heads(part, scores.heads) for part in qkv.chunk(3, -1))
        keys, values = (torch.cat([past, new], 2) for past, new in zip(state, (k, v), strict=True))
        return merge_heads(functional.scaled_dot_product_attention(q, keys, values)), (keys, values)

    def attend_memory(
        self,
        q: Tensor,
        memory: tuple[Tensor, Tensor],
        scores: Scores,
        valid: Tensor,
        added: Added | None,  # noqa: ARG002
    ) -> Tensor:
        """Return attention to the source's keys and values."""
        queries = split_heads(q, scores.heads)
        return merge_heads(functional.scaled_dot_product_attention(queries, *memory, valid[:, None, None, :]))


class EncoderModule(nn.Module):
    """Source in, every decoder layer's cross keys and values out."""

    def __init__(self, model: ReferenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        memory = self.model.encode(*tensors)
        return tuple(tensor for pair in zip(memory.keys, memory.values, strict=True) for tensor in pair)


class DecoderModule(nn.Module):
    """One token per row, cross keys and values and the past in; logits and the present out."""

    def __init__(self, model: ReferenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        tokens, mask, *rest = tensors
        n_memory = len(self.model.spec.memory)
        memory, past = rest[:n_memory], rest[n_memory:]
        state = DecoderState(past[0].shape[2], list(zip(past[::2], past[1::2], strict=True)))
        # The mask stands in for the source's ids, which this model does not read.
        logits, state = self.model.step(tokens, state, SourceMemory(mask, mask, memory[::2], memory[1::2]))
        return (logits, *(tensor for layer in state.layers for tensor in layer))


def write_growing_caches(model: ReferenceModel, folder: Path, *, force: bool = False) -> None:
    """Write both graphs, each with its own weights, and the spec that the decode loop reads."""
    spec = model.spec
    decoder = spec.tokens, spec.source_mask, *spec.memory, *spec.past
    with replaced_folder(folder, force=force) as new:
        _export(EncoderModule(model), spec.encoder_inputs(), spec.encoder_outputs(), new / ENCODER)
        _export(DecoderModule(model), decoder, (spec.logits, *spec.present), new / DECODER)
        (new / SPEC).write_text(json.dumps(spec.to_dict()))


def _export(module: nn.Module, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], path: Path) -> None:
    sizes = EXAMPLE | AT_ONCE
    example = [torch.ones(tensor.sized(sizes), dtype=getattr(torch, tensor.dtype)) for tensor in inputs]
    dynamic = [{place: Dim.AUTO for place, axis in enumerate(tensor.shape) if axis in EXAMPLE} for tensor in inputs]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), speaking(GrowingSeams()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice to authors of exporters
        torch.onnx.export(
            module.eval(),
            (example,),
            path,
            dynamo=True,
            input_names=[tensor.name for tensor in inputs],
            output_names=[tensor.name for tensor in outputs],
            dynamic_shapes=(dynamic,),
            external_data=True,
            verbose=False,
        )
