"""T5, mT5, umT5: RMS norms, no biases, relative scores by distance instead of positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from fatdeploy.export.models.hugging_face.config_keys import ConfigKeys, activation_of, known_activation
from fatdeploy.export.models.hugging_face.embeddings import EmbeddingNames
from fatdeploy.export.models.hugging_face.folds import distance_table
from fatdeploy.export.models.hugging_face.recipes import LayerNames, Part, TensorRecipe
from fatdeploy.export.models.hugging_face.weight_files import StoredTensors
from fatdeploy.export.reference.config import ModelConfig

_SELF = "layer.0.SelfAttention."
_CROSS = "layer.1.EncDecAttention."
_ATTENTION = {
    "attention.qkv": (f"{_SELF}q", f"{_SELF}k", f"{_SELF}v"),
    "attention.out": (f"{_SELF}o",),
}
_DEFAULTS = {
    "d_model": 512,
    "d_kv": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "n_positions": 512,
    "tie_word_embeddings": True,
}


def _ffn(layer: int, *, gated: bool) -> dict[str, tuple[str, ...]]:
    stem = f"layer.{layer}."
    into = ("wi_0", "wi_1") if gated else ("wi",)
    return {
        "ffn.residual.norm": (f"{stem}layer_norm",),
        "ffn.into": tuple(f"{stem}DenseReluDense.{name}" for name in into),
        "ffn.out": (f"{stem}DenseReluDense.wo",),
    }


def _encoder(*, gated: bool) -> LayerNames:
    parts = {"residual.norm": ("layer.0.layer_norm",), **_ATTENTION, **_ffn(1, gated=gated)}
    return LayerNames("encoder.block.{index}.", parts)


def _decoder(*, gated: bool) -> LayerNames:
    parts = {
        "self_residual.norm": ("layer.0.layer_norm",),
        **_ATTENTION,
        "cross_residual.norm": ("layer.1.layer_norm",),
        "cross.q": (f"{_CROSS}q",),
        "cross.kv": (f"{_CROSS}k", f"{_CROSS}v"),
        "cross.out": (f"{_CROSS}o",),
        **_ffn(2, gated=gated),
    }
    return LayerNames("decoder.block.{index}.", parts)


@dataclass(frozen=True)
class T5Family:
    """T5 in all its versions, mT5 and umT5."""

    scales_outputs: Literal["as configured", "always", "never"]
    each_layer: bool = False  # every layer has its own relative scores
    own_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {**_DEFAULTS, **self.own_defaults}

    @property
    def prefix(self) -> str:
        return ""

    @property
    def top(self) -> Mapping[str, str]:
        return {"encoder.norm": "encoder.final_layer_norm", "decoder.norm": "decoder.final_layer_norm"}

    @property
    def unread(self) -> Sequence[str]:
        # Early files have it; no version of the model reads it.
        return (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)

    def layers(self, keys: ConfigKeys) -> Mapping[str, LayerNames]:
        gated = _is_gated(keys)
        return {"encoder": _encoder(gated=gated), "decoder": _decoder(gated=gated)}

    def values(self, keys: ConfigKeys, stored: StoredTensors) -> dict[str, Any]:  # noqa: ARG002
        layers, heads = keys.integer("num_layers", also="num_hidden_layers"), keys.integer("num_heads")
        length = keys.integer("n_positions")
        return {
            "vocab_size": keys.integer("vocab_size"),
            "width": keys.integer("d_model", also="hidden_size"),
            "heads": heads,
            "inner_width": heads * keys.integer("d_kv"),
            "encoder_layers": layers,
            "decoder_layers": layers if _is_missing(keys, "num_decoder_layers") else keys.integer("num_decoder_layers"),
            "ffn_width": keys.integer("d_ff"),
            "max_source": length,
            "max_target": length,
            "norm": "pre",
            "norm_kind": "rms",
            "norm_eps": keys.number("layer_norm_epsilon"),
            "biases": False,
            "gated": _is_gated(keys),
            "activation": _activation(keys),
            "scale_embeddings": False,
            "positions": "none",
            "encoder_attention": "dot",
            "decoder_attention": "dot",
            "cross_attention": "dot",
            "relative": "table",
            "relative_window": _furthest(keys),
            "relative_each_layer": self.each_layer,
        }

    def embeddings(self, keys: ConfigKeys) -> EmbeddingNames:  # noqa: ARG002
        names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
        return EmbeddingNames(*names, "shared.weight")

    def tied(self, keys: ConfigKeys) -> bool:  # noqa: ARG002
        # What tie_word_embeddings = false means is how outputs are scaled; a file without a head is always tied.
        return True

    def stores_positions(self, stored: StoredTensors) -> bool:  # noqa: ARG002
        return False

    def special(self, keys: ConfigKeys, config: ModelConfig, stored: StoredTensors) -> dict[str, TensorRecipe]:  # noqa: ARG002
        recipes = {}
        if self._scales(keys):
            norm = Part("decoder.final_layer_norm.weight")
            recipes["decoder.norm.weight"] = TensorRecipe((norm,), partial(torch.mul, other=config.width**-0.5))
        for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
            for index in range(layers if self.each_layer else 1):
                place = f"{stack}.layers.{index}" if self.each_layer else stack
                recipes[f"{place}.relative.weights"] = _relative(keys, config, stack, index)
        return recipes

    def _scales(self, keys: ConfigKeys) -> bool:
        """Return whether outputs are divided by √width before the output matrix, as transformers 5 decides it."""
        if self.scales_outputs != "as configured":
            return self.scales_outputs == "always"
        if _is_missing(keys, "scale_decoder_outputs"):
            return keys.flag("tie_word_embeddings")
        return keys.flag("scale_decoder_outputs")


def _relative(keys: ConfigKeys, config: ModelConfig, stack: str, index: int) -> TensorRecipe:
    name = f"{stack}.block.{index}.{_SELF}relative_attention_bias.weight"
    shape = (keys.integer("relative_attention_num_buckets"), config.heads)
    fold = partial(distance_table, furthest=config.relative_window, both=stack == "encoder")
    return TensorRecipe((Part(name, shape),), fold)


def _furthest(keys: ConfigKeys) -> int:
    buckets, furthest = "relative_attention_num_buckets", "relative_attention_max_distance"
    count, distance = keys.integer(buckets, least=4), keys.integer(furthest)
    if distance <= count // 2:
        keys.refuse(furthest, f"must be more than half of {buckets} = {count}, found {distance}")
    return distance


def _is_missing(keys: ConfigKeys, name: str) -> bool:
    return keys.values.get(name) is None


def _is_gated(keys: ConfigKeys) -> bool:
    if _is_missing(keys, "is_gated_act"):
        return keys.text("feed_forward_proj").startswith("gated-")
    return keys.flag("is_gated_act")


def _activation(keys: ConfigKeys) -> str:
    if not _is_missing(keys, "dense_act_fn"):
        return activation_of(keys, "dense_act_fn")
    name = "feed_forward_proj"
    form = keys.text(name)
    # "gated-gelu" has always meant the approximation by tanh.
    return known_activation(keys, name, "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-"))
