"""BART and its relatives: one table of names; they differ in norms, positions and the output's bias."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from fatdeploy.export.models.hugging_face.config_keys import ConfigKeys, activation_of
from fatdeploy.export.models.hugging_face.embeddings import EmbeddingNames
from fatdeploy.export.models.hugging_face.folds import halves_table, learned_rows, shifted_table
from fatdeploy.export.models.hugging_face.recipes import LayerNames, Part, TensorRecipe
from fatdeploy.export.models.hugging_face.weight_files import StoredTensors
from fatdeploy.export.reference.config import EmbeddingNorm, ModelConfig

_SHARED_PARTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "ffn.residual.norm": ("final_layer_norm",),
    "ffn.into": ("fc1",),
    "ffn.out": ("fc2",),
}
_ENCODER_PARTS = _SHARED_PARTS | {"residual.norm": ("self_attn_layer_norm",)}
_DECODER_PARTS = _SHARED_PARTS | {
    "self_residual.norm": ("self_attn_layer_norm",),
    "cross_residual.norm": ("encoder_attn_layer_norm",),
    "cross.q": ("encoder_attn.q_proj",),
    "cross.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross.out": ("encoder_attn.out_proj",),
}
_LAYERS = {
    "encoder": LayerNames("model.encoder.layers.{index}.", _ENCODER_PARTS),
    "decoder": LayerNames("model.decoder.layers.{index}.", _DECODER_PARTS),
}
_TOP = {
    "encoder.norm": "model.encoder.layer_norm",
    "decoder.norm": "model.decoder.layer_norm",
    "source_norm": "model.encoder.layernorm_embedding",
    "target_norm": "model.decoder.layernorm_embedding",
}
_POSITIONS = {"source": "model.encoder.embed_positions.weight", "target": "model.decoder.embed_positions.weight"}
_BIAS = "final_logits_bias"
# Files may mark their origin and store positions that a formula gives. A bias of zeros is left out.
_UNREAD = (r"model\.(encoder|decoder)\.(version|embed_positions\.(weights?|_float_tensor))", _BIAS)
_DEFAULTS = {
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "d_model": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class BartFamily:
    """BART, Marian, mBART, M2M100 and others with the same layers."""

    norm: Literal["pre", "post"]
    positions: Literal["learned", "halves", "shifted"]
    offset: int = 0  # rows of a learned table that belong to no position
    source_norm: EmbeddingNorm = "none"
    target_norm: EmbeddingNorm = "none"
    scales_targets: bool = True  # scale_embedding is about target tokens, too
    own_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {**_DEFAULTS, **self.own_defaults}

    @property
    def prefix(self) -> str:
        return "model."

    @property
    def top(self) -> Mapping[str, str]:
        return _TOP

    @property
    def unread(self) -> Sequence[str]:
        return _UNREAD

    def layers(self, keys: ConfigKeys) -> Mapping[str, LayerNames]:  # noqa: ARG002
        return _LAYERS

    def values(self, keys: ConfigKeys, stored: StoredTensors) -> dict[str, Any]:
        self._refuse_other_forms(keys)
        length = keys.integer("max_position_embeddings")
        scaled = keys.flag("scale_embedding")
        return {
            **_vocabularies(keys),
            "width": keys.integer("d_model", also="hidden_size"),
            "heads": keys.integer("encoder_attention_heads", also="num_attention_heads"),
            "decoder_heads": keys.integer("decoder_attention_heads"),
            "encoder_layers": keys.integer("encoder_layers", also="num_hidden_layers"),
            "decoder_layers": keys.integer("decoder_layers"),
            "ffn_width": keys.integer("encoder_ffn_dim"),
            "decoder_ffn_width": keys.integer("decoder_ffn_dim"),
            "max_source": length,
            "max_target": length,
            "norm": self.norm,
            "activation": activation_of(keys, "activation_function"),
            "scale_embeddings": scaled and self.scales_targets,
            # Sources alone are scaled: they need a matrix of their own.
            **({"tie_embeddings": False} if scaled and not self.scales_targets else {}),
            "positions": "learned",
            "source_embedding_norm": self.source_norm,
            "target_embedding_norm": self.target_norm,
            "output_bias": _BIAS in stored and bool(stored[_BIAS].read().any()),
        }

    def embeddings(self, keys: ConfigKeys) -> EmbeddingNames:
        shared = "model.shared.weight" if keys.flag("share_encoder_decoder_embeddings") else None
        names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
        return EmbeddingNames(*names, shared)

    def tied(self, keys: ConfigKeys) -> bool:
        return keys.flag("tie_word_embeddings")

    def stores_positions(self, stored: StoredTensors) -> bool:
        return any(self._is_stored(name, stored) for name in _POSITIONS.values())

    def special(self, keys: ConfigKeys, config: ModelConfig, stored: StoredTensors) -> dict[str, TensorRecipe]:
        recipes = {
            "source_positions.table": self._positions(keys, _POSITIONS["source"], config.max_source, stored),
            "target_positions.table": self._positions(keys, _POSITIONS["target"], config.max_target, stored),
            "output_bias": TensorRecipe((Part(_BIAS, (1, config.vocab_size)),), lambda row: row[0]),
        }
        if keys.flag("scale_embedding") and not self.scales_targets:
            name = self.embeddings(keys).stored(stored, tied=self.tied(keys)).source
            recipes["source_embedding.weight"] = TensorRecipe(
                (Part(name),), partial(torch.mul, other=config.width**0.5)
            )
        if self.positions == "shifted" and config.bos_id == config.pad_id:
            # There a target that starts with padding has other positions when it is read at once than step by step.
            keys.refuse("decoder_start_token_id", f"must not be pad_token_id = {config.pad_id}")
        return recipes

    def _positions(self, keys: ConfigKeys, name: str, length: int, stored: StoredTensors) -> TensorRecipe:
        width, longest = keys.integer("d_model", also="hidden_size"), keys.integer("max_position_embeddings")
        if self.positions == "shifted":
            # Positions start after the id of padding.
            return TensorRecipe((), partial(shifted_table, length, width, keys.integer("pad_token_id", least=0) + 1))
        if not self._is_stored(name, stored):
            return TensorRecipe((), partial(halves_table, length, width))
        cut = partial(learned_rows, offset=self.offset, length=length)
        return TensorRecipe((Part(name, (longest + self.offset, width)),), cut)

    def _is_stored(self, name: str, stored: StoredTensors) -> bool:
        """Return whether positions are a table of the file, and not what the formula gives."""
        if self.positions != "halves":
            return self.positions == "learned"
        if name not in stored or len(stored[name].shape) != 2:
            return name in stored
        return not torch.equal(stored[name].read(), halves_table(*stored[name].shape))

    def _refuse_other_forms(self, keys: ConfigKeys) -> None:
        # Configurations of early versions say what the model type says today; a contradiction is another model.
        keys.expect("normalize_before", self.norm == "pre")
        keys.expect("add_final_layer_norm", self.norm == "pre")
        keys.expect("normalize_embedding", self.source_norm != "none")
        keys.expect("static_position_embeddings", self.positions != "learned")


def _vocabularies(keys: ConfigKeys) -> dict[str, int]:
    source = keys.integer("vocab_size")
    if keys.flag("share_encoder_decoder_embeddings") or keys.values.get("decoder_vocab_size") is None:
        return {"vocab_size": source}
    return {"vocab_size": keys.integer("decoder_vocab_size"), "source_vocab_size": source}
