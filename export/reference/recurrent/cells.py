"""Recurrent layers: LSTM and GRU cells, and AT's fully connected recurrence."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fatdeploy.export.reference.attention import LayerState
from fatdeploy.export.reference.config import Activation, ModelConfig, RecurrentKind
from fatdeploy.export.reference.layers import activated

Cell = nn.LSTM | nn.GRU


def cell_of(kind: RecurrentKind, width: int, *, ways: int = 1) -> Cell:
    """Return a cell that reads and returns vectors of a width; two ways have half of it each."""
    cell = nn.LSTM if kind == "lstm" else nn.GRU
    return cell(width, width // ways, batch_first=True, bidirectional=ways == 2)


def recurred(x: Tensor, cell: Cell, valid: Tensor | None, past: LayerState) -> tuple[Tensor, LayerState]:
    """Return a cell's states [R, L, M] after every input, and its last state; with ``valid`` [R, L] up to padding."""
    start = [tensor[None].contiguous() for tensor in past]
    initial = None if not past else tuple(start) if isinstance(cell, nn.LSTM) else start[0]
    if valid is None:
        outputs, last = cell(x, initial)
    else:
        packed = pack_padded_sequence(x, valid.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        steps, last = cell(packed, initial)
        outputs, _ = pad_packed_sequence(steps, batch_first=True, total_length=x.shape[1])
    return outputs, tuple(tensor[0] for tensor in (last if isinstance(last, tuple) else (last,)))


class ConnectedCell(nn.Module):
    """AT's recurrence without gates of an LSTM: fully connected layers weigh every number of the input.

    α_t = softmax(V relu(H h_{t-1} + W h̄_t + U x_t)) over the M numbers of the input, where h̄_t = tanh(A h_{t-1} + C c)
    combines the state with the context c; then h_t = activation(L (x_t ⊙ α_t)).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.from_state = nn.Linear(width, width, bias=False)
        self.from_mix = nn.Linear(width, width, bias=False)
        self.from_input = nn.Linear(width, width)
        self.weigh = nn.Linear(width, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.context = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.activation: Activation = config.activation

    def forward(self, hidden: Tensor, x: Tensor, scored: Tensor, context: Tensor) -> Tensor:
        """Return the next state [B, n, M] from the last, the input x, ``from_input`` of x, and C c [B, M]."""
        mixed = (self.mix(hidden) + context[:, None]).tanh()
        scores = (self.from_state(hidden) + self.from_mix(mixed) + scored).relu()
        return activated(self.out(x * self.weigh(scores).softmax(-1)), self.activation)


def connected(x: Tensor, scored: Tensor, cell: ConnectedCell, context: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return AT's states [B, n, L, M] after inputs x, and the last one [B, n, M]."""
    states = []
    for step in range(x.shape[2]):
        hidden = cell(hidden, x[:, :, step], scored[:, :, step], context)
        states.append(hidden)
    return torch.stack(states, 2), hidden
