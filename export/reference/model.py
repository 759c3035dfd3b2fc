"""The whole model: embeddings, hybrid gate, both stacks, head, copy mechanism, length head."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.export.reference.config import Activation, EmbeddingNorm, ModelConfig
from fatdeploy.export.reference.cross.attention import SourceMemory
from fatdeploy.export.reference.decoder import Decoder, DecoderState
from fatdeploy.export.reference.encoder import Encoder
from fatdeploy.export.reference.layers import Norm, activated, norm_of
from fatdeploy.export.reference.positions import Positions
from fatdeploy.export.reference.recurrent.decoder import RecurrentDecoder
from fatdeploy.export.reference.recurrent.encoder import RecurrentEncoder, mean_of
from fatdeploy.export.reference.seams import seams
from fatdeploy.spec import (
    ModelSpec,
    StateSpec,
    TensorSpec,
    attended_spec,
    cache_specs,
    cell_specs,
    context_spec,
    memory_specs,
    reached_spec,
    recurrent_specs,
)

# The norms of embedded tokens before and after positions are added.
Norms = tuple[Norm | None, Norm | None]


@dataclass(frozen=True)
class Decoded:
    """The decoder's result of one call, before the scores of the vocabulary are computed."""

    hidden: Tensor  # [R, t, M], the input of the output matrix
    weights: dict[int, Tensor]  # [R, H, t, S] by layer, of wanted cross-attentions that ran
    copy_gate: Tensor | None  # [R, t, 1], how much is generated rather than copied; None without copying


def spec_from_config(config: ModelConfig) -> ModelSpec:
    """Return the contract of a model with this configuration."""
    state: list[StateSpec] = []
    memory: list[TensorSpec] = []
    heads = config.target_heads
    # A recurrent decoder has at most one attention to the source, above all layers.
    n_crosses = 1 if config.recurrent_decoder else config.decoder_layers
    for layer in range(0 if config.cross_attention == "none" else n_crosses):
        memory += memory_specs(layer, heads.count, heads.width)
    for layer in range(config.decoder_layers):
        if config.decoder_attention == "fully_connected":
            memory.append(context_spec(layer, config.width))
        if config.recurrent_decoder:
            state += cell_specs(layer, config.width, 2 if config.decoder_attention == "lstm" else 1)
        elif config.decoder_attention == "none":
            state += cell_specs(layer, config.width, 1)
        elif config.decoder_attention == "linear":
            state += recurrent_specs(layer, heads.count, config.feature_width, heads.width)
        elif config.has_caches:
            state += cache_specs(layer, heads.count, heads.width)
        if config.follows_source:
            state.append((attended_spec if config.cross_attention == "location" else reached_spec)(layer, heads.count))
    return ModelSpec(
        vocab_size=config.vocab_size,
        source_vocab_size=config.source_vocab_size or None,
        width=config.width,
        max_source=config.max_source,
        max_target=config.max_target,
        pad_id=config.pad_id,
        bos_id=config.bos_id,
        eos_id=config.eos_id,
        decoding=config.decoding,
        length=config.length,
        target_order=config.target_order,
        memory=tuple(memory),
        state=tuple(state),
        reads_source=config.reads_source,
    )


class MlpHead(nn.Module):
    """Linear, activation, Linear before the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.into = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.activation: Activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.out(activated(self.into(x), self.activation))
        return mapped


class DenseNormHead(nn.Module):
    """Linear, activation, norm before the output matrix: BERT's head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.into = nn.Linear(config.width, config.width)
        self.norm = norm_of(config)
        self.activation: Activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.norm(activated(self.into(x), self.activation))
        return mapped


_HEADS: dict[str, type[nn.Module]] = {"mlp": MlpHead, "dense_norm": DenseNormHead}


