"""Options of decoding: each wrong value is refused with its name and range, before any work is done."""

from dataclasses import fields

import numpy as np
import pytest

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import ID_OPTIONS, OPTIONS, DecodeOptions
from tests.support.engines.tables import WORDS, TableEngine

WHOLE = "must be a whole number from"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *(("max_new_tokens", value, f"{WHOLE} 1 up") for value in (0, -1, 2.5, True, "3")),
        *(("min_new_tokens", value, f"{WHOLE} 0 up") for value in (-1, None)),
        *(("num_beams", value, f"{WHOLE} 1 up") for value in (0, 1.0, None)),
        *(
            ("length_penalty", value, "must be a number from -8 to 8")
            for value in (None, "1", 1j, np.inf, np.float32("nan"), 400, -400, -1e5, 8.5)
        ),
        *(("early_stopping", value, "must be True, False or 'never'") for value in (None, "always", 1, 0, np.ones(2))),
        *(("num_return_sequences", value, f"{WHOLE} 1 up") for value in (0, True)),
        ("sample", 1, "must be True or False"),
        *(("temperature", value, "must be a number above 0") for value in (0, -1.0, float("nan"))),
        *(("top_k", value, f"{WHOLE} 0 up") for value in (-1, 1.5)),
        *(("top_p", value, "must be a number above 0, at most 1") for value in (0, 1.1)),
        *(("min_p", value, "must be a number from 0, below 1") for value in (-0.1, 1)),
        ("seed", -1, f"{WHOLE} 0 up"),
        *(
            ("prefix", value, "must be token ids or text")
            for value in ([1.5], 3, [-1], np.ones(2), np.ones((1, 2), int))
        ),
        *((f"{whose}repetition_penalty", 0, "must be a number above 0") for whose in ("", "encoder_")),
        *((f"{whose}no_repeat_ngram_size", -1, f"{WHOLE} 0 up") for whose in ("", "encoder_")),
        *((name, "ab", "must be token ids") for name in ("suppress_tokens", "begin_suppress_tokens", "eos_ids")),
        *((name, value, f"{WHOLE} 0 up") for name in ("forced_bos_id", "forced_eos_id") for value in (-1, 2.0, "3")),
        *(("typical_p", value, "must be a number above 0, at most 1") for value in (0, 1.1)),
        *(
            (name, value, "must be a number from 0, below 1")
            for name in ("epsilon_cutoff", "eta_cutoff")
            for value in (-0.1, 1)
        ),
        *(
            ("sequence_bias", value, "must be pairs: token ids, number to add")
            for value in ([3], [([], 1.0)], [(3, 1.0)], [([3], "1")], [([3], np.inf)], [([3], 1.0, 2)], {(3,): 1.0})
        ),
        *(
            ("exponential_decay_length_penalty", value, "must be a number of tokens and a factor above 0")
            for value in (3, (3,), (-1, 1.5), (2.5, 1.5), (3, 0), (3, np.inf))
        ),
        ("renormalize", 1, "must be True or False"),
        *(("forced_tokens", value, "must be pairs") for value in ([3], [(1, 2, 3)], 4)),
        *(("bad_words", value, "must be lists of token ids, none empty") for value in ([[]], [3], 3)),
        *(("stop", value, "must be texts or lists of token ids, none empty") for value in ("abc", [""], [[]], [3])),
        *(("shortlist", value, "must be token ids, at least one") for value in ([], "abc")),
        ("processors", [3], "must be callables in a list"),
        ("scores", None, "must be True or False"),
        ("length_candidates", 0, f"{WHOLE} 1 up"),
        *(("timeout_s", value, "must be seconds above 0") for value in (0, -1, "1")),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_the_name_and_the_range(name: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} {reason}.*, found"):
        DecodeOptions(**{name: value})


