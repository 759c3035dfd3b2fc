"""PyTorch models behind the Engine protocol: the reference is one more engine, so one loop serves all."""

from dataclasses import dataclass

import numpy as np
import torch

from fatdeploy.errors import SpecMismatch
from fatdeploy.export.models.exportable import Memory, Tensors, exportable_model
from fatdeploy.runtimes.engines.checks import check_ids, check_want, sources_of_rows
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Ids, Rows, StepOut, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens


@dataclass
class EagerState:
    """Memory a source and decoder state a row."""

    memory: Memory
    tensors: Tensors
    rows: int
    capacity: int
    position: int = 0

    def n_bytes(self) -> int:
        """Return the size of the decoder state, memory of the source apart."""
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
        """Read the source and return a state with one row a source."""
        self.spec.check_source(source, mask)
        inputs = torch.from_numpy(source), torch.from_numpy(mask)
        memory = Memory(*inputs, self.exportable.encoded(*inputs))
        positions = capacity.target_positions
        return EagerState(memory, self.exportable.started(memory, positions), len(source), positions)

    @torch.inference_mode()
    def step(self, tokens: Tokens, state: EagerState, want: Want) -> StepOut:
        """Feed tokens [R, t]; logits are computed only if they are wanted."""
        check_want(self.spec, want)
        self.spec.check_tokens(tokens, state.position, state.capacity)
        if len(tokens) != state.rows:
            raise SpecMismatch(f"step refused: {len(tokens)} rows of tokens, the state has {state.rows}")
        fed = torch.from_numpy(tokens)
        called, state.tensors = self.exportable.called(fed, state.position, state.tensors, state.memory)
        state.position += tokens.shape[1]
        hidden, attention = (None if one is None else one.numpy() for one in (called.hidden, called.attention))
        if want is Want.HIDDEN:
            return StepOut(hidden, attention=attention)
        logits = self.exportable.logits(called, state.memory)
        if want is Want.LOGITS:
            return StepOut(hidden, logits=logits.numpy(), attention=attention)
        top = logits.log_softmax(-1).topk(min(self.spec.top_k, logits.shape[-1]))
        return StepOut(hidden, top_log_probs=top.values.numpy(), top_ids=top.indices.numpy(), attention=attention)

    @torch.inference_mode()
    def reorder(self, state: EagerState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave."""
        if rows.size and not (rows.min() >= 0 and rows.max() < state.rows):
            raise SpecMismatch(f"reorder refused: the state has rows 0…{state.rows - 1}, found {rows.tolist()}")
        memory = state.memory
        sources, _ = sources_of_rows(rows, state.rows // len(memory.mask))
        if not np.array_equal(sources, np.arange(len(memory.mask))):
            kept = torch.from_numpy(sources)
            tensors = tuple(tensor[kept] for tensor in memory.tensors)
            state.memory = Memory(memory.source[kept], memory.mask[kept], tensors)
        index = torch.from_numpy(rows)
        state.tensors = tuple(tensor[index] for tensor in state.tensors)
        state.rows = len(rows)

    @torch.inference_mode()
    def length_log_probs(self, state: EagerState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        if not self.spec.length_log_probs:
            raise SpecMismatch("this model has no length head: its targets end with EOS")
        log_probs: Floats = state.memory.tensors[-1].numpy()
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

    def release(self, state: EagerState) -> None:
        """Nothing is kept for the next state."""

    def close(self) -> None:
        """Nothing is held beyond the model itself."""
