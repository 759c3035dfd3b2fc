"""The arithmetic that attentions share: heads, masks, scores, feature maps, recurrent state.

Axes everywhere in the reference: B sources, R rows (B times the rows a source has), S source positions, T target
positions, t positions of one call, I queries, J keys, H heads, D head width, M = H·D, F features, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.config import Features, ModelConfig

# Memory of a pairwise attention is one block of [block, B, H, I, J]. At B = 4, H = 8, S = 512 a feature is 34 MB: eight
# features and the sums stay near 0.35 GB, sixteen would need more than 0.6 GB and save 6 % of the time.
FEATURE_BLOCK = 8

# A layer's share of the decoder state: (keys, values), (sums, normaliser) or nothing.
LayerState = tuple[Tensor, ...]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [B, L, M] as [B, H, L, D]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Return [B, H, L, D] as [B, L, M]."""
    return x.transpose(1, 2).flatten(2)


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax over what is allowed; everything else has a weight of exactly 0."""
    return scores.masked_fill(~allowed, -math.inf).softmax(-1)


def summed_over_features(queries: Tensor, keys: Tensor, term: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Return Σ_d term(queries_id + keys_jd) as [B, H, I, J], block by block of features.

    Features lead inside a block: sums then run over whole planes, 3 to 5 times faster than over a short last axis.
    """
    queries, keys = queries.movedim(-1, 0).unsqueeze(-1), keys.movedim(-1, 0).unsqueeze(-2)
    total: Tensor | None = None
    for start in range(0, len(queries), FEATURE_BLOCK):
        block = slice(start, start + FEATURE_BLOCK)
        part = term(queries[block] + keys[block], block).sum(0)
        total = part if total is None else total + part
    assert total is not None  # noqa: S101 - a head has at least one feature
    return total


def slow_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return e_ij = √(Σ_d relu(a_id + c_jd)² + 1e-6) / √D as [B, H, I, J]."""
    if torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad):
        norms: Tensor = PositiveNorms.apply(queries, keys)  # type: ignore[no-untyped-call]
    else:
        norms = (summed_over_features(queries, keys, lambda pairs, _: pairs.relu_().square_()) + 1e-6).sqrt()
    return norms / math.sqrt(queries.shape[-1])


class PositiveNorms(torch.autograd.Function):
    """√(Σ_d relu(a_id + c_jd)² + 1e-6) of all pairs, with the backward pass written out.

    Its gradient is relu(a + c) over the norm, summed over keys or queries: two products with what the forward pass has
    anyway, where autograd would keep and read three tensors of [B, H, I, J, D]. Meant for the lengths that are trained
    on; one tensor of that size is kept.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor) -> Tensor:
        """Return [B, H, I, J] of queries [B, H, I, D] and keys [B, H, J, D]."""
        pairs = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).relu_()
        norms = (pairs.unsqueeze(-2) @ pairs.unsqueeze(-1)).squeeze(-1).squeeze(-1).add_(1e-6).sqrt_()
        ctx.save_for_backward(pairs, norms)
        return norms

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of queries and keys."""
        pairs, norms = ctx.saved_tensors
        shares = (gradients[0] / norms).unsqueeze(-1)  # [B, H, I, J, 1]
        of_queries = (pairs.mT @ shares).squeeze(-1)
        of_keys = (pairs.transpose(2, 3).mT @ shares.transpose(2, 3)).squeeze(-1)
        return of_queries, of_keys


class Scores(nn.Module):
    """Scores of queries against keys: ``scaled_dot``, ``dot`` or ``additive``; any other kind has the first."""

    def __init__(self, kind: str | tuple[str, ...], config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = 1.0 if kind == "dot" else 1.0 / math.sqrt(config.head_width)
        self.vectors = nn.Parameter(torch.zeros(config.heads, config.head_width)) if kind == "additive" else None

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return [B, H, …, I, J] from [B, H, …, I, D] and [B, H, …, J, D]."""
        if self.vectors is None:
            return (queries * self.scale) @ keys.transpose(-1, -2)
        vectors = self.vectors.T.reshape(-1, 1, self.heads, *[1] * (queries.ndim - 2))  # [D, 1, H, …, 1, 1]
        return summed_over_features(queries, keys, lambda pairs, block: pairs.tanh_() * vectors[block])


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees, and what is added to its scores: computed once for all layers of a stack."""

    allowed: Tensor  # bool, broadcasts to [B, H, I, J]
    relative: Tensor | None  # [H, I, J]
    causal: bool = False  # nothing but the future is hidden

    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights of scores [B, H, I, J]."""
        return masked_softmax(scores if self.relative is None else scores + self.relative, self.allowed)


class FeatureMap(nn.Module):
    """φ of a linear attention, from [B, H, L, D] to [B, H, L, F]; what a padded key must not add is set to zero."""

    projection: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind: Features = config.features
        self.smallest_normaliser = 1e-3 if self.kind == "random" else 0.0
        # Whether φ maps every number for itself, wherever its head and position stand.
        self.of_each_number = self.kind == "elu"
        self.has_projection = self.kind in ("random", "performer")
        if self.has_projection:
            # Fixed, not learned, but saved with the weights: another draw would be another model.
            self.register_buffer("projection", torch.zeros(config.heads, config.random_features, config.head_width))

    def queries(self, x: Tensor) -> Tensor:
        return x.softmax(-1) if self.kind == "softmax" else self._mapped(x)

    def keys(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return φ(k), zero where ``valid`` [B, L] is False."""
        if valid is None:
            return self._mapped(x)
        real = valid[:, None, :, None]
        if self.kind == "softmax":
            return x.masked_fill(~real, -math.inf).softmax(-2)
        return self._mapped(x) * real

    def _mapped(self, x: Tensor) -> Tensor:
        if self.kind == "elu":
            return functional.elu(x) + 1
        if self.kind == "random":
            angles = functional.normalize(x, dim=-1) @ self.projection.transpose(-1, -2)
            return torch.cat([angles.sin(), angles.cos()], -1) / math.sqrt(angles.shape[-1])
        x = x * x.shape[-1] ** -0.25
        exponents = x @ self.projection.transpose(-1, -2) - x.square().sum(-1, keepdim=True) / 2
        return exponents.exp() / math.sqrt(exponents.shape[-1])

    def quotient(self, sums: Tensor, normaliser: Tensor) -> Tensor:
        """Return sums [B, H, I, D] over normaliser [B, H, I, 1], kept away from zero."""
        away = normaliser + 1e-6
        return sums / (away.clamp(min=self.smallest_normaliser) if self.smallest_normaliser else away)


def linear_state(queries: Tensor, keys: Tensor, values: Tensor, state: LayerState) -> tuple[Tensor, Tensor, LayerState]:
    """Return sums, normaliser and the next state of a causal linear attention over features [R, H, t, F].

    What came before is read from the state, what is inside the call from its own lower triangle; S and z move once.
    """
    inside = (queries @ keys.transpose(-1, -2)).tril()  # [R, H, t, t]
    sums, normaliser = inside @ values, inside.sum(-1, keepdim=True)
    if not state:
        return sums, normaliser, ()
    old_sums, old_normaliser = state
    sums = sums + queries @ old_sums
    normaliser = normaliser + queries @ old_normaliser.unsqueeze(-1)
    return sums, normaliser, (old_sums + keys.transpose(-1, -2) @ values, old_normaliser + keys.sum(2))
