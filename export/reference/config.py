"""The configuration of a reference model: every choice, legal combinations, and its JSON form. Imports no torch."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.reference.config_rules import (
    AT_LEAST,
    wrong_fast_layers,
    wrong_following,
    wrong_fully_connected,
    wrong_recurrence,
    wrong_value,
    wrong_wiring,
)

HeadMask = Literal["local", "strided", "global_tokens"]
EncoderAttentionKind = Literal[
    "scaled_dot",
    "dot",
    "additive",
    "slow",
    "local",
    "strided",
    "global_tokens",
    "linformer",
    "compressed",
    "linear",
    "synthesizer",
    "lstm",
    "gru",
]
DecoderAttentionKind = Literal[
    "scaled_dot", "dot", "additive", "local", "linear", "full", "lstm", "gru", "fully_connected", "none"
]
CrossAttentionKind = Literal["scaled_dot", "dot", "additive", "fast_fc", "location", "monotonic", "none"]
CrossWiring = Literal["last", "matched", "mixed"]
RecurrentKind = Literal["lstm", "gru"]
Features = Literal["elu", "softmax", "random", "performer"]
FcSoftmax = Literal["tanh", "tanh_bounded", "softmax"]
Relative = Literal["none", "table", "angle", "matrix"]
Direction = Literal["both", "left_to_right", "right_to_left"]
Activation = Literal["relu", "gelu", "gelu_tanh", "swish"]
EmbeddingNorm = Literal["none", "before", "after"]

# Self-attentions whose scores can have a term that depends only on the distance.
_TAKES_RELATIVE = {"scaled_dot", "dot", "additive", "slow", "local", "strided", "global_tokens", "full"}
# Encoder attentions that mix all positions before they compare them, so that a direction is not possible.
_BOTH_DIRECTIONS_ONLY = {"linformer", "compressed"}
# Attentions with matrices beyond queries, keys, values and output, which are as wide as the model and have biases.
_OWN_MATRICES = {"slow", "compressed", "synthesizer", "lstm", "gru"}
# What replaces self-attention by a recurrence of vectors.
_RECURRENT = {"lstm", "gru", "fully_connected"}
# Decoder self-attentions that keep all keys and values.
_CACHED = {"scaled_dot", "dot", "additive", "local"}


@dataclass(frozen=True)
class HeadShape:
    """H heads of width D."""

    count: int
    width: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """An encoder-decoder; the named systems are presets of it. Values that exclude each other are refused."""

    vocab_size: int
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    ffn_width: int
    max_source: int
    max_target: int
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    source_vocab_size: int = 0  # 0 is vocab_size
    norm: Literal["pre", "post"] = "pre"
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    biases: bool = True  # of attentions and feed-forward networks
    activation: Activation = "relu"
    gated: bool = False
    ffn_skip: bool = False  # the second matrix of the feed-forward network reads its input too
    attention_relu: bool = False  # after the residual connection of every attention
    inner_width: int = 0  # of all heads together; 0 is width
    decoder_heads: int = 0  # 0 is heads
    decoder_ffn_width: int = 0  # 0 is ffn_width
    source_embedding_norm: EmbeddingNorm = "none"
    target_embedding_norm: EmbeddingNorm = "none"
    tie_embeddings: bool = True
    tie_output: Literal["auto", "yes", "no"] = "auto"  # with the target embedding; auto is as tie_embeddings
    output_bias: bool = False
    scale_embeddings: bool = True
    dropout: float = 0.0

    encoder_attention: EncoderAttentionKind | tuple[HeadMask, ...] = "scaled_dot"
    encoder_direction: Direction = "both"
    window: int = 8
    stride: int = 4
    n_global_tokens: int = 2
    linformer_rows: int = 16
    compression: int = 2
    synthesizer: Literal["random", "dense"] = "random"
    features: Features = "elu"
    random_features: int = 64

    decoder_attention: DecoderAttentionKind = "scaled_dot"
    cross_attention: CrossAttentionKind = "scaled_dot"
    fc_softmax: FcSoftmax = "tanh_bounded"
    fc_keys: Literal["encoder", "embedded"] = "encoder"
    fc_table: Literal["source", "vocabulary"] = "source"
    fc_scale: bool = True
    cross_wiring: CrossWiring = "last"
    location_window: int = 8

    positions: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    relative: Relative = "none"
    relative_window: int = 16
    relative_each_layer: bool = False
    relative_self: bool = True  # whether a position has a relative term with itself
    positional_mlp: int = 0

    head: Literal["linear", "mlp", "dense_norm"] = "linear"
    copy: bool = False
    decoding: Literal["autoregressive", "parallel"] = "autoregressive"
    length: Literal["head", "eos"] = "head"
    target_order: Literal["left_to_right", "right_to_left"] = "left_to_right"
    hybrid: bool = False
    hybrid_threshold: float = 0.5
    hybrid_skips: Literal["cross", "layer"] = "cross"

    def __post_init__(self) -> None:
        # Combinations are only checked if every value is legal: a wrong type would break the comparisons.
        reasons = self._wrong_values() or [*self._wrong_sizes(), *self._wrong_attentions(), *self._wrong_outputs()]
        if reasons:
            raise ConfigError(in_one_line("configuration refused", reasons))

    @property
    def attention_width(self) -> int:
        """The width of all heads together."""
        return self.inner_width or self.width

    @property
    def encoder_heads(self) -> HeadShape:
        """The heads of the encoder's self-attention."""
        return HeadShape(self.heads, self.attention_width // self.heads)

    @property
    def target_heads(self) -> HeadShape:
        """The heads of the decoder's self-attention and cross-attention."""
        count = self.decoder_heads or self.heads
        return HeadShape(count, self.attention_width // count)

    @property
    def ties_output(self) -> bool:
        """Whether the output matrix is the target embedding."""
        return self.tie_embeddings if self.tie_output == "auto" else self.tie_output == "yes"

    @property
    def recurrent_encoder(self) -> bool:
        """Whether the encoder is a stack of recurrent layers."""
        return self.encoder_attention in _RECURRENT

    @property
    def recurrent_decoder(self) -> bool:
        """Whether the decoder is a stack of recurrent layers, which starts from the source."""
        return self.decoder_attention in _RECURRENT

    @property
    def starts_from_source(self) -> bool:
        """Whether the state before the first token comes from the source."""
        return self.recurrent_decoder or self.decoder_attention == "none"

    @property
    def reads_source(self) -> bool:
        """Whether the decoder reads the ids of the source."""
        return self.hybrid or self.copy or self.fc_table == "vocabulary"

    @property
    def has_caches(self) -> bool:
        """Whether the decoder keeps keys and values of all positions."""
        return self.decoder_attention in _CACHED

    @property
    def follows_source(self) -> bool:
        """Whether the cross-attention of each step depends on where those before it looked."""
        return self.cross_attention in ("location", "monotonic")

    @property
    def parallel(self) -> bool:
        """Whether all target positions are decoded in one call (NAT)."""
        return self.decoding == "parallel"

    @property
    def feature_width(self) -> int:
        """F, the number of features by which the decoder's linear attention compares queries and keys."""
        return {"random": 2 * self.random_features, "performer": self.random_features}.get(
            self.features, self.target_heads.width
        )

    def to_json(self) -> str:
        """Return all values as a JSON object with defaults, so that a new default does not change old checkpoints."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """Return the configuration that ``to_json`` wrote; all unknown and missing names are one error."""
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"configuration is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"configuration is a JSON {type(values).__name__}, expected an object")
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Return the configuration with these values, lists for tuples; all unknown and missing names are one error."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = [name for name in values if name not in fields]
        reasons = [f"{name}: unknown" for name in unknown]
        reasons += [
            f"{name}: missing"
            for name, field in fields.items()
            if name not in values and field.default is dataclasses.MISSING
        ]
        if unknown:
            reasons.append(f"valid names are {', '.join(fields)}")
        if reasons:
            raise ConfigError(in_one_line("configuration refused", reasons))
        attention = values.get("encoder_attention")
        return cls(**{**values, "encoder_attention": tuple(attention)} if isinstance(attention, list) else values)

    def _wrong_values(self) -> list[str]:
        # `not a >= b` instead of `a < b` throughout: it also refuses NaN.
        reasons = []
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            reason = self._wrong_heads() if name == "encoder_attention" else wrong_value(value, kind)
            if not reason and name in AT_LEAST and not value >= AT_LEAST[name]:
                reason = f"must be at least {AT_LEAST[name]}, found {value}"
            if reason:
                reasons.append(f"{name}: {reason}")
        return reasons

    def _wrong_heads(self) -> str:
        attention: Any = self.encoder_attention
        if not isinstance(attention, tuple):
            return wrong_value(attention, EncoderAttentionKind)
        wrong = [value for value in attention if value not in get_args(HeadMask)]
        if wrong:
            return f"a tuple names one of {list(get_args(HeadMask))} per head, found {wrong}"
        if len(attention) != self.heads:
            return f"a tuple names one mask for each of {self.heads} heads, found {len(attention)}"
        return ""

    def _wrong_sizes(self) -> list[str]:
        name = "inner_width" if self.inner_width else "width"
        reasons = [
            f"{name}: {self.attention_width} is not a multiple of {heads} = {count}"
            for heads, count in (("heads", self.heads), ("decoder_heads", self.decoder_heads or self.heads))
            if self.attention_width % count
        ][:1]
        if self.positions == "sinusoidal" and self.width % 2:
            reasons.append(f"width: sinusoidal positions need an even width, found {self.width}")
        ids = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        reasons += [
            f"{name}: must be below vocab_size = {self.vocab_size}, found {value}"
            for name, value in ids.items()
            if value >= self.vocab_size
        ]
        # A parallel decoder tells real positions from padding by these ids, and the hybrid gate BOS from padding.
        if len(set(ids.values())) < len(ids) and (self.parallel or self.hybrid):
            kind = "parallel decoding" if self.parallel else "the hybrid forward pass"
            reasons.append(f"pad_id, bos_id, eos_id: must differ with {kind}, found {list(ids.values())}")
        if not self.dropout < 1:
            reasons.append(f"dropout: must be below 1, found {self.dropout}")
        if not self.hybrid_threshold <= 1:
            reasons.append(f"hybrid_threshold: must be at most 1, found {self.hybrid_threshold}")
        return reasons

    def _wrong_attentions(self) -> list[str]:
        reasons = []
        encoder, features = self.encoder_attention, self.features
        mixes = encoder in _BOTH_DIRECTIONS_ONLY or (encoder == "linear" and features == "softmax")
        if self.encoder_direction != "both" and mixes:
            name = f"linear with features = {features}" if encoder == "linear" else encoder
            reasons.append(f"encoder_direction: {name} attention has no direction, use both")
        if self.relative != "none":
            # Every mask that a tuple may contain takes relative scores.
            if isinstance(encoder, str) and encoder not in _TAKES_RELATIVE:
                reasons.append(f"relative: encoder_attention = {encoder} takes no relative scores")
            if self.decoder_attention not in _TAKES_RELATIVE:
                reasons.append(f"relative: decoder_attention = {self.decoder_attention} takes no relative scores")
        if self.decoder_attention == "linear" and features == "softmax":
            reasons.append("features: softmax runs over all positions, a decoder's linear attention cannot; use elu")
        reasons += [*self._wrong_projections(), *wrong_recurrence(self), *wrong_wiring(self)]
        reasons += [*wrong_fully_connected(self), *wrong_fast_layers(self), *wrong_following(self)]
        if self.relative_each_layer and self.relative == "none":
            reasons.append("relative_each_layer: needs relative scores, found relative = none")
        if self.positional_mlp and self.positions == "none":
            reasons.append("positional_mlp: needs position vectors, found positions = none")
        return reasons

    def _wrong_projections(self) -> list[str]:
        """Return why heads cannot be wider than the model, or matrices have no biases."""
        refusing = [f"encoder_attention = {self.encoder_attention}"] if self.encoder_attention in _OWN_MATRICES else []
        refusing += [f"decoder_attention = {self.decoder_attention}"] if self.recurrent_decoder else []
        refusing += ["cross_attention = fast_fc"] if self.cross_attention == "fast_fc" else []
        changed = {"inner_width": self.inner_width not in (0, self.width), "biases": not self.biases}
        return [
            f"{name}: {attention} has matrices of the model's width with biases"
            for name, is_changed in changed.items()
            for attention in refusing
            if is_changed
        ]

    def _wrong_vocabularies(self) -> list[str]:
        if self.source_vocab_size in (0, self.vocab_size):
            return []
        reasons = []
        if self.tie_embeddings:
            reasons.append("source_vocab_size: two vocabularies need two embeddings, set tie_embeddings to false")
        if self.pad_id >= self.source_vocab_size:
            reasons.append(f"pad_id: must be below source_vocab_size = {self.source_vocab_size}, found {self.pad_id}")
        if self.copy or self.hybrid:
            reasons.append(
                "source_vocab_size: copy and hybrid compare ids of source and target, they need one vocabulary"
            )
        return reasons

    def _wrong_outputs(self) -> list[str]:
        reasons = self._wrong_vocabularies()
        if self.parallel != (self.decoder_attention == "full"):
            reasons.append(
                "decoder_attention: full and decoding: parallel need each other, "
                f"found {self.decoder_attention} and {self.decoding}"
            )
        if self.copy and self.cross_attention == "fast_fc" and self.fc_softmax != "softmax":
            reasons.append(f"copy: weights of fc_softmax = {self.fc_softmax} are not probabilities, use softmax")
        if self.hybrid and self.parallel:
            reasons.append("hybrid: decides by the input token, which parallel decoding does not have")
        return reasons
