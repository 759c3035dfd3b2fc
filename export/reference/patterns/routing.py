"""Clustered attention (``routing``): queries meet the keys of their own cluster."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import Scores
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.layers import SelfAttention
from fatdeploy.export.reference.patterns.decisions import clearness, narrowed, preferring
from fatdeploy.export.reference.seams import seams

if TYPE_CHECKING:
    from fatdeploy.export.reference.encoder import Source


class RoutingAttention(SelfAttention):
    """``scaled_dot`` among queries and keys with the same nearest centroid; a query always sees its own position.

    Queries and keys are clustered apart, by the same learned centroids of length 1, and all heads of a layer together.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.encoder_heads)
        self.scores = Scores(config.encoder_attention, config.encoder_heads)
        self.centroids = nn.Parameter(torch.zeros(config.clusters, config.attention_width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, source: "Source") -> Tensor:
        qkv = self.qkv(h)
        queries, keys = self._similarities(qkv)
        at = torch.arange(h.shape[1], device=h.device)
        same = queries.argmax(-1)[:, :, None] == keys.argmax(-1)[:, None, :]
        visible = narrowed(source.visible, same | (at[:, None] == at), source.valid)
        if self.training:
            # An arg-max has no gradient. This adds 0, and its gradient moves queries, keys and centroids of pairs that
            # should attend more to one another into one cluster (straight through).
            agreement = queries.softmax(-1) @ keys.softmax(-1).transpose(-1, -2)
            visible = preferring(visible, agreement - agreement.detach())
        mixed: Tensor = self.out(seams().attend(qkv, self.scores, visible, self.dropout))
        return mixed

    def margins(self, h: Tensor, source: "Source") -> Tensor:
        """Return how clearly each row's closest query or key is nearest to its centroid, [B]."""
        decides = torch.cat([source.valid] * 2, 1)
        return clearness(torch.cat(self._similarities(self.qkv(h)), 1), decides)

    def _similarities(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of queries and of keys with every centroid, [B, S, C] each."""
        q, k, _ = qkv.chunk(3, -1)
        directions = functional.normalize(self.centroids, dim=-1).T
        return q @ directions, k @ directions
