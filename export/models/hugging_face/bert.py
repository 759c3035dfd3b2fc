"""``encoder-decoder`` with BERT on both sides: token types folded into positions, BERT's own head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fatdeploy.export.models.hugging_face.config_keys import ConfigKeys, activation_of
from fatdeploy.export.models.hugging_face.embeddings import EmbeddingNames
from fatdeploy.export.models.hugging_face.folds import positions_with_types
from fatdeploy.export.models.hugging_face.recipes import LayerNames, Part, TensorRecipe
from fatdeploy.export.models.hugging_face.weight_files import StoredTensors
from fatdeploy.export.reference.config import ModelConfig

_SELF, _CROSS = "attention.self.", "crossattention.self."
_SHARED_PARTS = {
    "attention.qkv": (f"{_SELF}query", f"{_SELF}key", f"{_SELF}value"),
    "attention.out": ("attention.output.dense",),
    "ffn.residual.norm": ("output.LayerNorm",),
    "ffn.into": ("intermediate.dense",),
    "ffn.out": ("output.dense",),
}
_ENCODER_PARTS = _SHARED_PARTS | {"residual.norm": ("attention.output.LayerNorm",)}
_DECODER_PARTS = _SHARED_PARTS | {
    "self_residual.norm": ("attention.output.LayerNorm",),
    "cross_residual.norm": ("crossattention.output.LayerNorm",),
    "cross.q": (f"{_CROSS}query",),
    "cross.kv": (f"{_CROSS}key", f"{_CROSS}value"),
    "cross.out": ("crossattention.output.dense",),
}
_LAYERS = {
    "encoder": LayerNames("encoder.encoder.layer.{index}.", _ENCODER_PARTS),
    "decoder": LayerNames("decoder.bert.encoder.layer.{index}.", _DECODER_PARTS),
}
_HEAD = "decoder.cls.predictions."
_TOP = {
    "source_norm": "encoder.embeddings.LayerNorm",
    "target_norm": "decoder.bert.embeddings.LayerNorm",
    "head.into": f"{_HEAD}transform.dense",
    "head.norm": f"{_HEAD}transform.LayerNorm",
}
_BIASES = (f"{_HEAD}decoder.bias", f"{_HEAD}bias")
# A pooler is for classification, and position ids are 0, 1, 2, … in every file.
_UNREAD = (
    r"(encoder|decoder\.bert)\.(pooler\..*|embeddings\.position_ids)",
    *(name.replace(".", r"\.") for name in _BIASES),
)
_SIDE_DEFAULTS = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class BertFamily:
    """BERT as encoder and as decoder."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {}

    @property
    def prefix(self) -> str:
        return ""

    @property
    def top(self) -> Mapping[str, str]:
        return _TOP

    @property
    def unread(self) -> Sequence[str]:
        return _UNREAD

    def layers(self, keys: ConfigKeys) -> Mapping[str, LayerNames]:  # noqa: ARG002
        return _LAYERS

    def values(self, keys: ConfigKeys, stored: StoredTensors) -> dict[str, Any]:  # noqa: ARG002
        encoder, decoder = _sides(keys)
        _refuse_other_forms(keys, encoder, decoder)
        return {
            "vocab_size": decoder.integer("vocab_size"),
            "source_vocab_size": encoder.integer("vocab_size"),
            "width": encoder.integer("hidden_size"),
            "heads": encoder.integer("num_attention_heads"),
            "decoder_heads": decoder.integer("num_attention_heads"),
            "encoder_layers": encoder.integer("num_hidden_layers"),
            "decoder_layers": decoder.integer("num_hidden_layers"),
            "ffn_width": encoder.integer("intermediate_size"),
            "decoder_ffn_width": decoder.integer("intermediate_size"),
            "max_source": encoder.integer("max_position_embeddings"),
            "max_target": decoder.integer("max_position_embeddings"),
            "norm": "post",
            "norm_eps": encoder.number("layer_norm_eps"),
            "activation": activation_of(encoder, "hidden_act"),
            "scale_embeddings": False,
            "positions": "learned",
            "source_embedding_norm": "after",
            "target_embedding_norm": "after",
            "head": "dense_norm",
            "output_bias": True,
        }

    def embeddings(self, keys: ConfigKeys) -> EmbeddingNames:  # noqa: ARG002
        return EmbeddingNames(
            source="encoder.embeddings.word_embeddings.weight",
            target="decoder.bert.embeddings.word_embeddings.weight",
            output=f"{_HEAD}decoder.weight",
        )

    def tied(self, keys: ConfigKeys) -> bool:
        return _sides(keys)[1].flag("tie_word_embeddings")

    def stores_positions(self, stored: StoredTensors) -> bool:  # noqa: ARG002
        return True

    def special(self, keys: ConfigKeys, config: ModelConfig, stored: StoredTensors) -> dict[str, TensorRecipe]:
        encoder, decoder = _sides(keys)
        # The bias that is added has the first name; where both are tied, a file may have the second alone.
        bias = next((name for name in _BIASES if name in stored), _BIASES[0])
        return {
            "source_positions.table": _positions("encoder.embeddings.", encoder, config.max_source),
            "target_positions.table": _positions("decoder.bert.embeddings.", decoder, config.max_target),
            "output_bias": TensorRecipe((Part(bias),)),
        }


def _sides(keys: ConfigKeys) -> tuple[ConfigKeys, ConfigKeys]:
    return keys.inner("encoder", _SIDE_DEFAULTS), keys.inner("decoder", _SIDE_DEFAULTS)


def _positions(stem: str, side: ConfigKeys, length: int) -> TensorRecipe:
    width = side.integer("hidden_size")
    parts = (
        Part(f"{stem}position_embeddings.weight", (side.integer("max_position_embeddings"), width)),
        Part(f"{stem}token_type_embeddings.weight", (side.integer("type_vocab_size"), width)),
    )
    return TensorRecipe(parts, partial(positions_with_types, length=length))


def _refuse_other_forms(keys: ConfigKeys, encoder: ConfigKeys, decoder: ConfigKeys) -> None:
    keys.expect("tie_encoder_decoder", value=False)
    for side in (encoder, decoder):
        side.expect("model_type", "bert")
        side.expect("position_embedding_type", "absolute")
        side.expect("pruned_heads", {})
    for name in ("is_decoder", "add_cross_attention"):
        if not decoder.flag(name):
            decoder.refuse(name, "must be true: the decoder has to see its past alone, and the source")
    encoder.expect("is_decoder", value=False)
    for name in ("hidden_size", "hidden_act", "layer_norm_eps"):
        ours, theirs = (side.values.get(name, _SIDE_DEFAULTS[name]) for side in (encoder, decoder))
        if ours != theirs:
            decoder.refuse(name, f"must be the encoder's {ours!r}, found {theirs!r}")
