"""Settings drawn at random: their options give the targets that ``generate`` of transformers gives by them."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from fatdeploy.export.models.hugging_face.generation import generation_from_config
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.hugging_face import EOS, FAMILIES, MAX_SOURCE, PAD, VOCABULARY, HuggingFaceEngine, lively_model

CASES = 15


def drawn_settings(random: np.random.Generator, start: int) -> dict[str, Any]:
    """Return what a ``generation_config.json`` may say: each key in about a third of all files."""

    def tokens(count: int) -> list[int]:
        return random.integers(4, VOCABULARY, count).tolist()

    limit = int(random.integers(3, 20))
    choices: dict[str, Any] = {
        "min_length": int(random.integers(0, limit + 2)),
        "num_beams": int(random.integers(1, 6)),
        "length_penalty": float(random.uniform(0.2, 2)),
        "early_stopping": [True, False, "never"][random.integers(3)],
        "no_repeat_ngram_size": int(random.integers(0, 3)),
        "encoder_no_repeat_ngram_size": int(random.integers(1, 3)),
        "repetition_penalty": float(random.uniform(0.8, 1.6)),
        "encoder_repetition_penalty": float(random.uniform(0.8, 1.6)),
        "forced_bos_token_id": tokens(1)[0],
        "forced_eos_token_id": EOS,
        "bad_words_ids": [[EOS], tokens(1), tokens(2)],
        "suppress_tokens": tokens(5),
        "begin_suppress_tokens": tokens(5),
        "renormalize_logits": True,
        "eos_token_id": [EOS, *tokens(2)],
        "sequence_bias": [[tokens(1), 2.5], [tokens(2), -3.0]],
        "decoder_start_token_id": tokens(1)[0],
        "exponential_decay_length_penalty": [int(random.integers(1, 6)), 1.2],
    }
    settings = {name: value for name, value in choices.items() if random.random() < 1 / 3}
    # A forced token that is also forbidden leaves no token at all.
    if "forced_bos_token_id" in settings:
        settings = {name: value for name, value in settings.items() if "suppress" not in name and "bad" not in name}
    length = {"max_length": limit} if random.random() < 1 / 2 else {"max_new_tokens": limit - 1}
    ids = {"decoder_start_token_id": start, "eos_token_id": EOS, "pad_token_id": PAD}
    return {**ids, **length, **settings}


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("family", FAMILIES)
def test_options_from_settings_give_the_targets_of_generate(family: str) -> None:
    random = np.random.default_rng(len(family))
    lengths = set()
    for _ in range(CASES):
        engine = HuggingFaceEngine(lively_model(family, float(random.choice([1.5, 2.5, 3.5]))))
        settings = drawn_settings(random, engine.spec.bos_id)
        record = generation_from_config({}, settings, engine.spec)
        assert record.ignored == {}
        sources = [random.integers(4, VOCABULARY, length).tolist() for length in random.permutation(MAX_SOURCE)[:3] + 1]
        results = decode(engine, sources, DecodeOptions(**record.options))  # type: ignore[arg-type]
        ends = settings["eos_token_id"] if isinstance(settings["eos_token_id"], list) else [settings["eos_token_id"]]
        for source, result in zip(sources, results, strict=True):
            [target] = engine.model.generate(torch.tensor([source]), generation_config=GenerationConfig(**settings))
            tokens = target.tolist()[1:]
            end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
            assert list(result.tokens) == tokens[:end], settings
            lengths.add(end)
    assert len(lengths) > 5
