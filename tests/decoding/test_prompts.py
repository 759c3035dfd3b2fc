"""A prefix per source: rows whose prefixes differ in length decode together, and each is what it is alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens
from tests.support.engines.tables import ALIGNED, WORDS, TableEngine

EOS = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PARALLEL = type(WORDS)(**{**WORDS.__dict__, "decoding": "parallel", "length": "eos"})


def text_of(tokens: object) -> str:
    return "".join(LETTERS[token] for token in tokens)  # type: ignore[attr-defined]


def shy(tokens: Tokens, scores: Floats) -> Floats:
    """Make the first token of each row and its last less likely: a row that reads another's tokens shows."""
    rows = np.arange(len(tokens))
    scores[rows, tokens[:, min(1, tokens.shape[1] - 1)]] -= 1.5
    scores[rows, tokens[:, -1]] -= 1
    return scores


def drawn_options(random: np.random.Generator) -> dict[str, Any]:
    """Return a search and some controls, many of which count from the end of the prompt."""

    def maybe(value: object, otherwise: object) -> Any:
        return value if random.random() < 0.3 else otherwise

    beams = int(random.integers(1, 5))
    sampled = bool(random.random() < 0.4)
    grouped = not sampled and beams in (2, 4) and random.random() < 0.4
    limit = int(random.integers(1, 13))
    return {
        "num_beams": beams,
        "num_beam_groups": int(random.choice([2, beams])) if grouped else 1,
        "diversity_penalty": 1.5 if grouped else 0.0,
        "num_return_sequences": int(random.integers(1, 4 if sampled and beams == 1 else beams + 1)),
        "sample": sampled,
        "top_p": 0.9 if sampled else 1.0,
        "early_stopping": [True, False, "never"][random.integers(3)],
        "length_penalty": maybe(float(random.uniform(-0.5, 2)), 1.0),
        "max_new_tokens": maybe(None, limit),
        "min_new_tokens": maybe(int(random.integers(1, limit + 1)), 0),
        "forced_tokens": maybe([(int(random.integers(3)), 7), (3, 8)], ()),
        "bad_words": maybe([[4], [5, 6]], ()),
        "stop": maybe([[9, 10], [11], "kl", "p"], ()),
        "repetition_penalty": maybe(1.4, 1.0),
        "no_repeat_ngram_size": maybe(2, 0),
        "processors": maybe([shy], ()),
        "shortlist": maybe(list(range(3, 20)), None),
        "forced_bos_id": maybe(6, None),
        "forced_eos_id": maybe(EOS, None),
        "begin_suppress_tokens": maybe([3, 12], ()),
        "exponential_decay_length_penalty": maybe((2, 1.3), None),
        "encoder_no_repeat_ngram_size": maybe(2, 0),
        "encoder_repetition_penalty": maybe(1.5, 1.0),
        "sequence_bias": maybe([([7], 2.0), ([8, 9], 1.0)], ()),
        "eos_ids": maybe([EOS, 20], ()),
        "renormalize": bool(random.random() < 0.3),
        "start_id": maybe(int(random.integers(24)), None),
        "scores": bool(random.random() < 0.5),
    }


def decoded(sources: list[list[int]], options: DecodeOptions, prefixes: list[Any] | None = None) -> list[Hypothesis]:
    engine = TableEngine(spec=ALIGNED)
    with Decoding(engine, sources, options, prefixes=prefixes, text_of=text_of) as decoding:
        results = decoding.run()
    assert engine.n_states == 0
    return results


def weights_of(result: Hypothesis) -> list[Any]:
    return [one.alignments.tolist() for one in (result, *result.alternatives) if one.alignments is not None]


@pytest.mark.parametrize("seed", range(300))
def test_sources_with_prefixes_of_any_lengths_are_what_they_are_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    options = DecodeOptions(**drawn_options(random))
    count, longest = int(random.integers(2, 7)), int(random.integers(1, 15))
    sources = [random.integers(3, 24, random.integers(1, 8)).tolist() for _ in range(count)]
    # EOS and stop sequences may be part of a prefix, where they end nothing.
    prefixes = [random.integers(0, 24, random.integers(longest + 1)).tolist() for _ in range(count)]
    together = decoded(sources, options, prefixes)
    for result, source, prefix in zip(together, sources, prefixes, strict=True):
        [alone] = decoded([source], replace(options, prefix=prefix))
        assert result == alone
        assert weights_of(result) == weights_of(alone)
        assert result.tokens[: len(prefix)] == tuple(prefix)
