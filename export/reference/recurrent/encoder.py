"""The recurrent encoder: layers of LSTM or GRU cells over the embedded source, and the context vector."""

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.config import ModelConfig, RecurrentKind
from fatdeploy.export.reference.recurrent.cells import Cell, cell_of
from fatdeploy.export.reference.seams import seams


class RecurrentLayer(nn.Module):
    """A cell that reads the source in one direction, or in both and returns both halves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kind: RecurrentKind = "gru" if config.encoder_attention == "gru" else "lstm"
        self.cell: Cell = cell_of(kind, config.width, ways=2 if config.encoder_direction == "both" else 1)
        self.backwards = config.encoder_direction == "right_to_left"

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        if not self.backwards:
            return seams().recur(x, self.cell, valid, ())[0]
        # Padding stays behind: a row's real tokens are turned around among themselves.
        order = turned_order(valid)
        return _in_order(seams().recur(_in_order(x, order), self.cell, valid, ())[0], order)


def turned_order(valid: Tensor) -> Tensor:
    """Return which position each one changes places with, [B, S]: real tokens in reverse, padding as it is."""
    at = torch.arange(valid.shape[1], device=valid.device)
    return torch.where(valid, valid.sum(1, keepdim=True) - 1 - at, at)


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand_as(x))


class RecurrentEncoder(nn.Module):
    """h = LSTM(E(x)), layer upon layer: no attention, no norm, no feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(RecurrentLayer(config) for _ in range(config.encoder_layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, valid: Tensor) -> list[Tensor]:
        """Return the outputs that ``cross_wiring`` needs, in order; they are zero at padding."""
        outputs: list[Tensor] = []
        for layer in self.layers:
            x = layer(self.dropout(x) if outputs else x, valid)
            outputs.append(x)
        return outputs[-1:] if self.config.cross_wiring == "last" else outputs


def mean_of(encoded: Tensor, valid: Tensor) -> Tensor:
    """Return the mean [B, M] of outputs [B, S, M] at real tokens."""
    real = valid[..., None]
    return (encoded * real).sum(1) / real.sum(1)


def context_of(config: ModelConfig, encoded: Tensor, valid: Tensor) -> Tensor:
    """Return the source as one vector [B, M]: the last state of a recurrent encoder, else the mean of its outputs."""
    if not config.recurrent_encoder:
        return mean_of(encoded, valid)
    at = torch.arange(valid.shape[1], device=valid.device)
    last = (encoded * (at == valid.sum(1, keepdim=True) - 1)[..., None]).sum(1)
    if config.encoder_direction == "left_to_right":
        return last
    first = encoded[:, 0]
    if config.encoder_direction == "right_to_left":
        return first
    half = config.width // 2
    return torch.cat([last[:, :half], first[:, half:]], -1)
