"""The encoder: every self-attention it can have, one class per mechanism, and the stack."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fatdeploy.export.reference.attention import (
    FeatureMap,
    Scores,
    Visible,
    masked_softmax,
    merge_heads,
    split_heads,
)
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.layers import FeedForward, Residual, SelfAttention, norm_of
from fatdeploy.export.reference.positions import layer_relative, stack_relative, with_relative
from fatdeploy.export.reference.seams import seams


@dataclass(frozen=True)
class Source:
    """What all layers of the encoder read from the source, computed once."""

    valid: Tensor  # [B, S], True = a real token
    embedded: Tensor  # [B, S, M], x̂ of the slow attention
    visible: Visible


def allowed_keys(config: ModelConfig, valid: Tensor) -> Tensor:
    """Return which keys each query sees, [B, 1 or H, 1 or S, S]: mask of the attention, direction, padding."""
    attention = config.encoder_attention
    kinds = attention if isinstance(attention, tuple) else (attention,)
    if config.encoder_direction == "both" and not {"local", "strided", "global_tokens"}.intersection(kinds):
        return valid[:, None, None, :]
    i = torch.arange(valid.shape[1], device=valid.device)[:, None]
    j = i.T
    masks = {
        "local": (i - j).abs() <= config.window,
        "strided": (i - j) % config.stride == 0,
        "global_tokens": (i < config.n_global_tokens) | (j < config.n_global_tokens) | (i == j),
    }
    everything = torch.ones_like(masks["local"])
    direction = {"both": everything, "left_to_right": j <= i, "right_to_left": j >= i}[config.encoder_direction]
    pattern = torch.stack([masks.get(kind, everything) & direction for kind in kinds])  # [1 or H, S, S]
    # A padded query sees everything. Its result is never used, but a softmax over nothing would be NaN, and a weight of
    # 0 times NaN is NaN.
    return (pattern & valid[:, None, None, :]) | ~valid[:, None, :, None]


class SoftmaxAttention(SelfAttention):
    """``scaled_dot``, ``dot``, ``additive`` and the masks over ``scaled_dot``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.encoder_heads)
        self.scores = Scores(config.encoder_attention, config.encoder_heads)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, source: Source) -> Tensor:
        mixed: Tensor = self.out(seams().attend(self.qkv(h), self.scores, source.visible, self.dropout))
        return mixed


class SlowAttention(nn.Module):
    """Slow Multi-Head Attention: queries from the embedded source, keys and values from the layer below."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.longest = config.max_source
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        heads = config.encoder_heads
        self.turn_queries = nn.Parameter(torch.zeros(heads.count, heads.width, heads.width))
        self.turn_keys = nn.Parameter(torch.zeros(heads.count, heads.width, heads.width))
        self.gate = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, source: Source) -> Tensor:
        if seams().folds:
            q = linear(source.embedded, *self._turned(self.q, self.turn_queries))
            k, v = linear(h, *self._turned(self.kv, self.turn_keys)).chunk(2, -1)
            a, c = (part.view(*part.shape[:2], self.heads, -1) for part in (q, k))  # [B, S, H, D]
        else:
            q, (k, v) = self.q(source.embedded), self.kv(h).chunk(2, -1)
            a, c = (
                (split_heads(part, self.heads) @ turn.transpose(-1, -2)).transpose(1, 2)
                for part, turn in ((q, self.turn_queries), (k, self.turn_keys))
            )
        weights = seams().weights(source.visible, seams().slow_scores(a, c, self.longest))
        mixed = merge_heads(self.dropout(weights) @ split_heads(v, self.heads))
        gated: Tensor = self.out(mixed * self.gate(source.embedded).sigmoid())
        return gated

    def _turned(self, projection: nn.Linear, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a projection with the first M outputs multiplied by each head's matrix."""
        width = turn.shape[0] * turn.shape[1]
        weight, bias = projection.weight, projection.bias
        turned = (turn @ weight[:width].view(*turn.shape[:2], -1)).flatten(0, 1)
        return (
            torch.cat([turned, weight[width:]]),
            torch.cat([(turn @ bias[:width].view(*turn.shape[:2], 1)).flatten(), bias[width:]]),
        )


