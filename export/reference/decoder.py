"""The decoder: self-attentions with incremental state, its layers, and the stack."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.attention import FeatureMap, LayerState, Scores, Visible
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.cross.attention import CrossAttention, SourceMemory
from fatdeploy.export.reference.cross.fast_fc import FastFullyConnected, PreviousState, last_run
from fatdeploy.export.reference.cross.following import FollowingAttention, LocationAttention, MonotonicAttention
from fatdeploy.export.reference.layers import FeedForward, Residual, SelfAttention, norm_of
from fatdeploy.export.reference.positions import layer_relative, stack_relative, with_relative
from fatdeploy.export.reference.recurrent.encoder import context_of
from fatdeploy.export.reference.seams import Outputs, Position, seams


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
    gate: Tensor | None  # [R, t, 1], 0 where the hybrid pass skips cross-attentions; None if it skips none
    weights_of: frozenset[int]  # the layers whose cross weights are wanted
    runs: Tensor | None = None  # [R, t, 1], 0 where the hybrid pass skips whole layers; None if it skips none
    last_runs: Tensor | None = None  # [R, t + 1], of the first 0 … t positions the last that is not skipped


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
        mixed, state = seams().attend_recurrent(self.qkv(x), self.features, self.heads, state, call.runs)
        return self.out(mixed), state


_CROSS: dict[str, type[CrossAttention]] = {
    "fast_fc": FastFullyConnected,
    "location": LocationAttention,
    "monotonic": MonotonicAttention,
}


class DecoderLayer(nn.Module):
    """Self-attention or the position before, cross-attention, feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.cross_residual = Residual(config, relu=config.attention_relu)
        self.previous = PreviousState(config) if config.decoder_attention == "none" else None
        self.attention: RecurrentAttention | CachedAttention | None = None
        if self.previous is None:
            self.self_residual = Residual(config, relu=config.attention_relu)
            self.attention = (RecurrentAttention if config.decoder_attention == "linear" else CachedAttention)(config)
        self.cross = _CROSS.get(config.cross_attention, CrossAttention)(config)
        self.ffn = FeedForward(config, config.decoder_ffn_width or config.ffn_width)
        self.relative = layer_relative(config, config.target_heads, config.max_target)

    def forward(
        self, x: Tensor, state: LayerState, memory: SourceMemory, layer: int, call: Call, position: Position
    ) -> tuple[Tensor, Tensor | None, LayerState]:
        """Return x after the layer, its cross weights if wanted, and its next state."""
        # Behind the state of self-attention is that of a cross-attention that has one.
        n_own = max(0, len(state) - isinstance(self.cross, FollowingAttention))
        own, past = state[:n_own], state[n_own:]
        if self.attention is not None:
            if self.relative is not None:
                call = replace(call, visible=with_relative(call.visible, self.relative, call.at, call.keys_at))
            y, own = self.attention(self.self_residual.enter(x), own, call, position)
            x = self.self_residual.leave(x, y)
        h, asking = self.cross_residual.enter(x), None
        if self.previous is not None:
            # A call on a whole target has no state, and starts from the source.
            asking, own = self.previous(h, own or memory.starts[layer], call.last_runs)
        crossed, weights, past = self._attend_source((h, asking), memory, layer, call, past)
        mixed: Tensor = self.ffn(self.cross_residual.leave(x, crossed))
        return mixed, weights, own + past

    def _attend_source(
        self,
        inputs: tuple[Tensor, Tensor | None],
        memory: SourceMemory,
        layer: int,
        call: Call,
        past: LayerState,
    ) -> tuple[Tensor | None, Tensor | None, LayerState]:
        """Return what cross-attention adds, its weights if wanted, and its next state.

        It adds exactly 0 where the gate is closed.
        """
        (h, asking), gate, weigh = inputs, call.gate, layer in call.weights_of
        if isinstance(self.cross, FollowingAttention):
            y, weights, *state = self.cross(h, memory, layer, call.at, weigh, past=past)
            return y, weights if weigh else None, tuple(state)

        def act() -> Outputs:
            outputs: Outputs = self.cross(h, memory, layer, call.at, weigh, asking)
            return outputs

        def blank() -> Outputs:
            if not weigh:
                return (torch.zeros_like(h),)
            return torch.zeros_like(h), h.new_zeros(h.shape[0], self.cross.heads, h.shape[1], memory.valid.shape[1])

        outputs = act() if gate is None else seams().unless(gate.amax((0, 1, 2)) == 0, act, blank)
        if outputs is None:
            return None, None, ()
        if gate is not None:
            # A closed row has the same output and weights whether or not other rows made the sub-layer run.
            outputs = outputs[0] * gate, *(weights * gate[:, None] for weights in outputs[1:])
        return outputs[0], outputs[1] if weigh else None, ()


