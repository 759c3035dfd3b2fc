"""What the decoder keeps of the source, and the attentions to it that are a softmax of scores."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.attention import LayerState, Scores, masked_softmax, split_heads
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.seams import Added, Outputs, seams

NOTHING = torch.empty(0)


@dataclass
class SourceMemory:
    """All that the decoder needs from the source; keys and values are projected once, not per step or beam."""

    source: Tensor = NOTHING  # [B, S] ids
    valid: Tensor = NOTHING  # [B, S], True = a real token
    keys: list[Tensor] = field(default_factory=list)  # per attention to the source, [B, H, S, D]
    values: list[Tensor] = field(default_factory=list)
    contexts: list[LayerState] = field(default_factory=list)  # per recurrent layer, what each step reads, [B, M]
    starts: list[LayerState] = field(default_factory=list)  # per layer, its state before the first token, if not zero
    length_logits: Tensor | None = None  # [B, max_target], only for parallel models with a length head


class CrossAttention(nn.Module):
    """``scaled_dot``, ``dot`` or ``additive`` attention of the target to the source."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.target_heads.count
        self.q = nn.Linear(config.width, config.attention_width, config.biases)
        self.kv = nn.Linear(config.width, 2 * config.attention_width, config.biases)
        self.out = nn.Linear(config.attention_width, config.width, config.biases)
        self.scores = Scores(config.cross_attention, config.target_heads)
        self.plain = True  # a softmax of the scores plus ``added``
        self.dropout = nn.Dropout(config.dropout)

    def project(self, encoded: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the keys and values [B, H, S, D] of an encoder output and the embedded source."""
        k, v = (split_heads(part, self.heads) for part in self.kv(encoded).chunk(2, -1))
        return k, v

    def memory_matrices(self) -> tuple[Tensor, Tensor]:
        """Return the matrices that keys and values are made with."""
        keys, values = self.kv.weight.chunk(2)
        return keys, values

    def added(self, memory: SourceMemory, at: Tensor) -> Added | None:  # noqa: ARG002
        """Return what is added to the scores before the softmax, if anything."""
        return None

    def weigh(self, queries: Tensor, keys: Tensor, memory: SourceMemory, at: Tensor) -> Tensor:  # noqa: ARG002
        """Return the weights [B, H, n, t, S] of queries at the target positions ``at``, [t] or [R, t]."""
        return masked_softmax(self.scores(queries, keys), memory.valid[:, None, None, None, :])

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:  # noqa: ARG002
        """Return the sub-layer's output from the attended values."""
        mixed: Tensor = self.out(attended)
        return mixed

    def forward(
        self, x: Tensor, memory: SourceMemory, layer: int, at: Tensor, weigh: bool, asking: Tensor | None = None
    ) -> Outputs:
        """Return output [R, t, M] and, with ``weigh``, weights [R, H, t, S]; n rows share the memory of a source.

        Queries are made of ``asking`` if it is not x.
        """
        q, keys, values = self.q(x if asking is None else asking), memory.keys[layer], memory.values[layer]
        if self.plain and not weigh:
            fused = seams().attend_memory(q, (keys, values), self.scores, memory.valid, self.added(memory, at))
            if fused is not None:
                return (self.mix(x, fused),)
        queries = seams().by_source(q, memory.valid)  # [B, n, t, M]
        queries = queries.view(*queries.shape[:-1], self.heads, -1).permute(0, 3, 1, 2, 4)
        weights = self.weigh(queries, keys[:, :, None], memory, at)
        attended = (self.dropout(weights) @ values[:, :, None]).permute(0, 2, 3, 1, 4)  # [B, n, t, H, D]
        y = self.mix(x, seams().by_row(attended, q))
        return (y, seams().weights_by_row(weights, x, memory.valid)) if weigh else (y,)
