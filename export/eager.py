"""The reference models behind the Engine protocol: PyTorch is one more engine, so one loop serves all."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fatdeploy.errors import SpecMismatch
from fatdeploy.export.reference.decoder import DecoderState, Memory
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.runtimes.engine import Capacity, Floats, Rows, StepOut, Want, sources_of_rows
from fatdeploy.spec import Mask, ModelSpec, Tokens


@dataclass
class EagerState:
    """Memory a source and decoder state a row."""

    memory: Memory
    decoder: DecoderState
    rows: int

    def n_bytes(self) -> int:
        """Return the size of the decoder state, memory of the source apart."""
        return sum(tensor.nbytes for layer in self.decoder.layers for tensor in layer)


class EagerEngine:
    """Runs a reference model step by step in PyTorch."""

    def __init__(self, model: ReferenceModel) -> None:
        self.model = model.eval()

    @property
    def spec(self) -> ModelSpec:
        """The contract of the model."""
        return self.model.spec

    @torch.inference_mode()
    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> EagerState:
        """Read the source and return a state with one row a source."""
        memory = self.model.encode(torch.from_numpy(source), torch.from_numpy(mask))
        return EagerState(memory, self.model.start(memory, capacity.target_positions), len(source))

    @torch.inference_mode()
    def step(self, tokens: Tokens, state: EagerState, want: Want) -> StepOut:
        """Feed tokens [R, t]; logits are computed only if they are wanted."""
        if len(tokens) != state.rows:
            raise SpecMismatch(f"step refused: {len(tokens)} rows of tokens, the state has {state.rows}")
        decoded, state.decoder = self.model.decode(torch.from_numpy(tokens), state.decoder, state.memory)
        hidden = decoded.hidden.numpy()
        if want is Want.HIDDEN:
            return StepOut(hidden)
        logits = self.model.logits(decoded, state.memory)
        if want is Want.LOGITS:
            return StepOut(hidden, logits=logits.numpy())
        top = logits.log_softmax(-1).topk(min(self.spec.top_k, logits.shape[-1]))
        return StepOut(hidden, top_log_probs=top.values.numpy(), top_ids=top.indices.numpy())

    @torch.inference_mode()
    def reorder(self, state: EagerState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave."""
        if rows.size and not (rows.min() >= 0 and rows.max() < state.rows):
            raise SpecMismatch(f"reorder refused: the state has rows 0…{state.rows - 1}, found {rows.tolist()}")
        sources, _ = sources_of_rows(rows, state.rows // len(state.memory.valid))
        if not np.array_equal(sources, np.arange(len(state.memory.valid))):
            state.memory = _selected_memory(state.memory, torch.from_numpy(sources))
        index = torch.from_numpy(rows)
        state.decoder.layers = [tuple(tensor[index] for tensor in layer) for layer in state.decoder.layers]
        state.rows = len(rows)

    @torch.inference_mode()
    def length_log_probs(self, state: EagerState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        logits = state.memory.length_logits
        if logits is None:
            raise SpecMismatch("this model has no length head: its targets end with EOS")
        log_probs: Floats = logits.log_softmax(-1).numpy()
        return log_probs

    def release(self, state: EagerState) -> None:
        """Nothing is kept for the next state."""

    def close(self) -> None:
        """Nothing is held beyond the model itself."""


def _selected_memory(memory: Memory, sources: Tensor) -> Memory:
    return Memory(
        memory.source[sources],
        memory.valid[sources],
        [keys[sources] for keys in memory.keys],
        [values[sources] for values in memory.values],
        None if memory.length_logits is None else memory.length_logits[sources],
    )