class Decoder(nn.Module):
    """The stack over one call's tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = norm_of(config) if config.norm == "pre" else None
        self.relative = stack_relative(config, config.target_heads, config.max_target)
        self.mixture: nn.Parameter | None = None  # how much each decoder layer reads of each encoder layer
        if config.cross_wiring == "mixed":
            self.mixture = nn.Parameter(torch.zeros(config.decoder_layers, config.encoder_layers))

    def project(self, encoded: list[Tensor], embedded: Tensor, valid: Tensor) -> SourceMemory:
        """Return every layer's cross keys and values, from the encoder outputs that ``cross_wiring`` selects."""
        inputs = self._wired(encoded)
        pairs = [layer.cross.project(output, embedded) for layer, output in zip(self.stack(), inputs, strict=True)]
        starts: list[LayerState] = []
        if self.config.starts_from_source:
            context = context_of(self.config, encoded[-1], valid)
            starts = [(layer.previous.start(context).tanh(),) for layer in self.stack() if layer.previous is not None]
        return SourceMemory(keys=[keys for keys, _ in pairs], values=[values for _, values in pairs], starts=starts)

    def _wired(self, encoded: list[Tensor]) -> list[Tensor]:
        """Return what each layer reads of the encoder."""
        if self.mixture is None:
            return encoded if self.config.cross_wiring == "matched" else encoded * len(self.layers)
        outputs = torch.stack(encoded, -1)  # [B, S, M, encoder layers]
        return [outputs @ shares for shares in self.mixture.softmax(-1)]

    def start(self, memory: SourceMemory, capacity: int) -> DecoderState:
        """Return the state before the first token: caches for ``capacity`` positions, zero sums, or a start."""
        if memory.starts:
            return DecoderState(0, list(memory.starts))
        rows, like, config = len(memory.valid), self.stack()[0].ffn.out.weight, self.config
        heads, width, features = config.target_heads.count, config.target_heads.width, config.feature_width
        shapes: list[tuple[int, ...]] = [(rows, heads, capacity, width)] * 2
        if config.decoder_attention == "linear":
            shapes = [(rows, heads, features, width), (rows, heads, features)]
        elif config.parallel:
            shapes = []
        own = [tuple(like.new_zeros(shape) for shape in shapes) for _ in self.layers]
        if config.follows_source:
            length = memory.valid.shape[1]
            own = [
                state + layer.cross.started(rows, like, length)
                for state, layer in zip(own, self.stack(), strict=True)
                if isinstance(layer.cross, FollowingAttention)
            ]
        return DecoderState(0, own)

    def call(self, tokens: Tensor, state: DecoderState, gate: Tensor | None, weights_of: frozenset[int]) -> Call:
        """Return what the layers share in a call on tokens [R, t]."""
        steps, config = tokens.shape[1], self.config
        at = positions_of(tokens, state)
        cached = bool(state.layers[0]) and config.has_caches
        capacity = state.layers[0][0].shape[2] if cached else steps
        j = torch.arange(seams().n_keys(state.position, steps, capacity), device=tokens.device)
        visible = Visible(
            allowed=allowed_keys(config, at, j, tokens),
            relative=None,
            causal=config.decoder_attention in ("scaled_dot", "dot", "additive"),
        )
        visible = with_relative(visible, self.relative, at, j)
        if gate is None or config.hybrid_skips == "cross":
            return Call(at, j, visible, gate, weights_of)
        return Call(at, j, visible, None, weights_of, runs=gate, last_runs=last_run(gate))

    def forward(
        self, x: Tensor, state: DecoderState, memory: SourceMemory, call: Call
    ) -> tuple[Tensor, dict[int, Tensor], DecoderState]:
        """Return hidden states [R, t, M], wanted cross weights [R, H, t, S] of layers that ran, the next state."""
        run = self._through if call.runs is None else self._where_it_runs
        x, cross_weights, layers = run(x, state, memory, call)
        hidden = x if self.norm is None else self.norm(x)
        return hidden, cross_weights, DecoderState(state.position + call.at.shape[-1], layers)

    def _through(
        self, x: Tensor, state: DecoderState, memory: SourceMemory, call: Call
    ) -> tuple[Tensor, dict[int, Tensor], list[LayerState]]:
        """Return x after all layers, wanted cross weights, and the layers' next states."""
        cross_weights: dict[int, Tensor] = {}
        next_layers = []
        for index, layer in enumerate(self.stack()):
            x, weights, layer_state = layer(x, state.layers[index], memory, index, call, state.position)
            if weights is not None:
                cross_weights[index] = weights
            next_layers.append(layer_state)
        return x, cross_weights, next_layers

    def _where_it_runs(
        self, x: Tensor, state: DecoderState, memory: SourceMemory, call: Call
    ) -> tuple[Tensor, dict[int, Tensor], list[LayerState]]:
        """As ``_through``, but skipped positions keep x and leave no state; if all are skipped, nothing runs."""
        runs, wanted = call.runs, sorted(call.weights_of)
        assert runs is not None  # noqa: S101
        past = [tensor for layer in state.layers for tensor in layer]

        def act() -> Outputs:
            y, weights, layers = self._through(x, state, memory, call)
            return (y, *(weights[layer] for layer in wanted), *(tensor for layer in layers for tensor in layer))

        def blank() -> Outputs:
            heads, width = memory.keys[0].shape[1], memory.valid.shape[1]
            weights = [x.new_zeros(x.shape[0], heads, x.shape[1], width) for _ in wanted]
            return (x.clone(), *weights, *(tensor.clone() for tensor in past))

        outputs = seams().unless(runs.amax((0, 1, 2)) == 0, act, blank)
        if outputs is None:
            return x, {}, state.layers
        y, *rest = outputs
        weights = {layer: part * runs[:, None] for layer, part in zip(wanted, rest, strict=False)}
        tensors = rest[len(wanted) :]
        each = len(tensors) // len(self.layers)
        layers = [tuple(tensors[index : index + each]) for index in range(0, len(tensors), each or 1)]
        return torch.where(runs > 0, y, x), weights, layers or state.layers

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
