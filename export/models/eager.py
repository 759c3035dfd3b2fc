"""PyTorch models behind the Engine protocol: the reference is one more engine, so one loop serves all."""

from dataclasses import dataclass

import torch

from fatdeploy.export.models.exportable import Memory, Tensors, exportable_model
from fatdeploy.runtimes.engines.checks import check_ids, check_length_head, check_step, check_want, checked_move
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Ids, Rows, StepOut, Want, in_parts
from fatdeploy.spec import Mask, ModelSpec, Tokens


@dataclass
class EagerState:
    """Encoder memory per source and decoder state per row."""

    memory: Memory
    tensors: Tensors
    rows: int
    capacity: Capacity
    position: int = 0

    def n_bytes(self) -> int:
        """Return the size of the decoder state, without the encoder memory."""
        return sum(tensor.nbytes for tensor in self.tensors)


class EagerEngine:
    """Runs a model step by step in PyTorch."""

    def __init__(self, model: object) -> None:
        self.exportable = exportable_model(model)
        self.model = self.exportable.inner

    @property
    def spec(self) -> ModelSpec:
        """The contract of the model."""
        return self.exportable.spec

    @torch.inference_mode()
    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> EagerState:
        """Read the source and return a state with one row per source."""
        self.spec.check_source(source, mask)
        inputs = torch.from_numpy(source), torch.from_numpy(mask)
        memory = Memory(*inputs, self.exportable.encoded(*inputs))
        state = self.exportable.started(memory, capacity.target_positions)
        return EagerState(memory, state, len(source), capacity)

    @torch.inference_mode()
    def step(self, tokens: Tokens, state: EagerState, want: Want) -> StepOut:
        """Feed tokens [R, t]; logits are computed only if they are wanted."""
        check_want(self.spec, want)
        check_step(self.spec, tokens, state.rows, state.position, state.capacity.target_positions)
        return in_parts(tokens, self.spec.tokens_per_call, lambda part: self._called(part, state, want))

    def _called(self, tokens: Tokens, state: EagerState, want: Want) -> StepOut:
        inputs = torch.from_numpy(tokens)
        output, state.tensors = self.exportable.called(inputs, state.position, state.tensors, state.memory)
        state.position += tokens.shape[1]
        hidden, attention = (None if tensor is None else tensor.numpy() for tensor in (output.hidden, output.attention))
        if want is Want.HIDDEN:
            return StepOut(hidden, attention=attention)
        logits = self.exportable.logits(output, state.memory)
        if want is Want.LOGITS:
            return StepOut(hidden, logits=logits.numpy(), attention=attention)
        top = logits.log_softmax(-1).topk(min(self.spec.top_k, logits.shape[-1]))
        return StepOut(hidden, top_log_probs=top.values.numpy(), top_ids=top.indices.numpy(), attention=attention)

    @torch.inference_mode()
    def reorder(self, state: EagerState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave."""
        memory = state.memory
        sources, _ = checked_move(rows, state.rows, len(memory.mask), state.capacity)
        if sources.tolist() != list(range(len(memory.mask))):
            kept = torch.from_numpy(sources)
            tensors = tuple(tensor[kept] for tensor in memory.tensors)
            state.memory = Memory(memory.source[kept], memory.mask[kept], tensors)
        index = torch.from_numpy(rows)
        state.tensors = tuple(tensor[index] for tensor in state.tensors)
        state.rows = len(rows)

    @torch.inference_mode()
    def length_log_probs(self, state: EagerState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        check_length_head(self.spec)
        log_probs: Floats = state.memory.tensors[len(self.spec.memory)].numpy()
        return log_probs

    @torch.inference_mode()
    def output_rows(self, ids: Ids) -> Floats | None:
        """Return the rows of the output matrix that belong to ids, [n, M]; None if the model has none."""
        check_ids(self.spec, ids)
        matrix = self.exportable.output_matrix()
        if matrix is None:
            return None
        rows: Floats = matrix[torch.from_numpy(ids)].numpy()
        return rows

    @torch.inference_mode()
    def output_bias(self, ids: Ids) -> Floats | None:
        """Return what is added to the products with the rows of ids, [n]; None if nothing is."""
        bias = self.exportable.output_bias()
        if bias is None:
            return None
        biases: Floats = bias[torch.from_numpy(ids)].numpy()
        return biases

    def release(self, state: EagerState) -> None:
        """Do nothing: the garbage collector frees the state."""

    def close(self) -> None:
        """Do nothing: the engine owns nothing but the model."""
