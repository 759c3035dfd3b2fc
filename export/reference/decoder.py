"""The decoder: self-attentions with incremental state, cross-attentions over projected memory, and the stack."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import (
    FeatureMap,
    LayerState,
    Scores,
    Visible,
    masked_softmax,
    split_heads,
)
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.layers import FeedForward, Residual, SelfAttention, norm_of
from fatdeploy.export.reference.positions import layer_relative, stack_relative
from fatdeploy.export.reference.seams import Added, Outputs, Position, seams

NOTHING = torch.empty(0)


@dataclass
class SourceMemory:
    """All that the decoder needs from the source; keys and values are projected once, not per step or beam."""

    source: Tensor = NOTHING  # [B, S] ids
    valid: Tensor = NOTHING  # [B, S], True = a real token
    keys: list[Tensor] = field(default_factory=list)  # per attention to the source, [B, H, S, D]
    values: list[Tensor] = field(default_factory=list)
    contexts: list[LayerState] = field(default_factory=list)  # per recurrent layer, what each step reads, [B, M]
    starts: list[LayerState] = field(default_factory=list)  # per recurrent layer, its state before the first token
    length_logits: Tensor | None = None  # [B, max_target], only for parallel models with a length head


@dataclass
class DecoderState:
    """The position (one for the whole batch, or one per row), and the tensors of each layer, over rows."""

    position: Position = 0
    layers: list[LayerState] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """What all layers of the decoder share in one call, computed once."""

    at: Tensor  # [t] or [R, t] positions of the call
    keys_at: Tensor  # [J] positions of the keys
    visible: Visible  # target positions [R or 1, 1, t, J]
    gate: Tensor | None  # [R, t, 1] of the hybrid forward pass, 1 = open, 0 = closed; None without one
    weights_of: frozenset[int]  # the layers whose cross weights are wanted


def allowed_keys(config: ModelConfig, at: Tensor, j: Tensor, tokens: Tensor) -> Tensor:
    """Return which target positions a query sees: the past, the window of ``local``, a row's length if parallel."""
    if config.parallel:
        return (tokens != config.pad_id)[:, None, None, :]
    distance = at[..., None] - j  # [t, J] or [R, t, J]
    allowed = distance >= 0
    if config.decoder_attention == "local":
        allowed = allowed & (distance <= config.window)
    return allowed[None, None] if at.ndim == 1 else allowed[:, None]


class CachedAttention(SelfAttention):
    """``scaled_dot``, ``dot``, ``additive``, ``local`` with key and value caches, and ``full`` without."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.target_heads)
        self.scores = Scores(config.decoder_attention, config.target_heads)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: LayerState, call: Call, position: Position) -> tuple[Tensor, LayerState]:
        qkv = self.qkv(x)
        if state:
            mixed, state = seams().attend_cached(qkv, self.scores, call.visible, state, position)
        else:
            mixed = seams().attend(qkv, self.scores, call.visible, self.dropout)
        return self.out(mixed), state


class RecurrentAttention(SelfAttention):
    """Causal ``linear`` attention: a state of constant size instead of caches."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.target_heads)
        self.features = FeatureMap(config, config.target_heads)

    def forward(self, x: Tensor, state: LayerState, call: Call, position: Position) -> tuple[Tensor, LayerState]:  # noqa: ARG002
        mixed, state = seams().attend_recurrent(self.qkv(x), self.features, self.heads, state)
        return self.out(mixed), state


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

    def project(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, D] of an encoder output."""
        k, v = (split_heads(part, self.heads) for part in self.kv(encoded).chunk(2, -1))
        return k, v

    def added(self, at: Tensor) -> Added | None:  # noqa: ARG002
        """Return what is added to the scores before the softmax, if anything."""
        return None

    def weigh(self, queries: Tensor, keys: Tensor, real: Tensor, at: Tensor) -> Tensor:  # noqa: ARG002
        """Return the weights [B, H, n, t, S] of queries at the target positions ``at``, [t] or [R, t]."""
        return masked_softmax(self.scores(queries, keys), real)

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:  # noqa: ARG002
        """Return the sub-layer's output from the attended values."""
        mixed: Tensor = self.out(attended)
        return mixed

    def forward(self, x: Tensor, memory: SourceMemory, layer: int, at: Tensor, weigh: bool) -> Outputs:
        """Return output [R, t, M] and, with ``weigh``, weights [R, H, t, S]; n rows share the memory of a source."""
        q, keys, values = self.q(x), memory.keys[layer], memory.values[layer]
        if self.plain and not weigh:
            fused = seams().attend_memory(q, (keys, values), self.scores, memory.valid, self.added(at))
            if fused is not None:
                return (self.mix(x, fused),)
        queries = seams().by_source(q, memory.valid)  # [B, n, t, M]
        queries = queries.view(*queries.shape[:-1], self.heads, -1).permute(0, 3, 1, 2, 4)
        weights = self.weigh(queries, keys[:, :, None], memory.valid[:, None, None, None, :], at)
        attended = (self.dropout(weights) @ values[:, :, None]).permute(0, 2, 3, 1, 4)  # [B, n, t, H, D]
        y = self.mix(x, seams().by_row(attended, q))
        return (y, seams().weights_by_row(weights, x, memory.valid)) if weigh else (y,)