class ReferenceModel(nn.Module):
    """An encoder-decoder of the FAT family: ``encode``, ``start``, ``step``, and ``forward`` for whole sequences."""

    keep: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.spec = spec_from_config(config)
        self.source_embedding = nn.Embedding(config.source_vocab_size or config.vocab_size, config.width)
        self.target_embedding = (
            self.source_embedding if config.tie_embeddings else nn.Embedding(config.vocab_size, config.width)
        )
        self.output = self.target_embedding if config.ties_output else nn.Embedding(config.vocab_size, config.width)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.output_bias else None
        self.source_norm = norm_of(config) if config.source_embedding_norm != "none" else None
        self.target_norm = norm_of(config) if config.target_embedding_norm != "none" else None
        self.source_positions = Positions(config, config.max_source)
        self.target_positions = Positions(config, config.max_target)
        self.encoder = (RecurrentEncoder if config.recurrent_encoder else Encoder)(config)
        self.decoder = (RecurrentDecoder if config.recurrent_decoder else Decoder)(config)
        self.head = _HEADS[config.head](config) if config.head in _HEADS else nn.Identity()
        self.copy = nn.Linear(config.width, 1, bias=False) if config.copy else None
        self.length = nn.Linear(config.width, config.max_target) if self._has_length_head else None
        self.dropout = nn.Dropout(config.dropout)
        self.scale = math.sqrt(config.width) if config.scale_embeddings else 1.0
        if config.hybrid:
            self.register_buffer("keep", kept(torch.arange(config.vocab_size), config))

    @property
    def _has_length_head(self) -> bool:
        return self.config.parallel and self.config.length == "head"

    @property
    def _source_norms(self) -> Norms:
        return _norms(self.source_norm, self.config.source_embedding_norm)

    @property
    def _target_norms(self) -> Norms:
        return _norms(self.target_norm, self.config.target_embedding_norm)

    @property
    def _last(self) -> int:
        return self.config.decoder_layers - 1

    def encode(self, source: Tensor, source_mask: Tensor) -> SourceMemory:
        """Return all that the decoder needs from a right-padded source [B, S]; the mask is True for real tokens."""
        if not torch.compiler.is_exporting():
            self.spec.check_source(source.cpu().numpy(), source_mask.cpu().numpy())
        at = torch.arange(source.shape[1], device=source.device)
        embedded = self.dropout(
            _placed(self.source_embedding(source) * self.scale, at, self.source_positions, self._source_norms)
        )
        encoded = self.encoder(embedded, source_mask)
        lengths = None if self.length is None else self.length(mean_of(encoded[-1], source_mask))
        memory = self.decoder.project(encoded, embedded, source_mask)
        return replace(memory, source=source, valid=source_mask, length_logits=lengths)

    def start(self, memory: SourceMemory, capacity: int | None = None) -> DecoderState:
        """Return the state before the first token: empty caches for ``capacity`` positions, zero sums, or a start.

        The capacity defaults to ``max_target``.
        """
        capacity = self.config.max_target if capacity is None else capacity
        if not 1 <= capacity <= self.config.max_target:
            raise ConfigError(f"capacity must lie in 1…{self.config.max_target} (max_target), found {capacity}")
        return self.decoder.start(memory, capacity)

    def step(self, tokens: Tensor, state: DecoderState, memory: SourceMemory) -> tuple[Tensor, DecoderState]:
        """Return logits [R, t, V] of the next tokens and the state after ``tokens`` [R, t]; caches change in place."""
        decoded, state = self.decode(tokens, state, memory)
        return self.logits(decoded, memory), state

    def forward(self, source: Tensor, source_mask: Tensor, target_in: Tensor) -> Tensor:
        """Return logits [B, T, V] for a whole target at once (teacher forcing), without caches."""
        memory = self.encode(source, source_mask)
        logits, _ = self.step(target_in, self.stateless(), memory)
        return logits

    def stateless(self) -> DecoderState:
        """Return a state without caches, for one call on a whole target."""
        return DecoderState(0, [()] * self.config.decoder_layers)

    def decode(
        self, tokens: Tensor, state: DecoderState, memory: SourceMemory, weights_of: int | None = None
    ) -> tuple[Decoded, DecoderState]:
        """Return the decoder's result for ``tokens`` [R, t], without the vocabulary's scores, and the next state.

        It has the cross weights of layer ``weights_of`` and, with the copy mechanism, of the last layer.
        """
        if not torch.compiler.is_exporting():
            self._check_step(tokens, state, memory)
        gate = self._gate(tokens, memory)
        copied_from = self._last if self.config.copy else None
        wanted = frozenset(layer for layer in (weights_of, copied_from) if layer is not None)
        call = self.decoder.call(tokens, state, gate, wanted)
        embedded = self.target_embedding(tokens) * self.scale
        if gate is not None:
            embedded = embedded * gate
        x = self.dropout(_placed(embedded, call.at, self.target_positions, self._target_norms))
        h, weights, state = self.decoder(x, state, memory, call)
        return Decoded(self.head(h), weights, self._copy_gate(h, gate)), state

    def logits(self, decoded: Decoded, memory: SourceMemory) -> Tensor:
        """Return scores [R, t, V]; with the copy mechanism they are log-probabilities."""
        logits = seams().project(decoded.hidden, self.output.weight)
        if self.output_bias is not None:
            logits = logits + self.output_bias
        if decoded.copy_gate is None:
            return logits
        probability = decoded.copy_gate * logits.softmax(-1)
        if self._last in decoded.weights:
            mean = decoded.weights[self._last].mean(1) * (1 - decoded.copy_gate)  # [R, t, S]
            probability = seams().copied(probability, mean, memory.source)
        return (probability + 1e-9).log()

    def _check_step(self, tokens: Tensor, state: DecoderState, memory: SourceMemory) -> None:
        caches = state.layers[0] if self.config.has_caches else ()
        self.spec.check_tokens(tokens.cpu().numpy(), int(state.position), caches[0].shape[2] if caches else None)
        if len(tokens) % len(memory.valid):
            raise SpecMismatch(f"step refused: {len(tokens)} rows do not divide among {len(memory.valid)} sources")

    def _gate(self, tokens: Tensor, memory: SourceMemory) -> Tensor | None:
        """Return 1 for tokens that carry source information, else 0, as [R, t, 1].

        These are BOS, frequent tokens, and tokens of the row's source, but never padding.
        """
        if not self.config.hybrid:
            return None
        ids = torch.arange(self.config.vocab_size, device=tokens.device)
        # Depends on weights only: 1 for tokens that always carry it; for padding so little that no source opens it.
        always = (self.keep | (ids == self.config.bos_id)).to(self.output.weight.dtype)
        always = always - 2 * (ids == self.config.pad_id)
        carried = functional.embedding(tokens, always[:, None])
        return (carried + seams().in_source(tokens, memory.source, memory.valid, carried)).clamp(0, 1)

    def _copy_gate(self, h: Tensor, gate: Tensor | None) -> Tensor | None:
        if self.copy is None:
            return None
        generated: Tensor = self.copy(h).sigmoid()
        # Without source information there is nothing to copy.
        return generated if gate is None else generated.masked_fill(gate == 0, 1.0)


def _norms(norm: Norm | None, place: EmbeddingNorm) -> Norms:
    return (norm, None) if place == "before" else (None, norm)


def _placed(x: Tensor, at: Tensor, positions: Positions, norms: Norms) -> Tensor:
    """Return embedded tokens with their positions, through a norm before or after these are added."""
    before, after = norms
    placed: Tensor = positions(x if before is None else before(x), at)
    return placed if after is None else after(placed)


def kept(ranks: Tensor, config: ModelConfig) -> Tensor:
    """Return which tokens are frequent enough to keep their source information: rank < τ·V."""
    return ranks < config.hybrid_threshold * config.vocab_size
