"""The attention-free transformer (``aft``): averages of values, weighted by keys and learned position biases."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import LayerState, merge_heads, split_heads
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.layers import SelfAttention
from fatdeploy.export.reference.seams import Position, seams

if TYPE_CHECKING:
    from fatdeploy.export.reference.decoder import Call
    from fatdeploy.export.reference.encoder import Source

# Keys are cut at ± this before they become exponents: sums over 100,000 positions stay below 1e19, and a normaliser
# above 1e-14, so that neither needs a running maximum, which would be a third tensor of state.
LARGEST_KEY = 30.0


def _exponential(keys: Tensor) -> Tensor:
    return keys.clamp(-LARGEST_KEY, LARGEST_KEY).exp()


class PositionMixing(SelfAttention):
    """The encoder's: σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij), with w for every pair of positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.encoder_heads)
        self.position_scores = nn.Parameter(torch.zeros(config.max_source, config.max_source))

    def forward(self, h: Tensor, source: "Source") -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        length = h.shape[1]
        # Normalised over the keys that each query sees: what this divides by cancels in the quotient.
        weights = seams().weights(source.visible, self.position_scores[None, :length, :length])[:, 0]  # [B, S, S]
        shares = _exponential(k)
        mixed: Tensor = self.out(q.sigmoid() * ((weights @ (shares * v)) / (weights @ shares)))
        return mixed


class DecayingMixing(SelfAttention):
    """The decoder's, with w_ij = −λ·(i − j), one λ > 0 per head: its state is two sums that decay."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.target_heads)
        self.decay = nn.Parameter(torch.zeros(config.target_heads.count))

    def forward(self, x: Tensor, state: LayerState, call: "Call", position: Position) -> tuple[Tensor, LayerState]:  # noqa: ARG002
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        rates = functional.softplus(self.decay)[:, None, None]
        # Exponents of the future would be positive; they are cut before the exponential, and then left out.
        inside = (-rates * (at[:, None] - at).clamp(min=0)).exp().tril()  # [H, t, t]
        shares = _exponential(k)
        sums, normaliser = inside @ (shares * v), inside @ shares  # [R, H, t, D]
        if state:
            before = (-rates * (at[:, None] + 1)).exp()  # [H, t, 1]
            sums = sums + before * state[0].transpose(-1, -2)
            normaliser = normaliser + before * state[1][:, :, None]
            state = sums[:, :, -1, :, None], normaliser[:, :, -1]  # [R, H, D, 1] and [R, H, D]
        return self.out(merge_heads(q.sigmoid() * (sums / normaliser))), state
