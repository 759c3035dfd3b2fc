"""Generation configs of published models as default options: every key is mapped, has no effect, or is named."""

import json
import logging
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import GenerationConfig

from fatdeploy.errors import CheckpointError
from fatdeploy.export.models.hugging_face import generation_keys as keys
from fatdeploy.export.models.hugging_face.generation import generation_from_config
from fatdeploy.manifest import GenerationRecord

CLASSES = (keys.SAME_MEANING, keys.SAMPLED, keys.CONVERTERS, keys.NO_EFFECT, keys.NO_COUNTERPART)


@dataclass(frozen=True)
class Numbers:
    """What settings must fit."""

    vocab_size: int = 100
    max_target: int = 64
    bos_id: int = 2
    eos_id: int = 2


PUBLISHED: dict[str, tuple[Numbers, dict[str, Any], dict[str, Any]]] = {
    "opus-mt-zh-en": (
        Numbers(65001, 512, 65000, 0),
        {
            "bad_words_ids": [[65000]],
            "bos_token_id": 0,
            "decoder_start_token_id": 65000,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "max_length": 512,
            "num_beams": 6,
            "pad_token_id": 65000,
            "renormalize_logits": True,
        },
        {
            "bad_words": [[65000]],
            "forced_eos_id": 0,
            "max_new_tokens": 511,
            "num_beams": 6,
            "renormalize": True,
        },
    ),
    "bart-large-cnn": (
        Numbers(50264, 1024, 2, 2),
        {
            "bos_token_id": 0,
            "decoder_start_token_id": 2,
            "early_stopping": True,
            "eos_token_id": 2,
            "forced_bos_token_id": 0,
            "forced_eos_token_id": 2,
            "length_penalty": 2.0,
            "max_length": 142,
            "min_length": 56,
            "no_repeat_ngram_size": 3,
            "num_beams": 4,
            "pad_token_id": 1,
        },
        {
            "early_stopping": True,
            "forced_bos_id": 0,
            "forced_eos_id": 2,
            "length_penalty": 2.0,
            "max_new_tokens": 141,
            "min_new_tokens": 55,
            "no_repeat_ngram_size": 3,
            "num_beams": 4,
        },
    ),
    "flan-t5-small": (
        Numbers(32128, 512, 0, 1),
        {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
        {},
    ),
    "nllb-200-distilled-600M": (
        Numbers(256206, 1024, 2, 2),
        {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "max_length": 200, "pad_token_id": 1},
        {"max_new_tokens": 199},
    ),
    "m2m100_418M": (
        Numbers(128112, 1024, 2, 2),
        {
            "bos_token_id": 0,
            "decoder_start_token_id": 2,
            "early_stopping": True,
            "eos_token_id": 2,
            "max_length": 200,
            "num_beams": 5,
            "pad_token_id": 1,
        },
        {"early_stopping": True, "max_new_tokens": 199, "num_beams": 5},
    ),
    "mbart-large-50-many-to-many-mmt": (
        Numbers(250054, 1024, 2, 2),
        {
            "bos_token_id": 0,
            "decoder_start_token_id": 2,
            "early_stopping": True,
            "eos_token_id": 2,
            "forced_eos_token_id": 2,
            "max_length": 200,
            "num_beams": 5,
            "pad_token_id": 1,
        },
        {"early_stopping": True, "forced_eos_id": 2, "max_new_tokens": 199, "num_beams": 5},
    ),
    "pegasus-xsum": (
        Numbers(96103, 512, 0, 1),
        {
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": 1,
            "forced_eos_token_id": 1,
            "length_penalty": 0.6,
            "max_length": 64,
            "num_beams": 8,
            "pad_token_id": 0,
        },
        {"forced_eos_id": 1, "length_penalty": 0.6, "max_new_tokens": 63, "num_beams": 8},
    ),
    "blenderbot-400M-distill": (
        Numbers(8008, 128, 1, 2),
        {
            "bos_token_id": 1,
            "decoder_start_token_id": 1,
            "encoder_no_repeat_ngram_size": 3,
            "eos_token_id": 2,
            "forced_eos_token_id": 2,
            "length_penalty": 0.65,
            "max_length": 60,
            "min_length": 20,
            "no_repeat_ngram_size": 3,
            "num_beams": 10,
            "pad_token_id": 0,
        },
        {
            "encoder_no_repeat_ngram_size": 3,
            "forced_eos_id": 2,
            "length_penalty": 0.65,
            "max_new_tokens": 59,
            "min_new_tokens": 19,
            "no_repeat_ngram_size": 3,
            "num_beams": 10,
        },
    ),
}


def record_of(generation: dict[str, Any] | None, config: dict[str, Any] | None = None) -> GenerationRecord:
    return generation_from_config(config or {}, generation, Numbers())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_decodes_as_its_authors_do(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, generation, options = PUBLISHED[name]
    file = {"_from_model_config": True, **generation, "transformers_version": "4.27.0"}
    assert generation_from_config({"num_beams": 9}, file, model) == GenerationRecord(options)
    # The same keys in config.json count where there is no other file.
    config = {"model_type": "any", "d_model": 16, "use_cache": True, **generation}
    assert generation_from_config(config, None, model) == GenerationRecord(options)
    assert generation_from_config(config, {}, model) == GenerationRecord(options)
    assert not caplog.messages


def test_every_key_of_the_installed_transformers_belongs_to_one_class() -> None:
    theirs = set(GenerationConfig().to_dict())
    assert theirs - keys.KNOWN == set()
    counts = {name: sum(name in names for names in CLASSES) for name in keys.KNOWN}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    # Keys that only older versions wrote.
    assert keys.KNOWN - theirs == {
        "_commit_hash",
        "force_bos_token_to_be_generated",
        "forced_decoder_ids",
        "generation_kwargs",
    }


def test_the_defaults_of_the_installed_transformers_change_nothing_but_the_length() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    assert record_of(defaults) == GenerationRecord({"max_new_tokens": 19})


def test_legacy_keys_are_those_that_the_installed_transformers_takes() -> None:
    decoder = {"max_length": 40, "num_beams": 3, "decoder_start_token_id": 7, "vocab_size": 5, "top_k": 50}
    config = {
        "num_beams": 2,
        "d_model": 4,
        "bos_token_id": 9,
        "force_bos_token_to_be_generated": True,
        "decoder": decoder,
    }
    theirs = GenerationConfig.from_model_config(json.loads(json.dumps(config)))
    expected = {"max_new_tokens": theirs.max_length - 1, "num_beams": theirs.num_beams}
    expected |= {"start_id": theirs.decoder_start_token_id, "forced_bos_id": theirs.forced_bos_token_id}
    assert record_of(None, config) == GenerationRecord(expected)
    assert expected == {"max_new_tokens": 39, "num_beams": 2, "start_id": 7, "forced_bos_id": 9}


@pytest.mark.parametrize(
    ("generation", "options"),
    [
        ({"max_length": 10, "max_new_tokens": 30}, {"max_new_tokens": 30}),
        ({"max_length": 999}, {"max_new_tokens": 64}),
        ({"max_new_tokens": 999}, {"max_new_tokens": 64}),
        ({"min_length": 1}, {}),
        ({"min_length": 9, "min_new_tokens": 3}, {"min_new_tokens": 3}),
        ({"min_length": 30, "max_length": 11}, {"max_new_tokens": 10, "min_new_tokens": 10}),
        ({"min_new_tokens": 99}, {"min_new_tokens": 64}),
        ({"max_time": 2.5}, {"timeout_s": 2.5}),
    ],
    ids=str,
)
def test_lengths_count_the_start_token_there_and_not_here(generation: dict, options: dict) -> None:
    assert record_of(generation) == GenerationRecord(options)


@pytest.mark.parametrize(
    ("generation", "options"),
    [
        ({"eos_token_id": 2}, {}),
        ({"eos_token_id": [2]}, {}),
        ({"eos_token_id": 5}, {"eos_ids": [5]}),
        ({"eos_token_id": [2, 5]}, {"eos_ids": [2, 5]}),
        ({"decoder_start_token_id": 7, "bos_token_id": 8}, {"start_id": 7}),
        ({"decoder_start_token_id": [7]}, {"start_id": 7}),
        ({"bos_token_id": 8}, {"start_id": 8}),
        ({"forced_eos_token_id": [3]}, {"forced_eos_id": 3}),
        ({"forced_bos_token_id": 0}, {"forced_bos_id": 0}),
        ({"suppress_tokens": [], "begin_suppress_tokens": [4]}, {"begin_suppress_tokens": [4]}),
        ({"suppress_tokens": [4, 5]}, {"suppress_tokens": [4, 5]}),
        # A word that is EOS alone is left out there too.
        ({"bad_words_ids": [[2], [3, 4]]}, {"bad_words": [[3, 4]]}),
        ({"bad_words_ids": [[2], [5], [3]], "eos_token_id": [2, 5]}, {"bad_words": [[3]], "eos_ids": [2, 5]}),
        ({"bad_words_ids": [[2]]}, {}),
        ({"forced_decoder_ids": [[1, 40], [2, 41]]}, {"forced_tokens": [[0, 40], [1, 41]]}),
        ({"forced_decoder_ids": []}, {}),
        ({"sequence_bias": [[[3, 4], -2.0], [[5], 1.0]]}, {"sequence_bias": [[[3, 4], -2.0], [[5], 1.0]]}),
        ({"sequence_bias": {"(3, 4)": -2.0, "(5,)": 1.0}}, {"sequence_bias": [[[3, 4], -2.0], [[5], 1.0]]}),
        ({"stop_strings": "end"}, {"stop": ["end"]}),
        ({"stop_strings": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"exponential_decay_length_penalty": [5, 1.1]}, {"exponential_decay_length_penalty": [5, 1.1]}),
        ({"encoder_repetition_penalty": 1.2, "repetition_penalty": 1.0}, {"encoder_repetition_penalty": 1.2}),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 2},
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 2},
        ),
    ],
    ids=str,
)
def test_a_key_becomes_the_option_of_the_same_meaning(generation: dict, options: dict) -> None:
    assert record_of(generation) == GenerationRecord(options)


