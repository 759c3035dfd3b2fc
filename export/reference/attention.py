"""The arithmetic that attentions share: heads, masks, scores, feature maps, recurrent state.

Axes everywhere in the reference: B sources, R rows (B times the rows per source), S source positions, T target
positions, t positions of one call, I queries, J keys, H heads, D head width, M = H·D, F features, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.config import Features, HeadShape, ModelConfig

# A pairwise attention needs memory for one block [block, B, H, I, J]. At B = 4, H = 8, S = 512 a feature has 34 MB:
# eight features and the sums need about 0.35 GB, sixteen would need more than 0.6 GB and save 6 % of the time.
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
    """Return the softmax over the allowed keys; all others have a weight of exactly 0."""
    return scores.masked_fill(~allowed, -math.inf).softmax(-1)


def summed_over_features(queries: Tensor, keys: Tensor, term: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Return Σ_d term(queries_id + keys_jd) as [B, H, I, J], computed in blocks of features.

    Features are the first axis of a block: sums over whole planes are 3 to 5 times faster than over a short last axis.
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
    """√(Σ_d relu(a_id + c_jd)² + 1e-6) of all pairs, with its own backward pass.

    The gradient is relu(a + c) over the norm, summed over keys or queries: two products with tensors that the forward
    pass computes anyway. Autograd would keep three tensors [B, H, I, J, D], this keeps one. For the short sequences of
    training.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor) -> Tensor:
        """Return [B, H, I, J] from queries [B, H, I, D] and keys [B, H, J, D]."""
        pairs = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).relu_()
        norms = (pairs.unsqueeze(-2) @ pairs.unsqueeze(-1)).squeeze(-1).squeeze(-1).add_(1e-6).sqrt_()
        ctx.save_for_backward(pairs, norms)
        return norms

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of queries and keys."""
        pairs, norms = ctx.saved_tensors
        shares = (gradients[0] / norms).unsqueeze(-1)  # [B, H, I, J, 1]
        query_gradients = (pairs.mT @ shares).squeeze(-1)
        key_gradients = (pairs.transpose(2, 3).mT @ shares.transpose(2, 3)).squeeze(-1)
        return query_gradients, key_gradients


class Scores(nn.Module):
    """Scores of queries and keys: ``dot``, ``additive``, or ``scaled_dot`` for any other kind."""

    def __init__(self, kind: str | tuple[str, ...], heads: HeadShape) -> None:
        super().__init__()
        self.heads = heads.count
        self.scale = 1.0 if kind == "dot" else 1.0 / math.sqrt(heads.width)
        self.vectors = nn.Parameter(torch.zeros(heads.count, heads.width)) if kind == "additive" else None

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return [B, H, …, I, J] from [B, H, …, I, D] and [B, H, …, J, D]."""
        if self.vectors is None:
            return (queries * self.scale) @ keys.transpose(-1, -2)
        vectors = self.vectors.T.reshape(-1, 1, self.heads, *[1] * (queries.ndim - 2))  # [D, 1, H, …, 1, 1]
        return summed_over_features(queries, keys, lambda pairs, block: pairs.tanh_() * vectors[block])


@dataclass(frozen=True)
class Distances:
    """Vectors per distance of a key from a query, P of them, which are added to keys and to values."""

    keys: Tensor  # [H, P, D]
    values: Tensor  # [H, P, D]
    places: Tensor  # [I, J, P], 1 at the place of a pair's distance, else 0

    def scores(self, queries: Tensor) -> Tensor:
        """Return what the vectors add to scores, [B, H, I, J], of queries [B, H, I, D]."""
        return torch.einsum("bhip,ijp->bhij", queries @ self.keys.transpose(-1, -2), self.places)

    def mixed(self, weights: Tensor) -> Tensor:
        """Return what the vectors add to attended values, [B, H, I, D], with weights [B, H, I, J]."""
        return torch.einsum("bhij,ijp->bhip", weights, self.places) @ self.values


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees, and what is added to its scores; computed once for all layers of a stack."""

    allowed: Tensor  # bool, broadcasts to [B, H, I, J]
    relative: Tensor | None  # [H, I, J]
    causal: bool = False  # only the future is hidden
    distances: Distances | None = None

    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights of scores [B, H, I, J]."""
        return masked_softmax(scores if self.relative is None else scores + self.relative, self.allowed)


def attended(
    qkv: tuple[Tensor, Tensor, Tensor], scores: Scores, visible: Visible, dropout: nn.Dropout | None = None
) -> Tensor:
    """Return attention [B, I, M] of queries [B, H, I, D] to keys and values [B, H, J, D]."""
    queries, keys, values = qkv
    products, distances = scores(queries, keys), visible.distances
    if distances is not None:
        products = products + distances.scores(queries * scores.scale)
    weights = visible.weights(products)
    if dropout is not None:
        weights = dropout(weights)
    mixed = weights @ values
    return merge_heads(mixed if distances is None else mixed + distances.mixed(weights))


class FeatureMap(nn.Module):
    """φ of a linear attention, from [B, H, L, D] to [B, H, L, F]; zero for padded keys, so that they add nothing."""

    projection: Tensor

    def __init__(self, config: ModelConfig, heads: HeadShape) -> None:
        super().__init__()
        self.kind: Features = config.features
        self.smallest_normaliser = 1e-3 if self.kind == "random" else 0.0
        # Whether φ maps each number on its own, so that heads need not be split first.
        self.elementwise = self.kind == "elu"
        self.has_projection = self.kind in ("random", "performer")
        if self.has_projection:
            # Not learned, but saved with the weights: another draw would be another model.
            self.register_buffer("projection", torch.zeros(heads.count, config.random_features, heads.width))

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
        """Return sums [B, H, I, D] over normaliser [B, H, I, 1], which is kept away from zero."""
        denominator = normaliser + 1e-6
        if self.smallest_normaliser:
            denominator = denominator.clamp(min=self.smallest_normaliser)
        return sums / denominator


def linear_state(queries: Tensor, keys: Tensor, values: Tensor, state: LayerState) -> tuple[Tensor, Tensor, LayerState]:
    """Return sums, normaliser and the next state of a causal linear attention over features [R, H, t, F].

    Earlier calls come from the state, this call from its own lower triangle; the state is updated once.
    """
    inside = (queries @ keys.transpose(-1, -2)).tril()  # [R, H, t, t]
    sums, normaliser = inside @ values, inside.sum(-1, keepdim=True)
    if not state:
        return sums, normaliser, ()
    old_sums, old_normaliser = state
    sums = sums + queries @ old_sums
    normaliser = normaliser + queries @ old_normaliser.unsqueeze(-1)
    return sums, normaliser, (old_sums + keys.transpose(-1, -2) @ values, old_normaliser + keys.sum(2))