class LinformerAttention(SoftmaxAttention):
    """Keys and values projected along the source to a fixed number of rows, shared by all heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.shorten_keys = nn.Parameter(torch.zeros(config.linformer_rows, config.max_source))
        self.shorten_values = nn.Parameter(torch.zeros(config.linformer_rows, config.max_source))

    def forward(self, h: Tensor, source: Source) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        real, length = source.valid[..., None], h.shape[1]
        k, v = self.shorten_keys[:, :length] @ (k * real), self.shorten_values[:, :length] @ (v * real)
        q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
        mixed: Tensor = self.out(merge_heads(self.dropout(self.scores(q, k).softmax(-1)) @ v))
        return mixed


class CompressedAttention(SoftmaxAttention):
    """Keys and values through a convolution with kernel = stride = r: ceil(S / r) rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.ratio = config.compression
        self.compress_keys = nn.Conv1d(config.width, config.width, self.ratio, stride=self.ratio)
        self.compress_values = nn.Conv1d(config.width, config.width, self.ratio, stride=self.ratio)

    def forward(self, h: Tensor, source: Source) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        k, v = (self._compressed(part, source.valid, conv) for part, conv in self._pairs(k, v))
        valid = nn.functional.pad(source.valid, (0, self._missing(h))).view(h.shape[0], -1, self.ratio).any(-1)
        q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
        weights = masked_softmax(self.scores(q, k), valid[:, None, None, :])
        mixed: Tensor = self.out(merge_heads(self.dropout(weights) @ v))
        return mixed

    def _pairs(self, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, nn.Conv1d], tuple[Tensor, nn.Conv1d]]:
        return (k, self.compress_keys), (v, self.compress_values)

    def _missing(self, x: Tensor) -> int:
        return -x.shape[1] % self.ratio

    def _compressed(self, x: Tensor, valid: Tensor, conv: nn.Conv1d) -> Tensor:
        padded = nn.functional.pad((x * valid[..., None]).transpose(1, 2), (0, self._missing(x)))
        compressed: Tensor = conv(padded).transpose(1, 2)
        return compressed


class LinearAttention(SelfAttention):
    """Attention through feature maps; scores are masked in one direction, and never computed in both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.encoder_heads)
        self.both = config.encoder_direction == "both"
        self.features = FeatureMap(config, config.encoder_heads)

    def forward(self, h: Tensor, source: Source) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(h).chunk(3, -1))
        q, k = self.features.queries(q), self.features.keys(k, source.valid)
        v = v * source.valid[:, None, :, None]
        if self.both:
            sums, normaliser = q @ (k.transpose(-1, -2) @ v), q @ k.sum(2)[..., None]
        else:
            scores = (q @ k.transpose(-1, -2)) * source.visible.allowed
            sums, normaliser = scores @ v, scores.sum(-1, keepdim=True)
        mixed: Tensor = self.out(merge_heads(self.features.quotient(sums, normaliser)))
        return mixed


class SynthesizerAttention(nn.Module):
    """Weights without comparison: learned per pair of positions (``random``) or from the query only (``dense``)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.values = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.dense = config.synthesizer == "dense"
        if self.dense:
            self.into = nn.Linear(config.width, config.width)
            self.scores = nn.Parameter(torch.zeros(config.heads, config.max_source, config.encoder_heads.width))
            self.bias = nn.Parameter(torch.zeros(config.heads, config.max_source))
        else:
            self.scores = nn.Parameter(torch.zeros(config.heads, config.max_source, config.max_source))

    def forward(self, h: Tensor, source: Source) -> Tensor:
        length = h.shape[1]
        if self.dense:
            inner = split_heads(self.into(h).relu(), self.heads)
            scores = inner @ self.scores[:, :length].transpose(-1, -2) + self.bias[:, None, :length]
        else:
            scores = self.scores[:, :length, :length]
        weights = self.dropout(source.visible.weights(scores))
        mixed: Tensor = self.out(merge_heads(weights @ split_heads(self.values(h), self.heads)))
        return mixed


_ATTENTIONS: dict[object, type[nn.Module]] = {
    "slow": SlowAttention,
    "linformer": LinformerAttention,
    "compressed": CompressedAttention,
    "linear": LinearAttention,
    "synthesizer": SynthesizerAttention,
}


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.residual = Residual(config, relu=config.attention_relu)
        self.attention = _ATTENTIONS.get(config.encoder_attention, SoftmaxAttention)(config)
        self.ffn = FeedForward(config, config.ffn_width)
        self.relative = layer_relative(config, config.encoder_heads, config.max_source)

    def forward(self, x: Tensor, source: Source) -> Tensor:
        if self.relative is not None:
            at = torch.arange(x.shape[1], device=x.device)
            source = replace(source, visible=with_relative(source.visible, self.relative, at, at))
        x = self.residual.leave(x, self.attention(self.residual.enter(x), source))
        mixed: Tensor = self.ffn(x)
        return mixed


class Encoder(nn.Module):
    """The stack; returns the outputs that decoder layers project their keys and values from."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = norm_of(config) if config.norm == "pre" else None
        self.query_norm = norm_of(config) if config.encoder_attention == "slow" and config.norm == "pre" else None
        self.relative = stack_relative(config, config.encoder_heads, config.max_source)

    def forward(self, x: Tensor, valid: Tensor) -> list[Tensor]:
        """Return the outputs that ``cross_wiring`` needs, in order, through the final norm if there is one."""
        at = torch.arange(x.shape[1], device=x.device)
        source = Source(
            valid=valid,
            embedded=x if self.query_norm is None else self.query_norm(x),
            visible=with_relative(Visible(allowed_keys(self.config, valid), None), self.relative, at, at),
        )
        outputs = []
        for layer in self.layers:
            x = layer(x, source)
            outputs.append(x)
        wanted = outputs[-1:] if self.config.cross_wiring == "last" else outputs
        return wanted if self.norm is None else [self.norm(output) for output in wanted]
