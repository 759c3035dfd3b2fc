"""Learned patterns (``sinkhorn``): every block of the source sees itself and the block that a network sorts to it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.attention import Scores
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.config_rules import n_blocks
from fatdeploy.export.reference.layers import SelfAttention
from fatdeploy.export.reference.patterns.decisions import NEVER, clearness, narrowed, preferring
from fatdeploy.export.reference.seams import seams

if TYPE_CHECKING:
    from fatdeploy.export.reference.encoder import Source


class SinkhornAttention(SelfAttention):
    """``scaled_dot`` to the keys of the own block and of a matching block, which a permutation of blocks assigns.

    A network scores all pairs of blocks; its matrix is normalised by rows and columns a fixed number of times. In
    training the logarithms of these shares are added to the scores; in inference they are rounded to a permutation.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.encoder_heads)
        self.scores = Scores(config.encoder_attention, config.encoder_heads)
        self.dropout = nn.Dropout(config.dropout)
        self.block_length, self.rounds = config.block_length, config.sinkhorn_rounds
        self.into = nn.Linear(config.width, config.width)
        # A bias would be the same for all blocks of a column, which the normalisation takes away.
        self.sort = nn.Linear(config.width, n_blocks(config), bias=False)

    def forward(self, h: Tensor, source: "Source") -> Tensor:
        block = self._blocks(h)  # [S]
        own = block[:, None] == block
        shares, _ = self._shares(h, source.valid)
        if self.training:
            spread = shares.index_select(1, block).index_select(2, block)  # [B, S, S]
            visible = preferring(source.visible, spread.masked_fill(own, 0.0))
        else:
            partners = torch.stack([best for _, best in sorted_blocks(shares)], 1)  # [B, N]
            pattern = own | (partners.index_select(1, block)[..., None] == block)
            visible = narrowed(source.visible, pattern, source.valid)
        mixed: Tensor = self.out(seams().attend(self.qkv(h), self.scores, visible, self.dropout))
        return mixed

    def margins(self, h: Tensor, source: "Source") -> Tensor:
        """Return how clearly each row's closest block is given its partner, [B]."""
        shares, filled = self._shares(h, source.valid)
        return clearness(torch.stack([scores for scores, _ in sorted_blocks(shares)], 1), filled)

    def _blocks(self, h: Tensor) -> Tensor:
        """Return the block of each position: positions alone decide it, so padding moves no token to another."""
        return torch.arange(h.shape[1], device=h.device) // self.block_length

    def _shares(self, h: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return logarithms of a doubly stochastic matrix of blocks [B, N, N], and which blocks have tokens [B, N].

        A block without tokens belongs to itself alone.
        """
        places = torch.arange(self.sort.out_features, device=h.device)
        inside = (places[:, None] == self._blocks(h)).to(h.dtype)  # [N, S]
        real = valid[..., None].to(h.dtype)
        counts = inside @ real  # [B, N, 1]
        means = inside @ (h * real) / counts.clamp(min=1)
        filled = counts.squeeze(-1) > 0
        both = filled[:, :, None] & filled[:, None, :]
        empty = torch.where(places[:, None] == places, 0.0, NEVER)
        shares = torch.where(both, self.sort(self.into(means).relu()), empty)
        for _ in range(self.rounds):
            shares = shares.log_softmax(-1).log_softmax(-2)
        return shares, filled


def sorted_blocks(shares: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each block, in their order, its scores [B, N] of the blocks that are still free, and the best [B].

    The best ones are a permutation. Blocks with tokens never choose one without: these are as many as there are rows.
    """
    places = torch.arange(shares.shape[-1], device=shares.device)
    free = torch.zeros_like(shares[:, 0])
    for row in shares.unbind(1):
        scores = row + free
        best = scores.argmax(-1)
        yield scores, best
        free = free.masked_fill(places == best[:, None], NEVER)
