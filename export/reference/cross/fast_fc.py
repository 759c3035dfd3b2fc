"""Fast Fully Connected Softmax: attention to the source, beside self-attention or in its place."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import LayerState, Scores, masked_softmax, split_heads
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.cross.attention import CrossAttention, SourceMemory
from fatdeploy.export.reference.layers import norm_of
from fatdeploy.export.reference.seams import Added, seams, token_scores


class FastFullyConnected(CrossAttention):
    """Fast Fully Connected Softmax: a learned score per pair of positions, tanh weights, a gate, no output bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.form = config.fc_softmax
        self.plain = self.form == "softmax"
        self.by_token = config.fc_table == "vocabulary"
        columns = config.source_vocab_size or config.vocab_size if self.by_token else config.max_source
        self.position_scores = nn.Parameter(torch.zeros(config.max_target, columns))
        if not config.fc_scale:
            self.scores = Scores("dot", config.target_heads)
        self.embedded_keys = config.fc_keys == "embedded"
        if self.embedded_keys:
            del self.kv
            self.key_norm = norm_of(config) if config.norm == "pre" else nn.Identity()
            self.keys, self.values = (nn.Linear(config.width, config.width) for _ in range(2))
        self.head_bias = nn.Parameter(torch.zeros(self.heads))
        self.gate = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def project(self, encoded: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        if not self.embedded_keys:
            return super().project(encoded, embedded)
        keys, values = self.keys(self.key_norm(embedded)), self.values(encoded)
        return split_heads(keys, self.heads), split_heads(values, self.heads)

    def memory_matrices(self) -> tuple[Tensor, Tensor]:
        return (self.keys.weight, self.values.weight) if self.embedded_keys else super().memory_matrices()

    def added(self, memory: SourceMemory, at: Tensor) -> Added:
        # A head's bias is the same for all keys, so it does not change a softmax.
        return Added(self.position_scores, at, memory.source if self.by_token else None)

    def _position_scores(self, memory: SourceMemory, at: Tensor) -> Tensor:
        """Return U of target positions and the source, [t, S] or [B, 1, n or 1, t, S]."""
        if self.by_token:
            rows = at[None, None] if at.ndim == 1 else seams().by_source(at, memory.valid)
            return token_scores(self.position_scores, rows, memory.source[:, None])[:, None]
        scores = functional.embedding(at, self.position_scores)[..., : memory.valid.shape[1]]
        return scores if at.ndim == 1 else seams().by_source(scores, memory.valid)[:, None]

    def weigh(self, queries: Tensor, keys: Tensor, memory: SourceMemory, at: Tensor) -> Tensor:
        real = memory.valid[:, None, None, None, :]
        bias = self._position_scores(memory, at)
        scores = self.scores(queries, keys) + (bias + self.head_bias[:, None, None, None])
        if self.form == "softmax":
            return masked_softmax(scores, real)
        shown = scores.masked_fill(~real, -torch.inf)
        if self.form == "tanh":
            shrink = (-shown.logsumexp(-1, keepdim=True)).exp()
        else:
            # 1 / (1 + Σ exp) is the softmax weight of an additional score of 0. It comes first, so that the softmax
            # sums the others in the same order, however many keys are padding.
            shrink = functional.pad(shown, (1, 0)).softmax(-1)[..., :1]
        # The mask comes after the tanh: tanh(-inf) is -1, not 0.
        weights: Tensor = scores.tanh() * shrink * real
        return weights

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:
        gated: Tensor = self.out(self.gate(x).sigmoid() * attended)
        return gated


class PreviousState(nn.Module):
    """In the place of self-attention: what an attention to the source reads at the position before.

    Before the first token this is tanh of a layer over the source's context. Skipped positions leave nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.start = nn.Linear(config.width, config.width)

    def forward(self, h: Tensor, past: LayerState, last: Tensor | None) -> tuple[Tensor, LayerState]:
        """Return what each position's query is made of, [R, t, M], and what the next call's first one is, [R, M].

        ``last`` [R, t + 1] are the numbers of ``last_run``; None if nothing is skipped.
        """
        vectors = torch.cat([past[0][:, None], h], 1)
        if last is None:
            return vectors[:, :-1], (vectors[:, -1],)
        before = vectors.gather(1, last[:, :-1, None].expand_as(h))
        following = vectors.gather(1, last[:, -1, None, None].expand(-1, -1, h.shape[2]))
        return before, (following.squeeze(1),)


def last_run(runs: Tensor) -> Tensor:
    """Return for the first 0 … t positions [R, t + 1] the number of the last that was not skipped, 0 for none."""
    at = torch.arange(runs.shape[1] + 1, device=runs.device)
    numbers = (at[1:] * (runs[..., 0] > 0))[:, None]  # [R, 1, t]
    return torch.where(at[1:] <= at[:, None], numbers, 0).amax(-1)
