"""Attentions to the source that depend on where they looked before: location-aware and monotonic.

Every step needs the weights of the step before it, so a call on several tokens goes through them one after another.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import LayerState, Scores, masked_softmax
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.cross.attention import CrossAttention, SourceMemory
from fatdeploy.export.reference.cross.decisions import report_margin
from fatdeploy.export.reference.seams import Outputs, seams

# Standard deviation of what is added to monotonic scores in training (Raffel et al., 2017): a model that wants to be
# sure must choose scores far from zero, and then the hard choices of inference are those that it was trained with.
CHOICE_NOISE = 1.0


class FollowingAttention(CrossAttention):
    """An attention whose state says where each row and head has looked."""

    def started(self, rows: int, like: Tensor, length: int) -> LayerState:
        """Return the state before the first token, for sources of a length."""
        raise NotImplementedError

    def followed(self, queries: Tensor, keys: Tensor, valid: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [B, H, n, t, S] and the next state, of queries [B, H, n, t, D] and the state [B, H, n, …]."""
        raise NotImplementedError

    def expected(self, queries: Tensor, keys: Tensor, valid: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the weights of a whole target in training if they are others than those of steps."""
        return None

    def forward(
        self,
        x: Tensor,
        memory: SourceMemory,
        layer: int,
        at: Tensor,  # noqa: ARG002
        weigh: bool,  # noqa: ARG002
        asking: Tensor | None = None,  # noqa: ARG002
        past: LayerState = (),
    ) -> Outputs:
        """Return output [R, t, M], weights [R, H, t, S] and the next state; a call on a whole target has no past."""
        q, keys, values = self.q(x), memory.keys[layer], memory.values[layer]
        queries = seams().by_source(q, memory.valid)
        queries = queries.view(*queries.shape[:-1], self.heads, -1).permute(0, 3, 1, 2, 4)
        state = past or self.started(len(x), q, memory.valid.shape[1])
        weights = self.expected(queries, keys, memory.valid) if self.training and not past else None
        if weights is None:
            before = seams().by_source(state[0], memory.valid).transpose(1, 2)
            weights, after = self.followed(queries, keys, memory.valid, before)
            state = (seams().by_row(after.transpose(1, 2), state[0]),)
        attended = (self.dropout(weights) @ values[:, :, None]).permute(0, 2, 3, 1, 4)  # [B, n, t, H, D]
        y = self.mix(x, seams().by_row(attended, q))
        return y, seams().weights_by_row(weights, x, memory.valid), *(state if past else ())


class LocationAttention(FollowingAttention):
    """Location-aware attention: additive scores that also read the sum of all earlier weights around each position.

    s_tj = wᵀ tanh(q_t + k_j + Σ_d F_d c_{t-1, j+d}) with c_t = c_{t-1} + α_t, one w and one F per head.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        heads, self.window = config.target_heads, config.location_window
        self.scores = Scores("additive", heads)
        # Of all heads, in the layout of a convolution over the source that keeps heads and rows apart.
        self.filters = nn.Parameter(torch.zeros(heads.count * heads.width, 1, 1, 2 * self.window + 1))

    def started(self, rows: int, like: Tensor, length: int) -> LayerState:
        return (like.new_zeros(rows, self.heads, length),)

    def followed(self, queries: Tensor, keys: Tensor, valid: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        vectors, by_feature = self.scores.vectors, keys.transpose(2, 3)  # [B, H, D, S]
        assert vectors is not None  # noqa: S101 - additive scores have vectors

        # Axes of one are added inside: a loop that is traced takes all axes from outside for sizes that may vary.
        def advance(total: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
            looked = functional.conv2d(total, self.filters, padding=(0, self.window), groups=self.heads)
            looked = looked.unflatten(1, (self.heads, -1))  # [B, H, D, n, S]
            pairs = (by_feature[:, :, :, None] + looked + query.transpose(2, 3)[..., None]).tanh()
            weights = masked_softmax((pairs * vectors[..., None, None]).sum(2), valid[:, None, None])
            return total + weights, weights

        after, weights = seams().repeated(advance, before, queries.movedim(3, 0))
        return weights.movedim(0, 3), after


class MonotonicAttention(FollowingAttention):
    """Hard monotonic attention: each head stays where it is or moves on to the next position that its scores accept.

    A head reads the values of one position: the first one from its last position on whose score s_tj is at least 0, or
    the end of the source if there is none. In training, weights are the probabilities of these choices.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head_bias = nn.Parameter(torch.zeros(self.heads))
        self.far = config.max_source  # beyond every source

    def started(self, rows: int, like: Tensor, length: int) -> LayerState:  # noqa: ARG002
        return (torch.zeros(rows, self.heads, dtype=torch.int64, device=like.device),)

    def followed(self, queries: Tensor, keys: Tensor, valid: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        scores, real, last = self._scored(queries, keys, valid)
        j = torch.arange(valid.shape[1], device=valid.device)
        accepted = torch.where(((scores >= 0) & real) | last, j, self.far).movedim(3, 0)  # [t, B, H, n, S]

        def advance(index: Tensor, accepts: Tensor) -> tuple[Tensor, Tensor]:
            reached = (accepts + self.far * (accepts < index).to(accepts.dtype)).amin(0)
            return reached, reached.clone()  # a graph cannot return one tensor twice

        # Rows and heads are one axis, the last: other layouts have strides of a varying size, which torch would trace.
        flat = accepted.flatten(1, 3).transpose(1, 2)  # [t, S, B·H·n]
        after, chosen = seams().repeated(advance, before.flatten(), flat)
        reached = seams().by_row(chosen, accepted[..., 0]).movedim(0, 3)[..., None]  # [B, H, n, t, 1]
        report_margin(lambda: _margin(scores, reached, before, real & ~last))
        return (j == reached).to(scores.dtype), seams().by_row(after, before)

    def expected(self, queries: Tensor, keys: Tensor, valid: Tensor) -> Tensor:
        """Return the probability of each choice, step by step.

        α_tj = p_tj Σ_{k ≤ j} α_{t-1,k} Π_{k ≤ l < j} (1 - p_tl), with products as exponentials of differences of sums:
        every exponent is at most 0, where quotients of products would divide by numbers that vanish.
        """
        scores, real, last = self._scored(queries, keys, valid)
        scores = scores + CHOICE_NOISE * torch.randn_like(scores)
        accepted = scores.sigmoid().masked_fill(~real, 0.0).masked_fill(last, 1.0)
        passed = functional.logsigmoid(-scores).masked_fill(~real | last, 0.0)
        before = passed.cumsum(-1) - passed  # log of the probability to pass all positions before j
        ways = before[..., None, :] - before[..., :, None]  # [B, H, n, t, k, j]
        later = torch.ones(ways.shape[-2:], dtype=torch.bool, device=ways.device).triu()
        ways = ways.masked_fill(~later, -torch.inf).exp()
        weights = functional.one_hot(torch.zeros_like(valid[:, :1], dtype=torch.int64), valid.shape[1])
        here = weights[:, None, None].to(scores.dtype).expand(*scores.shape[:3], 1, -1)
        steps = []
        for accepts, way in zip(accepted.unbind(3), ways.unbind(3), strict=True):
            here = accepts[..., None, :] * (here @ way)
            steps.append(here)
        return torch.cat(steps, 3)

    def _scored(self, queries: Tensor, keys: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores [B, H, n, t, S], which positions are real, and which is the last real one."""
        scores = self.scores(queries, keys[:, :, None]) + self.head_bias[:, None, None, None]
        j, lengths = torch.arange(valid.shape[1], device=valid.device), valid.sum(1, keepdim=True)
        last = (j == lengths - 1)[:, None, None, None]
        return scores, valid[:, None, None, None], last


def _margin(scores: Tensor, reached: Tensor, before: Tensor, chosen: Tensor) -> Tensor:
    """Return how far from 0 the scores are that decided, relative to the largest score (at least 1), per row."""
    j = torch.arange(scores.shape[-1], device=scores.device)
    begins = torch.cat([before[..., None, None], reached[..., :-1, :]], 3)
    sizes = scores.abs().masked_fill(~chosen, 0.0)
    decided = sizes.masked_fill(~(chosen & (j >= begins) & (j <= reached)), torch.inf)
    margins = decided.amin((1, 3, 4)) / sizes.amax((1, 3, 4)).clamp(min=1.0)  # [B, n]
    return margins.flatten()
