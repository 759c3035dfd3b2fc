"""Every legal value of every choice, as changes to a tiny preset; and an independent list of legal combinations."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.decoder import DecoderState
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import PRESETS, config_from_preset
from fatdeploy.export.reference.weights import random_model

AUTOREGRESSIVE = [preset for preset in PRESETS if preset != "transformer-nat"]
DIRECTIONS = ["both", "left_to_right", "right_to_left"]

_DIRECTED: list[dict[str, Any]] = [
    {"encoder_attention": "scaled_dot"},
    {"encoder_attention": "dot"},
    {"encoder_attention": "additive"},
    {"encoder_attention": "slow"},
    {"encoder_attention": "local", "window": 2},
    {"encoder_attention": "strided", "stride": 3},
    {"encoder_attention": "global_tokens", "n_global_tokens": 2},
    {"encoder_attention": ("local", "strided"), "window": 1},
    {"encoder_attention": ("global_tokens", "local")},
    {"encoder_attention": "linear", "features": "elu"},
    {"encoder_attention": "linear", "features": "random"},
    {"encoder_attention": "linear", "features": "performer"},
    {"encoder_attention": "synthesizer", "synthesizer": "random"},
    {"encoder_attention": "synthesizer", "synthesizer": "dense"},
]

ENCODER: list[dict[str, Any]] = [
    *({**attention, "encoder_direction": direction} for attention in _DIRECTED for direction in DIRECTIONS),
    {"encoder_attention": "linear", "features": "softmax"},
    {"encoder_attention": "linformer", "linformer_rows": 5},
    {"encoder_attention": "compressed", "compression": 3},
    *({"encoder_attention": "lstm", "encoder_direction": direction} for direction in DIRECTIONS),
    {"encoder_attention": "gru"},
    {"encoder_attention": "slow", "norm": "post"},
    {"encoder_attention": "slow", "relative": "table"},
    {"encoder_attention": ("strided", "global_tokens"), "relative": "angle"},
    {"encoder_attention": "additive", "relative": "angle"},
]

DECODER: list[dict[str, Any]] = [
    {"decoder_attention": "dot"},
    {"decoder_attention": "additive", "relative": "table"},
    {"decoder_attention": "local", "window": 3, "relative": "angle"},
    {"decoder_attention": "linear", "features": "elu"},
    {"decoder_attention": "linear", "features": "random"},
    {"decoder_attention": "linear", "features": "performer"},
    {"decoder_attention": "lstm"},
    {"decoder_attention": "gru", "encoder_attention": "gru", "positions": "none"},
    {"decoder_attention": "lstm", "cross_attention": "none", "encoder_attention": "lstm"},
    {"decoder_attention": "gru", "cross_attention": "fast_fc", "fc_softmax": "softmax", "copy": True},
    {"decoder_attention": "fully_connected", "cross_attention": "none"},
    {"decoder_attention": "fully_connected", "cross_attention": "none", "encoder_attention": "gru"},
    {"cross_attention": "dot"},
    {"cross_attention": "additive"},
    *({"cross_attention": "fast_fc", "fc_softmax": form} for form in ("tanh", "tanh_bounded", "softmax")),
    {"cross_wiring": "matched", "norm": "pre"},
    {"cross_wiring": "matched", "norm": "post"},
    {"cross_wiring": "mixed", "norm": "pre", "encoder_layers": 3},
    {"cross_wiring": "mixed", "norm": "post", "encoder_layers": 2, "decoder_layers": 1},
    {"cross_attention": "location", "location_window": 2},
    {"cross_attention": "location", "copy": True, "decoder_attention": "linear"},
    {"cross_attention": "monotonic"},
    {"cross_attention": "monotonic", "copy": True, "norm": "post", "inner_width": 48},
]

# Values that models of other origins need, alone and as families have them together.
OTHERS: list[dict[str, Any]] = [
    {"norm_kind": "rms", "norm_eps": 1e-6},
    {"norm_kind": "rms", "norm": "post"},
    {"norm_eps": 1e-12, "norm": "post"},
    {"biases": False},
    {"activation": "gelu_tanh", "gated": True},
    {"inner_width": 48},
    {"decoder_heads": 4, "relative": "table"},
    {"decoder_ffn_width": 24},
    {"source_embedding_norm": "after", "target_embedding_norm": "before"},
    {"source_embedding_norm": "before", "target_embedding_norm": "after", "norm": "post"},
    {"output_bias": True},
    {"output_bias": True, "copy": True},
    {"tie_output": "no"},
    {"tie_embeddings": False, "tie_output": "yes"},
    {"tie_embeddings": False, "source_vocab_size": 60},
    {"relative": "table", "relative_window": 3},
    {"relative": "table", "relative_window": 5, "relative_each_layer": True},
    {"relative": "angle", "relative_each_layer": True},
    {"head": "dense_norm", "activation": "gelu"},
    {
        "norm_kind": "rms",
        "biases": False,
        "gated": True,
        "activation": "gelu_tanh",
        "inner_width": 24,
        "positions": "none",
        "relative": "table",
        "relative_window": 6,
        "relative_each_layer": True,
        "encoder_attention": "dot",
        "decoder_attention": "dot",
        "cross_attention": "dot",
        "tie_output": "no",
        "scale_embeddings": False,
        "decoder_heads": 4,
    },
    {
        "norm": "post",
        "norm_eps": 1e-12,
        "activation": "gelu",
        "head": "dense_norm",
        "output_bias": True,
        "positions": "learned",
        "source_embedding_norm": "after",
        "target_embedding_norm": "after",
        "tie_embeddings": False,
        "tie_output": "yes",
        "source_vocab_size": 60,
        "decoder_ffn_width": 40,
    },
]

_FAST_FC = {"cross_attention": "fast_fc"}
_SKIPS = {"hybrid": True, "hybrid_skips": "layer"}

# What the articles publish and no other preset has.
PUBLISHED: list[dict[str, Any]] = [
    {**_FAST_FC, "fc_keys": "embedded"},
    {**_FAST_FC, "fc_keys": "embedded", "norm": "post", "cross_wiring": "matched"},
    {**_FAST_FC, "fc_table": "vocabulary"},
    {**_FAST_FC, "fc_table": "vocabulary", "fc_softmax": "softmax"},
    {**_FAST_FC, "fc_table": "vocabulary", "tie_embeddings": False, "source_vocab_size": 60},
    {**_FAST_FC, "fc_scale": False, "fc_softmax": "tanh"},
    {**_FAST_FC, "decoder_attention": "none"},
    {**_FAST_FC, "decoder_attention": "none", "hybrid": True},
    {**_FAST_FC, **_SKIPS, "decoder_attention": "none", "norm": "post"},
    {**_FAST_FC, **_SKIPS, "decoder_attention": "none", "fc_softmax": "softmax", "copy": True},
    {**_SKIPS, "decoder_attention": "linear", "features": "elu", "attention_relu": True},
    {**_SKIPS, "decoder_attention": "linear", "features": "performer", "norm": "post", "positions": "none"},
    {**_FAST_FC, "decoder_attention": "gru", "fc_keys": "embedded", "fc_table": "vocabulary", "fc_scale": False},
    {"relative": "matrix"},
    {"relative": "matrix", "relative_window": 3, "relative_each_layer": True, "relative_self": False},
    {"relative": "matrix", "encoder_attention": ("local", "strided"), "decoder_attention": "local", "window": 3},
    {"relative": "matrix", "decoder_attention": "dot", "decoder_heads": 4, "norm": "post"},
    {"relative": "angle", "relative_self": False},
    {"relative": "table", "relative_self": False, "encoder_attention": "slow", "decoder_attention": "additive"},
    {"attention_relu": True},
    {"attention_relu": True, "norm": "post", "hybrid": True},
    {"ffn_skip": True, "ffn_width": 32},
    {"ffn_skip": True, "ffn_width": 32, "gated": True, "norm": "post", "biases": False},
]

REST: list[dict[str, Any]] = [
    {"norm": "post"},
    {"activation": "gelu"},
    {"activation": "swish"},
    {"tie_embeddings": False},
    {"scale_embeddings": False},
    {"positions": "learned"},
    {"positions": "none"},
    {"relative": "table"},
    {"relative": "angle"},
    {"positional_mlp": 4},
    {"positional_mlp": 4, "positions": "learned"},
    {"head": "mlp"},
    {"copy": True},
    {"copy": True, "hybrid": True},
    {"copy": True, "cross_attention": "fast_fc", "fc_softmax": "softmax"},
    {"target_order": "right_to_left"},
    {"hybrid": True},
    {"hybrid": True, "norm": "post", "hybrid_threshold": 0.2},
    {"hybrid": True, "cross_attention": "additive"},
    {"encoder_layers": 3, "decoder_layers": 1},
    {"heads": 1},
    {"pad_id": 5, "bos_id": 0, "eos_id": 9},
    {"pad_id": 3, "bos_id": 3, "eos_id": 9},
    {"pad_id": 7, "bos_id": 9, "eos_id": 9},
    *OTHERS,
    *PUBLISHED,
]

# Turns the preset ``fast`` into a plain transformer.
PLAIN: dict[str, Any] = {"positions": "sinusoidal", "relative": "none", "positional_mlp": 0}

CHOICES = [*ENCODER, *DECODER, *REST]


def name_of(changes: object) -> str:
    """Return the changes as a test's name."""
    if not isinstance(changes, dict):
        return str(changes)
    return ",".join(f"{key}={'+'.join(value) if isinstance(value, tuple) else value}" for key, value in changes.items())


