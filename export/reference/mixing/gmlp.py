"""Spatial mixing (``gmlp``): a learned matrix over positions in the place of self-attention."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.config import Activation, Direction, ModelConfig
from fatdeploy.export.reference.layers import activated, norm_of

if TYPE_CHECKING:
    from fatdeploy.export.reference.encoder import Source


class SpatialMixing(nn.Module):
    """out(u ⊙ (W norm(v) + b)) with [u; v] = activation(into(x)), W and b over positions; padding is zero in v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.into = nn.Linear(config.width, 2 * config.width)
        self.norm = norm_of(config)
        self.matrix = nn.Parameter(torch.zeros(config.max_source, config.max_source))
        self.bias = nn.Parameter(torch.zeros(config.max_source))
        self.out = nn.Linear(config.width, config.width)
        self.activation: Activation = config.activation
        self.direction: Direction = config.encoder_direction

    def forward(self, h: Tensor, source: "Source") -> Tensor:
        u, v = activated(self.into(h), self.activation).chunk(2, -1)
        length = h.shape[1]
        matrix = self.matrix[:length, :length]
        if self.direction != "both":
            matrix = matrix.tril() if self.direction == "left_to_right" else matrix.triu()
        spread = matrix @ (self.norm(v) * source.valid[..., None]) + self.bias[:length, None]
        mixed: Tensor = self.out(u * spread)
        return mixed
