"""Positions of tokens: position vectors, the Positional MLP, and relative scores."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import Distances, Visible
from fatdeploy.export.reference.config import HeadShape, ModelConfig
from fatdeploy.export.reference.seams import seams


def sinusoidal_table(length: int, width: int) -> Tensor:
    """Return PE(p, 2i) = sin(p / 10000^(2i/M)), PE(p, 2i+1) = cos(same) as [length, M]."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000**exponents
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(torch.get_default_dtype())


class Positions(nn.Module):
    """Adds to embedded tokens everything that depends only on their position."""

    table: Tensor | None

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        if config.positions == "learned":
            self.table = nn.Parameter(torch.zeros(length, config.width))
        else:
            # Computed from the formula, never saved.
            fixed = sinusoidal_table(length, config.width) if config.positions == "sinusoidal" else None
            self.register_buffer("table", fixed, persistent=False)
        self.reach = config.positional_mlp
        if self.reach:
            self.into = nn.Linear(self.reach, config.width)
            self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """Return x [R, L, M] plus the vectors of the positions ``at``, [L] or [R, L]."""
        if self.table is None:
            return x
        if self.reach and seams().folds:
            everywhere = torch.arange(self.table.shape[0], device=at.device)
            return x + functional.embedding(at, self.table + self._correlated(self.table, everywhere))
        x = x + functional.embedding(at, self.table)  # a plain Gather in a graph, unlike indexing with brackets
        return x + self._correlated(self.table, at) if self.reach else x

    def _correlated(self, table: Tensor, at: Tensor) -> Tensor:
        before = at[:, None] - torch.arange(1, self.reach + 1, device=at.device)  # [L, W]
        neighbours = table[before.clamp(min=0)] * (before >= 0)[..., None]  # [L, W, M]
        correlations = (neighbours @ table.index_select(0, at)[..., None]).squeeze(-1) / table.shape[1]
        mixed: Tensor = self.out(self.into(correlations).relu())
        return mixed


class RelativeScores(nn.Module):
    """A term of self-attention scores that depends on the distance of query i and key j: [H, I, J]."""

    def __init__(self, config: ModelConfig, heads: HeadShape, length: int) -> None:
        super().__init__()
        self.kind = config.relative
        self.length = length
        self.window = config.relative_window
        self.with_itself = config.relative_self
        columns = 2 * self.window + 1 if self.kind == "table" else 2
        self.weights = nn.Parameter(torch.zeros(heads.count, columns))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        distance = j[None, :] - i[:, None]
        scores = self._of(distance)
        return scores if self.with_itself else scores * (distance != 0)

    def _of(self, distance: Tensor) -> Tensor:
        if self.kind == "table":
            return self.weights[:, distance.clamp(-self.window, self.window) + self.window]
        angles = -distance.to(self.weights.dtype) * (math.pi / self.length)
        turns = torch.stack([angles.sin(), angles.cos()])  # [2, I, J]
        return torch.einsum("hc,cij->hij", self.weights, turns)


class RelativeVectors(nn.Module):
    """Learned vectors per distance of query i and key j, added to keys and values."""

    def __init__(self, config: ModelConfig, heads: HeadShape) -> None:
        super().__init__()
        self.window = config.relative_window
        self.with_itself = config.relative_self
        shape = heads.count, 2 * self.window + 1, heads.width
        self.keys, self.values = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, i: Tensor, j: Tensor) -> Distances:
        distance = j[None, :] - i[:, None]
        everywhere = torch.arange(-self.window, self.window + 1, device=i.device)
        places = distance.clamp(-self.window, self.window)[..., None] == everywhere
        if not self.with_itself:
            places = places & (distance != 0)[..., None]
        return Distances(self.keys, self.values, places.to(self.keys.dtype))


Relation = RelativeScores | RelativeVectors


def with_relative(visible: Visible, relation: nn.Module | None, i: Tensor, j: Tensor) -> Visible:
    """Return what queries i see of keys j with the relative term of a stack or a layer, if it has one."""
    if relation is None:
        return visible
    term = relation(i, j)
    return replace(visible, distances=term) if isinstance(term, Distances) else replace(visible, relative=term)


def stack_relative(config: ModelConfig, heads: HeadShape, length: int) -> Relation | None:
    """Return the relative term that all layers of a stack share, if they do."""
    return None if config.relative == "none" or config.relative_each_layer else _relation(config, heads, length)


def layer_relative(config: ModelConfig, heads: HeadShape, length: int) -> Relation | None:
    """Return the relative term of one layer, if each has its own."""
    return _relation(config, heads, length) if config.relative_each_layer else None


def _relation(config: ModelConfig, heads: HeadShape, length: int) -> Relation:
    return RelativeVectors(config, heads) if config.relative == "matrix" else RelativeScores(config, heads, length)