def tiny(changes: dict[str, Any], base: str = "fast") -> ReferenceModel:
    """Return a tiny lively model: ``scaled_dot`` everywhere, pre-norm, sinusoidal positions, and the changes."""
    plain = PLAIN if base == "fast" else {}
    return random_model(config_from_preset(f"{base}-tiny", **{**plain, **changes}), seed=1)


def drawn_batch(config: ModelConfig, lengths: list[int], targets: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded random sources of these lengths, their mask, and random target inputs that begin with BOS."""
    draw = np.random.default_rng(seed)
    source = np.full((len(lengths), max(lengths)), config.pad_id)
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    source[mask] = draw.integers(0, config.source_vocab_size or config.vocab_size, mask.sum())
    target = draw.integers(0, config.vocab_size, (len(lengths), targets))
    target[:, 0] = config.bos_id
    return torch.from_numpy(source), torch.from_numpy(mask), torch.from_numpy(target)


def with_rows(state: DecoderState, rows_per_source: int) -> DecoderState:
    """Return a state before the first token with several rows per source."""
    layers = [tuple(tensor.repeat_interleave(rows_per_source, 0) for tensor in layer) for layer in state.layers]
    return DecoderState(state.position, layers)


def legal(values: dict[str, Any]) -> bool:
    """Return whether these choices are legal together: the table line by line, not the code under test."""
    encoder, decoder, features = values["encoder_attention"], values["decoder_attention"], values["features"]
    cells = {"lstm", "gru"}
    directed = {"scaled_dot", "dot", "additive", "slow", "local", "strided", "global_tokens", "synthesizer"} | cells
    relative = directed - {"synthesizer"} - cells
    matrix = values["relative"] == "matrix"
    fast_fc = values["cross_attention"] == "fast_fc"
    by_source = values["fc_keys"] == "embedded" or values["fc_table"] == "vocabulary" or not values["fc_scale"]
    skips = values["hybrid_skips"] == "layer"
    recurrent = decoder in cells | {"fully_connected"}
    mix = isinstance(encoder, tuple)
    directed_ok = mix or encoder in directed or (encoder == "linear" and features != "softmax")
    relative_ok = (mix or encoder in relative) and decoder not in {"linear", "none"} and not recurrent
    return not (
        (values["encoder_direction"] != "both" and not directed_ok)
        or (values["relative"] != "none" and not relative_ok)
        or (decoder == "linear" and features == "softmax")
        or (values["cross_attention"] == "none" and (not recurrent or values["copy"]))
        or (decoder == "fully_connected" and values["cross_attention"] != "none")
        or (recurrent and (values["cross_wiring"] != "last" or values["hybrid"]))
        or (
            values["cross_attention"] in {"location", "monotonic"}
            and (recurrent or values["hybrid"] or values["decoding"] == "parallel")
        )
        or (values["cross_wiring"] == "mixed" and values["encoder_layers"] == 1)
        or (decoder == "full") != (values["decoding"] == "parallel")
        or (values["copy"] and values["cross_attention"] == "fast_fc" and values["fc_softmax"] != "softmax")
        or (values["cross_wiring"] == "matched" and values["encoder_layers"] != values["decoder_layers"])
        or (values["positional_mlp"] and values["positions"] == "none")
        or (values["hybrid"] and values["decoding"] == "parallel")
        or ((values["relative_each_layer"] or not values["relative_self"]) and values["relative"] == "none")
        or (matrix and (encoder in {"additive", "slow"} or decoder == "additive"))
        or ((by_source or decoder == "none") and not fast_fc)
        or (skips and not (values["hybrid"] and decoder in {"linear", "none"}))
        or (values["ffn_skip"] and (values["ffn_width"] != 32 or values["decoder_ffn_width"] not in {0, 32}))
        or (
            (not values["biases"] or values["inner_width"])
            and (
                encoder in {"slow", "compressed", "synthesizer"} | cells
                or recurrent
                or values["cross_attention"] == "fast_fc"
            )
        )
        or (values["bos_id"] == 2 and (values["decoding"] == "parallel" or values["hybrid"]))
        or (values["source_vocab_size"] and (values["tie_embeddings"] or values["copy"] or values["hybrid"]))
    )