def test_a_mapping_with_tuples_is_read_as_the_installed_transformers_writes_it() -> None:
    written = json.loads(GenerationConfig(sequence_bias={(3, 4): -2.0, (5,): 1.5}).to_json_string())
    assert record_of(written) == GenerationRecord({"sequence_bias": [[[3, 4], -2.0], [[5], 1.5]]})


@pytest.mark.parametrize(
    ("generation", "options"),
    [
        ({"do_sample": True}, {"sample": True, "top_k": 50}),
        ({"do_sample": True, "top_k": 0, "temperature": 0.7}, {"sample": True, "temperature": 0.7}),
        ({"do_sample": True, "top_k": 5, "top_p": 0.9}, {"sample": True, "top_k": 5, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 50, "min_p": 0.1}, {"sample": True, "top_k": 50, "min_p": 0.1}),
        ({"do_sample": True, "top_k": 0, "typical_p": 0.4}, {"sample": True, "typical_p": 0.4}),
        ({"do_sample": True, "top_k": 0, "typical_p": 1.5, "eta_cutoff": 2, "epsilon_cutoff": -1}, {"sample": True}),
        (
            {"do_sample": True, "top_k": 0, "eta_cutoff": 3e-4, "epsilon_cutoff": 9e-4},
            {"sample": True, "eta_cutoff": 3e-4, "epsilon_cutoff": 9e-4},
        ),
        ({"do_sample": False, "top_k": 50, "temperature": 1.0}, {}),
    ],
    ids=str,
)
def test_options_of_sampling_count_where_the_model_samples(generation: dict, options: dict) -> None:
    assert record_of(generation) == GenerationRecord(options)