class FastFullyConnected(CrossAttention):
    """Fast Fully Connected Softmax: a learned score per pair of positions, tanh weights, a gate, no output bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.form = config.fc_softmax
        self.plain = self.form == "softmax"
        self.position_scores = nn.Parameter(torch.zeros(config.max_target, config.max_source))
        self.head_bias = nn.Parameter(torch.zeros(self.heads))
        self.gate = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def added(self, at: Tensor) -> Added:
        # A head's bias is the same for all keys, so it does not change a softmax.
        return Added(self.position_scores, at)

    def weigh(self, queries: Tensor, keys: Tensor, real: Tensor, at: Tensor) -> Tensor:
        bias = functional.embedding(at, self.position_scores)[..., : keys.shape[-2]]  # [t, S] or [R, t, S]
        if at.ndim > 1:
            bias = seams().by_source(bias, real)[:, None]  # [B, 1, n, t, S]
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


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention, feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_residual, self.cross_residual = Residual(config), Residual(config)
        self.attention = (RecurrentAttention if config.decoder_attention == "linear" else CachedAttention)(config)
        self.cross = (FastFullyConnected if config.cross_attention == "fast_fc" else CrossAttention)(config)
        self.ffn = FeedForward(config, config.decoder_ffn_width or config.ffn_width)
        self.relative = layer_relative(config, config.target_heads, config.max_target)

    def attend_self(self, x: Tensor, state: LayerState, call: Call, position: Position) -> tuple[Tensor, LayerState]:
        """Return x after self-attention, and the layer's next state."""
        if self.relative is not None:
            call = replace(call, visible=replace(call.visible, relative=self.relative(call.at, call.keys_at)))
        y, state = self.attention(self.self_residual.enter(x), state, call, position)
        return self.self_residual.leave(x, y), state

    def attend_source(self, x: Tensor, memory: SourceMemory, layer: int, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return x after cross-attention, and its weights if wanted; it adds exactly 0 where the gate is closed."""
        h, gate, weigh = self.cross_residual.enter(x), call.gate, layer in call.weights_of

        def act() -> Outputs:
            outputs: Outputs = self.cross(h, memory, layer, call.at, weigh)
            return outputs

        def blank() -> Outputs:
            if not weigh:
                return (torch.zeros_like(h),)
            return torch.zeros_like(h), h.new_zeros(h.shape[0], self.cross.heads, h.shape[1], memory.valid.shape[1])

        outputs = act() if gate is None else seams().unless(gate.amax((0, 1, 2)) == 0, act, blank)
        if outputs is None:
            return self.cross_residual.leave(x, None), None
        if gate is not None:
            # A closed row has the same output and weights whether or not other rows made the sub-layer run.
            outputs = outputs[0] * gate, *(weights * gate[:, None] for weights in outputs[1:])
        return self.cross_residual.leave(x, outputs[0]), outputs[1] if weigh else None


class Decoder(nn.Module):
    """The stack over one call's tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = norm_of(config) if config.norm == "pre" else None
        self.relative = stack_relative(config, config.target_heads, config.max_target)

    def project(self, encoded: list[Tensor]) -> SourceMemory:
        """Return every layer's cross keys and values, from the encoder outputs that ``cross_wiring`` selects."""
        inputs = encoded if self.config.cross_wiring == "matched" else encoded * len(self.layers)
        pairs = [layer.cross.project(output) for layer, output in zip(self.stack(), inputs, strict=True)]
        return SourceMemory(keys=[keys for keys, _ in pairs], values=[values for _, values in pairs])

    def start(self, memory: SourceMemory, capacity: int) -> DecoderState:
        """Return the state before the first token: caches for ``capacity`` positions, or zero sums."""
        rows, like, config = len(memory.valid), self.stack()[0].ffn.out.weight, self.config
        heads, width, features = config.target_heads.count, config.target_heads.width, config.feature_width
        shapes: list[tuple[int, ...]] = [(rows, heads, capacity, width)] * 2
        if config.decoder_attention == "linear":
            shapes = [(rows, heads, features, width), (rows, heads, features)]
        elif config.parallel:
            shapes = []
        return DecoderState(0, [tuple(like.new_zeros(shape) for shape in shapes) for _ in self.layers])

    def call(self, tokens: Tensor, state: DecoderState, gate: Tensor | None, weights_of: frozenset[int]) -> Call:
        """Return what the layers share in a call on tokens [R, t]."""
        steps, config = tokens.shape[1], self.config
        at = positions_of(tokens, state)
        cached = bool(state.layers[0]) and config.decoder_attention != "linear"
        capacity = state.layers[0][0].shape[2] if cached else steps
        j = torch.arange(seams().n_keys(state.position, steps, capacity), device=tokens.device)
        visible = Visible(
            allowed=allowed_keys(config, at, j, tokens),
            relative=None if self.relative is None else self.relative(at, j),
            causal=config.decoder_attention in ("scaled_dot", "dot", "additive"),
        )
        return Call(at, j, visible, gate, weights_of)

    def forward(
        self, x: Tensor, state: DecoderState, memory: SourceMemory, call: Call
    ) -> tuple[Tensor, dict[int, Tensor], DecoderState]:
        """Return hidden states [R, t, M], wanted cross weights [R, H, t, S] of layers that ran, the next state."""
        cross_weights: dict[int, Tensor] = {}
        next_layers = []
        for index, layer in enumerate(self.stack()):
            x, layer_state = layer.attend_self(x, state.layers[index], call, state.position)
            x, weights = layer.attend_source(x, memory, index, call)
            if weights is not None:
                cross_weights[index] = weights
            x = layer.ffn(x)
            next_layers.append(layer_state)
        hidden = x if self.norm is None else self.norm(x)
        return hidden, cross_weights, DecoderState(state.position + call.at.shape[-1], next_layers)

    def crosses(self) -> list[CrossAttention]:
        """Return the attentions to the source."""
        return [layer.cross for layer in self.stack()]

    def stack(self) -> list[DecoderLayer]:
        """Return the layers with their type."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def positions_of(tokens: Tensor, state: DecoderState) -> Tensor:
    """Return the positions of a call's tokens [R, t], as [t] or, if rows are at different positions, [R, t]."""
    return torch.arange(tokens.shape[1], device=tokens.device) + _column(state.position)


def _column(position: Position) -> Position:
    """Return positions of rows as [R, 1], so that those of a call's tokens can be added; any other as it is."""
    return position[:, None] if isinstance(position, Tensor) and position.ndim else position
