"""Configurations: round trip, every refusal with its reason, all reasons at once; presets as in the table."""

import dataclasses
import json
from typing import Any

import pytest

from fatdeploy.errors import ConfigError
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.presets import config_from_preset, preset_names
from fatdeploy.export.reference.summary import parameter_count

SIZES = {
    "vocab_size": 20,
    "width": 8,
    "heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "ffn_width": 8,
    "max_source": 8,
    "max_target": 8,
}


@pytest.mark.parametrize("name", preset_names())
def test_json_restores_every_preset(name: str) -> None:
    config = config_from_preset(name)
    assert ModelConfig.from_json(config.to_json()) == config


def test_json_restores_a_mix_of_heads_as_a_tuple() -> None:
    config = ModelConfig(**SIZES, encoder_attention=("local", "strided"))
    assert ModelConfig.from_json(config.to_json()).encoder_attention == ("local", "strided")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_target": 0}, "max_target: must be at least 1, found 0"),
        ({"heads": 3}, "width: 8 is not a multiple of heads = 3"),
        ({"heads": True}, "heads: expected int, found True"),
        ({"width": "8"}, "width: expected int, found '8'"),
        ({"width": 7, "heads": 1}, "sinusoidal positions need an even width, found 7"),
        ({"norm": "middle"}, r"norm: expected one of \['pre', 'post'\], found 'middle'"),
        ({"dropout": 1.0}, "dropout: must be below 1, found 1.0"),
        ({"dropout": float("nan")}, "dropout: must be at least 0, found nan"),
        ({"hybrid_threshold": 1.5}, "hybrid_threshold: must be at most 1"),
        ({"eos_id": 20}, "eos_id: must be below vocab_size = 20, found 20"),
        ({"eos_id": 1, "hybrid": True}, "pad_id, bos_id, eos_id: must differ with the hybrid forward pass"),
        (
            {"eos_id": 1, "decoding": "parallel", "decoder_attention": "full"},
            "pad_id, bos_id, eos_id: must differ with parallel decoding",
        ),
        ({"decoder_heads": 3}, "width: 8 is not a multiple of decoder_heads = 3"),
        ({"inner_width": 9}, "inner_width: 9 is not a multiple of heads = 2"),
        ({"inner_width": 4, "encoder_attention": "slow"}, "inner_width: encoder_attention = slow has matrices of"),
        ({"biases": False, "cross_attention": "fast_fc"}, "biases: cross_attention = fast_fc has matrices of"),
        ({"relative_each_layer": True}, "relative_each_layer: needs relative scores"),
        ({"source_vocab_size": 12}, "two vocabularies need two embeddings"),
        ({"source_vocab_size": 12, "tie_embeddings": False, "pad_id": 15}, "pad_id: must be below source_vocab_size"),
        ({"source_vocab_size": 12, "tie_embeddings": False, "copy": True}, "copy and hybrid compare ids of source"),
        ({"norm_eps": -1.0}, "norm_eps: must be at least 0, found -1.0"),
        ({"copy": 1}, "copy: expected bool, found 1"),
        ({"encoder_attention": ("local",)}, "one mask for each of 2 heads, found 1"),
        ({"encoder_attention": ("local", "slow")}, r"found \['slow'\]"),
        (
            {"encoder_attention": "linformer", "encoder_direction": "left_to_right"},
            "linformer attention has no direction",
        ),
        (
            {"encoder_attention": "linear", "features": "softmax", "encoder_direction": "right_to_left"},
            "linear with features = softmax attention has no direction",
        ),
        ({"encoder_attention": "synthesizer", "relative": "table"}, "synthesizer takes no relative scores"),
        ({"decoder_attention": "linear", "relative": "angle"}, "decoder_attention = linear takes no relative scores"),
        ({"decoder_attention": "linear", "features": "softmax"}, "softmax runs over all positions"),
        ({"decoder_attention": "full"}, "found full and autoregressive"),
        ({"decoding": "parallel"}, "found scaled_dot and parallel"),
        ({"cross_wiring": "matched", "encoder_layers": 2}, "found 2 and 1"),
        ({"cross_wiring": "mixed"}, "cross_wiring: mixed needs several encoder layers, found 1; use last"),
        ({"copy": True, "cross_attention": "fast_fc"}, "fc_softmax = tanh_bounded are not probabilities"),
        ({"positional_mlp": 2, "positions": "none"}, "positional_mlp: needs position vectors"),
        ({"hybrid": True, "decoding": "parallel", "decoder_attention": "full"}, "hybrid: decides by the input token"),
    ],
)
def test_an_illegal_value_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ModelConfig(**{**SIZES, **changes})


def test_all_reasons_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**{**SIZES, "heads": 3, "eos_id": 99, "decoder_attention": "linear", "relative": "table"})
    assert str(caught.value).count(";") == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON list, expected an object"),
        (json.dumps({**SIZES, "colour": 1}), "colour: unknown"),
        (json.dumps({key: value for key, value in SIZES.items() if key != "width"}), "width: missing"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ModelConfig.from_json(text)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_from_preset("fat-tiny").width = 64  # type: ignore[misc]


def test_an_unknown_preset_is_refused_with_the_available_ones() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'fat-huge'; .* transformer-tiny, .*fatdeploy presets"):
        config_from_preset("fat-huge")


def test_a_preset_with_unknown_names_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"refused: widht: unknown; colour: unknown; valid names are vocab_size, width, "
    ):
        config_from_preset("fat-tiny", widht=64, colour=1)


def test_a_preset_accepts_a_list_in_place_of_a_tuple() -> None:
    config = config_from_preset("fast-tiny", encoder_attention=["local", "strided"])
    assert config.encoder_attention == ("local", "strided")


def test_there_are_nine_presets_in_three_sizes() -> None:
    assert len(preset_names()) == 27
    named = {
        "transformer-base",
        "transformer-nat-small",
        "fast-tiny",
        "at-base",
        "at-linear-tiny",
        "rnn-base",
        "fat-small",
    }
    assert named <= set(preset_names())


def test_parameters_of_transformer_base_are_those_counted_by_hand() -> None:
    width, ffn = 512, 2048
    attention = 4 * (width * width + width)
    norm, network = 2 * width, width * ffn + ffn + ffn * width + width
    encoder, decoder = attention + network + 2 * norm, 2 * attention + network + 3 * norm
    assert parameter_count(config_from_preset("transformer-base")) == 32000 * width + 6 * (encoder + decoder)


def test_untied_embeddings_are_three_matrices() -> None:
    tied, untied = (parameter_count(ModelConfig(**SIZES, tie_embeddings=tie)) for tie in (True, False))
    assert untied - tied == 2 * 20 * 8