@pytest.mark.parametrize(
    "ignored",
    [
        {"guidance_scale": 1.5},
        {"remove_invalid_values": True},
        {"watermarking_config": {"bias": 2.5}},
        {"cache_implementation": "quantized"},
        {"prompt_lookup_num_tokens": 3},
        {"top_h": 0.4},
        {"temperature": 0.7},  # without do_sample
        {"top_k": 5, "eta_cutoff": 0.1},
        {"diversity_penalty": 0.5},  # without groups
        {"forced_eos_token_id": [2, 3]},
        {"decoder_start_token_id": [4, 5]},
        {"forced_decoder_ids": [[1, None], [2, 5]]},
        {"forced_decoder_ids": [[0, 5]]},
        {"force_bos_token_to_be_generated": True},  # counts only in config.json
        {"lang_code_to_id": {"deu": 4}},
        {"a key of a later version": [1]},
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_recorded_and_named_in_one_warning(
    ignored: dict, caplog: pytest.LogCaptureFixture
) -> None:
    assert record_of({"num_beams": 3, "no such key": None, **ignored}) == GenerationRecord({"num_beams": 3}, ignored)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for name, value in ignored.items():
        assert f"{name} = {json.dumps(value)}" in record.message


def test_values_without_effect_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    neutral = {
        "guidance_scale": 1.0,
        "remove_invalid_values": False,
        "cache_implementation": "static",
        "penalty_alpha": 0,
    }
    neutral |= {"use_cache": False, "output_scores": True, "num_assistant_tokens": 7, "generation_kwargs": {}}
    assert record_of(neutral) == GenerationRecord()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("generation", "reason"),
    [
        ({"max_length": 1}, r"max_length must be a whole number from 2 up \(it counts the start token\), found 1"),
        ({"max_length": "9", "min_length": 3}, "found '9'. Correct these keys or remove them$"),
        ({"min_length": -1}, "min_length must be a whole number from 0 up, found -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1 up, found 0"),
        ({"num_beams": "4"}, "num_beams must be a whole number from 1 up, found '4'"),
        ({"num_return_sequences": 3}, r"num_return_sequences must lie in 1…1 \(num_beams\), found 3"),
        ({"do_sample": True, "temperature": 0}, "temperature must be a number above 0, found 0"),
        ({"do_sample": True, "epsilon_cutoff": 0.0, "top_p": "x"}, "top_p must be a number above 0.*found 'x'"),
        ({"suppress_tokens": [-1]}, r"suppress_tokens must be token ids, found \[-1\]"),
        ({"suppress_tokens": [7, 100]}, "suppress_tokens must be ids in 0…99, found 100"),
        ({"forced_bos_token_id": 250}, "forced_bos_id must be ids in 0…99, found 250"),
        ({"bad_words_ids": [[3, 100]]}, "bad_words must be ids in 0…99, found 100"),
        ({"bad_words_ids": 3}, "bad_words must be lists of token ids, none empty, found 3"),
        ({"forced_decoder_ids": [[1, 100]]}, "forced_tokens must be ids in 0…99, found 100"),
        ({"sequence_bias": [[[100], 1.0]]}, "sequence_bias must be ids in 0…99, found 100"),
        (
            {"sequence_bias": {"five": 1.0}},
            r"sequence_bias must have token ids as keys, such as \(5, 6\), found 'five'",
        ),
        ({"sequence_bias": 3}, "sequence_bias must be pairs of token ids and a number, found 3"),
        ({"new key": float("nan")}, "new key cannot be written as JSON: "),
    ],
    ids=str,
)
def test_a_value_that_contradicts_the_model_is_refused(generation: dict, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"^generation_config.json refused: .*{reason}"):
        record_of(generation)


def test_all_reasons_are_given_at_once_with_the_file_that_has_them() -> None:
    wrong = {"max_length": 0, "suppress_tokens": [100], "eos_token_id": [2, 300], "forced_eos_token_id": 400}
    with pytest.raises(CheckpointError) as caught:
        record_of(None, wrong)
    message = str(caught.value)
    assert message.startswith("config.json refused: max_length must be ")
    for reason in ("suppress_tokens must be ids in 0…99, found 100", "eos_ids", "forced_eos_id"):
        assert reason in message
    assert message.count("max_length") == 1