def test_every_option_has_a_help_text_and_a_default_within_its_bounds() -> None:
    assert set(OPTIONS) == {field.name for field in fields(DecodeOptions)}
    assert [name for name, record in OPTIONS.items() if record.wrong(name, getattr(DecodeOptions(), name))] == []
    assert [name for name, record in OPTIONS.items() if not record.help.endswith(".")] == []


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^decode options refused: num_beams must .*; top_p must .*"):
        DecodeOptions(num_beams=0, top_p=3)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_return_sequences": 2}, r"num_return_sequences must lie in 1…1 \(num_beams\), found 2"),
        ({"num_beams": 3, "num_return_sequences": 4}, r"num_return_sequences must lie in 1…3 \(num_beams\), found 4"),
        ({"temperature": 0.5}, r"temperature must be 1.0 without sample \(--sample\), found 0.5"),
        ({"top_k": 4, "min_p": 0.1}, "top_k must be 0 without sample.*; min_p must be 0.0 without sample.* found 0.1"),
        ({"top_p": 0.9, "num_beams": 2}, "top_p must be 1.0 without sample"),
        (
            {"typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.2},
            "typical_p must be 1.0 without.*; epsilon_cutoff must be 0.0 without.*; eta_cutoff must be 0.0 without",
        ),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, r"min_new_tokens must lie in 0…3 \(max_new_tokens\), found 4"),
    ],
    ids=str,
)
def test_values_that_do_not_go_together_are_refused(values: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DecodeOptions(**values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"max_new_tokens": 33}, r"max_new_tokens must lie in 1…32 \(the model's max_target\), found 33"),
        (
            {"max_new_tokens": 31, "prefix": [3, 4]},
            r"max_new_tokens must lie in 1…30 \(.* without the prefix\), found 31",
        ),
        ({"min_new_tokens": 33}, r"min_new_tokens must lie in 0…32"),
        ({"prefix": [3] * 32}, r"prefix must have 0…31 tokens \(below max_target\), found 32"),
        ({"prefix": "text"}, "prefix refused: text needs a tokenizer"),
        ({"stop": ["text"]}, "stop refused: text needs a tokenizer"),
        ({"length_candidates": 2}, "length_candidates must be 1: this model has no length head, found 2"),
        ({"num_beams": 13}, r"num_beams must lie in 1…12 \(half the vocabulary\), found 13"),
        ({"num_beams": 2, "shortlist": [5, 6]}, r"num_beams must lie in 1…1 \(half the shortlist with EOS\), found 2"),
        ({"num_beams": 9, "eos_ids": [2, 3]}, r"num_beams must lie in 1…8 \(1/3 of the vocabulary\), found 9"),
        (
            {"num_beams": 2, "eos_ids": [3, 4], "shortlist": [4, 5, 6]},
            r"num_beams must lie in 1…1 \(1/3 of the shortlist with EOS\), found 2",
        ),
        *(
            ({name: value}, f"{name} must be ids in 0…23, found 24")
            for name, value in {
                "prefix": [24],
                "start_id": 24,
                "suppress_tokens": [3, 24],
                "begin_suppress_tokens": [24],
                "forced_bos_id": 24,
                "forced_eos_id": 24,
                "sequence_bias": [([3, 24], 1.0)],
                "eos_ids": [2, 24],
                "forced_tokens": [(0, 24)],
                "bad_words": [[3, 24]],
                "stop": [[24]],
                "shortlist": [24],
            }.items()
        ),
    ],
    ids=str,
)
def test_what_a_model_cannot_do_is_refused_before_the_source_is_read(values: dict, reason: str) -> None:
    engine = TableEngine()
    with pytest.raises(ConfigError, match=reason):
        decode(engine, [[5]], DecodeOptions(**values))
    assert (engine.n_states, engine.calls) == (0, [])


def test_options_that_compare_source_and_target_are_refused_where_their_vocabularies_differ() -> None:
    spec = type(WORDS)(**{**WORDS.__dict__, "source_vocab_size": 40})
    assert DecodeOptions(no_repeat_ngram_size=2).limit(spec) == 32
    with pytest.raises(
        ConfigError,
        match=r"encoder_repetition_penalty must be 1.0: .* two vocabularies, found 2.0; encoder_no_rep.* found 3",
    ):
        DecodeOptions(encoder_repetition_penalty=2.0, encoder_no_repeat_ngram_size=3).limit(spec)


def test_a_parallel_model_refuses_what_needs_one_token_after_another() -> None:
    spec = type(WORDS)(**{**WORDS.__dict__, "decoding": "parallel", "length": "eos"})
    with pytest.raises(ConfigError, match=r"num_beams has no meaning for a parallel model.*; stop has no"):
        decode(TableEngine(spec=spec), [[5]], DecodeOptions(num_beams=2, stop=[[3]]))
    with pytest.raises(ConfigError, match=r"forced_bos_id has no meaning.*; renormalize has no .*; eos_ids has no"):
        decode(TableEngine(spec=spec), [[5]], DecodeOptions(forced_bos_id=0, renormalize=True, eos_ids=[3]))


def test_empty_options_are_not_refused_for_a_parallel_model() -> None:
    spec = type(WORDS)(**{**WORDS.__dict__, "decoding": "parallel", "length": "eos"})
    nothing = {key: [] for key in (*ID_OPTIONS, "processors") if key != "shortlist"}
    assert DecodeOptions(**nothing).limit(spec) == 32
    with pytest.raises(ConfigError, match=r"^decode options refused: length_penalty has no meaning[^;]*$"):
        DecodeOptions(**nothing, length_penalty=0.0).limit(spec)


def test_arrays_of_ids_work_like_lists() -> None:
    lists = {
        "prefix": [9, 8],
        "suppress_tokens": [3, 4],
        "forced_tokens": [[0, 7], [2, 5]],
        "begin_suppress_tokens": [6],
        "eos_ids": [2, 11],
        "sequence_bias": [[[9], -2.0], [[8, 6], 3.0]],
        "bad_words": [[3, 4], [5]],
        "stop": [[7, 7], [6, 5, 4]],
        "shortlist": list(range(3, 20)),
    }
    plain = ("prefix", "suppress_tokens", "begin_suppress_tokens", "eos_ids", "forced_tokens")
    arrays = {**lists, **{name: np.array(lists[name]) for name in plain}}
    arrays["sequence_bias"] = [[np.array(ids), bias] for ids, bias in lists["sequence_bias"]]
    arrays |= {name: [np.array(word, np.int32) for word in lists[name]] for name in ("bad_words", "stop")}
    arrays["shortlist"] = np.array(lists["shortlist"], np.int16)
    assert DecodeOptions(**arrays) == DecodeOptions(**lists)
    assert decode(TableEngine(), [[5], [6]], DecodeOptions(**arrays)) == decode(
        TableEngine(), [[5], [6]], DecodeOptions(**lists)
    )


def test_numpy_numbers_work_like_python_numbers() -> None:
    options = DecodeOptions(sample=True, temperature=np.float32(0.5), top_k=np.int64(4), timeout_s=np.float64(30))
    plain = DecodeOptions(sample=True, temperature=0.5, top_k=4, timeout_s=30)
    assert decode(TableEngine(), [[5]], options) == decode(TableEngine(), [[5]], plain)
