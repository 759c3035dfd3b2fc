"""The recurrent decoder: cells that start from the context, and one attention to the source above them."""

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.attention import LayerState, Visible
from fatdeploy.export.reference.config import ModelConfig, RecurrentKind
from fatdeploy.export.reference.cross.attention import CrossAttention, SourceMemory
from fatdeploy.export.reference.cross.fast_fc import FastFullyConnected
from fatdeploy.export.reference.decoder import Call, DecoderState, positions_of
from fatdeploy.export.reference.recurrent.cells import ConnectedCell, cell_of
from fatdeploy.export.reference.recurrent.encoder import context_of
from fatdeploy.export.reference.seams import seams


class CellLayer(nn.Module):
    """An LSTM or GRU; its state before the first token is tanh of a layer over the context."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kind: RecurrentKind = "gru" if config.decoder_attention == "gru" else "lstm"
        self.cell = cell_of(kind, config.width)
        self.start = nn.Linear(config.width, config.width * (2 if kind == "lstm" else 1))
        self.n_states = 2 if kind == "lstm" else 1

    def started(self, context: Tensor) -> LayerState:
        """Return the state before the first token, [B, M] each."""
        return tuple(self.start(context).tanh().chunk(self.n_states, -1))

    def project(self, context: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return what every step reads of the context: nothing."""
        return ()

    def forward(self, x: Tensor, past: LayerState, context: tuple[Tensor, ...]) -> tuple[Tensor, LayerState]:  # noqa: ARG002
        return seams().recur(x, self.cell, None, past)


class ConnectedLayer(nn.Module):
    """AT's fully connected recurrence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.cell = ConnectedCell(config)
        self.start = nn.Linear(config.width, config.width)

    def started(self, context: Tensor) -> LayerState:
        """Return the state before the first token, [B, M]."""
        return (self.start(context).tanh(),)

    def project(self, context: Tensor) -> tuple[Tensor, ...]:
        """Return what every step reads of the context: its share of h̄, [B, M]."""
        return (self.cell.context(context),)

    def forward(self, x: Tensor, past: LayerState, context: tuple[Tensor, ...]) -> tuple[Tensor, LayerState]:
        outputs, hidden = seams().recur_connected(x, self.cell, context[0], past[0])
        return outputs, (hidden,)


class RecurrentDecoder(nn.Module):
    """The stack over one call's tokens; attention, where there is one, reads the last layer and is mixed with it.

    h̃_t = tanh(L [attended; h_t]), as in the classic recurrent sequence-to-sequence model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layer = ConnectedLayer if config.decoder_attention == "fully_connected" else CellLayer
        self.layers = nn.ModuleList(layer(config) for _ in range(config.decoder_layers))
        self.dropout = nn.Dropout(config.dropout)
        self.cross: CrossAttention | None = None
        if config.cross_attention != "none":
            self.cross = (FastFullyConnected if config.cross_attention == "fast_fc" else CrossAttention)(config)
            self.mix = nn.Linear(2 * config.width, config.width)

    def crosses(self) -> list[CrossAttention]:
        """Return the attentions to the source."""
        return [] if self.cross is None else [self.cross]

    def starts(self) -> list[nn.Linear]:
        """Return what makes the states before the first token from the context."""
        return [layer.start for layer in self._layers()]

    def mixes(self) -> list[nn.Linear]:
        """Return what mixes attended values with the last layer."""
        return [] if self.cross is None else [self.mix]

    def project(self, encoded: list[Tensor], embedded: Tensor, valid: Tensor) -> SourceMemory:
        """Return the source as the decoder reads it: keys and values, and what comes from the context."""
        context = context_of(self.config, encoded[-1], valid)
        pairs = [cross.project(encoded[-1], embedded) for cross in self.crosses()]
        return SourceMemory(
            keys=[keys for keys, _ in pairs],
            values=[values for _, values in pairs],
            contexts=[layer.project(context) for layer in self._layers()],
            starts=[layer.started(context) for layer in self._layers()],
        )

    def start(self, memory: SourceMemory, capacity: int) -> DecoderState:  # noqa: ARG002
        """Return the state before the first token."""
        return DecoderState(0, list(memory.starts))

    def call(self, tokens: Tensor, state: DecoderState, gate: Tensor | None, weights_of: frozenset[int]) -> Call:
        """Return what a call on tokens [R, t] has beside them: there are no keys of target positions."""
        at = positions_of(tokens, state)
        return Call(at, at, Visible(torch.ones_like(at, dtype=torch.bool), None), gate, weights_of)

    def forward(
        self, x: Tensor, state: DecoderState, memory: SourceMemory, call: Call
    ) -> tuple[Tensor, dict[int, Tensor], DecoderState]:
        """Return hidden states [R, t, M], wanted cross weights [R, H, t, S], the next state."""
        next_layers = []
        for index, layer in enumerate(self._layers()):
            # A call on a whole target has no state, and starts from the source.
            past = state.layers[index] or memory.starts[index]
            x, layer_state = layer(self.dropout(x) if index else x, past, memory.contexts[index])
            next_layers.append(layer_state)
        hidden, weights = self._attended(x, memory, call)
        return hidden, weights, DecoderState(state.position + call.at.shape[-1], next_layers)

    def _attended(self, x: Tensor, memory: SourceMemory, call: Call) -> tuple[Tensor, dict[int, Tensor]]:
        if self.cross is None:
            return x, {}
        last = self.config.decoder_layers - 1
        attended, *weights = self.cross(x, memory, 0, call.at, last in call.weights_of)
        hidden = self.mix(torch.cat([self.dropout(attended), x], -1)).tanh()
        return hidden, dict.fromkeys([last] if weights else [], *weights)

    def _layers(self) -> list[CellLayer | ConnectedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CellLayer | ConnectedLayer)]
