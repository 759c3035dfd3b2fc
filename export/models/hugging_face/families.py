"""The known model types of Hugging Face: how each reads its configuration and names its tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fatdeploy.export.models.hugging_face.bart import BartFamily
from fatdeploy.export.models.hugging_face.bert import BertFamily
from fatdeploy.export.models.hugging_face.config_keys import ConfigKeys
from fatdeploy.export.models.hugging_face.embeddings import EmbeddingNames
from fatdeploy.export.models.hugging_face.recipes import LayerNames, TensorRecipe
from fatdeploy.export.models.hugging_face.t5 import T5Family
from fatdeploy.export.models.hugging_face.weight_files import StoredTensors
from fatdeploy.export.reference.config import ModelConfig


class Family(Protocol):
    """What a model type says about its folders."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """What a key means that the configuration does not have."""

    @property
    def prefix(self) -> str:
        """What names begin with, though a file of the bare model may leave it out."""

    @property
    def top(self) -> Mapping[str, str]:
        """Our modules outside of layers, with their stored names."""

    @property
    def unread(self) -> Sequence[str]:
        """Patterns of names that a file may have and that nothing reads."""

    def layers(self, keys: ConfigKeys) -> Mapping[str, LayerNames]:
        """Return the names of both stacks."""

    def values(self, keys: ConfigKeys, stored: StoredTensors) -> dict[str, Any]:
        """Return the values of ``ModelConfig``, without ids and what is tied."""

    def embeddings(self, keys: ConfigKeys) -> EmbeddingNames:
        """Return the names of the embeddings and the output matrix."""

    def tied(self, keys: ConfigKeys) -> bool:
        """Return whether one matrix stands for those of these names that a file does not have."""

    def stores_positions(self, stored: StoredTensors) -> bool:
        """Return whether positions come from a stored table, which ends; a formula does not."""

    def special(self, keys: ConfigKeys, config: ModelConfig, stored: StoredTensors) -> dict[str, TensorRecipe]:
        """Return the recipes that no table of names can say."""


_BART_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_BLENDERBOT_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_T5_IDS = {"pad_token_id": 0, "eos_token_id": 1}
_MT5 = {
    **_T5_IDS,
    "decoder_start_token_id": 0,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}

FAMILIES: dict[str, Family] = {
    "marian": BartFamily(
        norm="post",
        positions="halves",
        own_defaults={
            "vocab_size": 58101,
            "pad_token_id": 58100,
            "eos_token_id": 0,
            "decoder_start_token_id": 58100,
        },
    ),
    "bart": BartFamily(
        norm="post",
        positions="learned",
        offset=2,
        source_norm="after",
        target_norm="after",
        own_defaults={**_BART_IDS, "vocab_size": 50265, "decoder_start_token_id": 2},
    ),
    "plbart": BartFamily(
        norm="post",
        positions="learned",
        offset=2,
        source_norm="after",
        target_norm="after",
        own_defaults={
            **_BART_IDS,
            "vocab_size": 50005,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "d_model": 768,
            "scale_embedding": True,
        },
    ),
    "mbart": BartFamily(
        norm="pre",
        positions="learned",
        offset=2,
        source_norm="after",
        target_norm="after",
        own_defaults={**_BART_IDS, "vocab_size": 50265},
    ),
    "m2m_100": BartFamily(
        norm="pre",
        positions="shifted",
        own_defaults={
            **_BART_IDS,
            "vocab_size": 128112,
            "decoder_start_token_id": 2,
            "activation_function": "relu",
            "scale_embedding": True,
        },
    ),
    "pegasus": BartFamily(
        norm="pre",
        positions="halves",
        own_defaults={"vocab_size": 50265, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    ),
    "blenderbot": BartFamily(
        norm="pre",
        positions="learned",
        own_defaults={
            **_BLENDERBOT_IDS,
            "vocab_size": 8008,
            "max_position_embeddings": 128,
            "encoder_layers": 2,
            "decoder_layers": 24,
            "encoder_ffn_dim": 10240,
            "decoder_ffn_dim": 10240,
            "encoder_attention_heads": 32,
            "decoder_attention_heads": 32,
            "d_model": 2560,
        },
    ),
    "blenderbot-small": BartFamily(
        norm="post",
        positions="learned",
        source_norm="after",
        target_norm="before",
        # transformers 5 does not scale target tokens here; version 4 did.
        scales_targets=False,
        own_defaults={
            **_BLENDERBOT_IDS,
            "vocab_size": 50265,
            "max_position_embeddings": 512,
            "encoder_layers": 8,
            "decoder_layers": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "d_model": 512,
        },
    ),
    "t5": T5Family(
        scales_outputs="as configured",
        own_defaults={
            **_T5_IDS,
            "vocab_size": 32128,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "feed_forward_proj": "relu",
        },
    ),
    # transformers 5 decides these two by the model type; in version 4 tie_word_embeddings decided.
    "mt5": T5Family(scales_outputs="never", own_defaults=_MT5),
    "umt5": T5Family(scales_outputs="always", each_layer=True, own_defaults=_MT5),
    "encoder-decoder": BertFamily(),
}
