"""Groups of diverse beams find what version 4.50 of transformers finds; later versions have none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding, decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Floats
from tests.support.engines.tables import TableEngine, hashed_logits
from tests.support.oracles.diverse_beams import Beginning, diverse_targets

PAD, BOS, EOS = 0, 1, 2
SOURCES = [[5], [6, 7], [8, 9, 3], [4] * 7, [11, 3], [12], [13, 5, 5, 5]]


def drawn_options(random: np.random.Generator) -> DecodeOptions:
    groups, width = int(random.integers(2, 5)), int(random.integers(1, 4))
    limit = int(random.integers(1, 13))
    return DecodeOptions(
        num_beams=groups * width,
        num_beam_groups=groups,
        diversity_penalty=float(random.uniform(0.1, 4)),
        num_return_sequences=int(random.integers(1, groups * width + 1)),
        length_penalty=float(random.choice([1.0, 0.0, -0.5, random.uniform(0.5, 2)])),
        early_stopping=[True, False, "never"][random.integers(3)],
        max_new_tokens=limit,
        repetition_penalty=float(random.choice([1.0, 1.4])),
    )


def oracle(source: list[int], options: DecodeOptions) -> list[tuple[float, Beginning]]:
    """Return what the published search finds, with a repetition penalty after the penalty for choosing alike."""

    def log_probs_of(tokens: Beginning) -> Floats:
        logits = hashed_logits(tuple(source), (BOS, *tokens))
        return logits - np.log(np.exp(logits).sum())

    def change(tokens: Beginning, log_probs: Floats) -> Floats:
        earlier = [*{BOS, *tokens}]
        # Log-probabilities are negative.
        log_probs[earlier] *= np.float32(options.repetition_penalty)
        return log_probs

    return diverse_targets(log_probs_of, change, options, eos=EOS, pad=PAD)


def whole(result: Hypothesis) -> Beginning:
    return (*result.tokens, EOS) if result.finish == "eos" else result.tokens


@pytest.mark.parametrize("seed", range(80))
def test_groups_find_the_targets_and_scores_of_the_published_search(seed: int) -> None:
    options = drawn_options(np.random.default_rng(seed))
    for source, best in zip(SOURCES, decode(TableEngine(), SOURCES, options), strict=True):
        expected = oracle(source, options)
        results = [best, *best.alternatives]
        assert [whole(result) for result in results] == [tokens for _, tokens in expected]
        assert [result.score for result in results] == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_the_groups_of_a_source_begin_differently_and_one_group_of_all_beams_does_not() -> None:
    options = DecodeOptions(
        num_beams=4, num_beam_groups=4, diversity_penalty=50.0, num_return_sequences=4, max_new_tokens=6
    )
    for best in decode(TableEngine(), SOURCES, options):
        assert len({whole(result)[0] for result in (best, *best.alternatives)}) == 4
    plain = replace(options, num_beam_groups=1, diversity_penalty=0.0)
    alike = [
        best
        for best in decode(TableEngine(), SOURCES, plain)
        if len({whole(r)[:1] for r in (best, *best.alternatives)}) < 4
    ]
    assert len(alike) > 3


def test_a_deadline_cancels_the_hypotheses_of_all_groups() -> None:
    options = DecodeOptions(
        num_beams=4, num_beam_groups=2, diversity_penalty=1.0, num_return_sequences=4, min_new_tokens=5
    )
    with Decoding(TableEngine(), [[5], [6]], options) as decoding:
        assert decoding.advance()
        assert decoding.advance()
        best, _ = decoding.results()
    results = [best, *best.alternatives]
    assert [(len(result.tokens), result.finish) for result in results] == [(2, "cancelled")] * 4
    assert [result.score for result in results] == sorted((result.score for result in results), reverse=True)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0},
            "num_beam_groups must divide num_beams = 4, found 3",
        ),
        (
            {"num_beams": 4, "num_beam_groups": 2},
            "diversity_penalty must be above 0 with several num_beam_groups, found 0.0",
        ),
        ({"num_beams": 4, "diversity_penalty": 0.5}, "diversity_penalty must be 0 without num_beam_groups, found 0.5"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "sample": True},
            "num_beam_groups must be 1 with sample, found 2",
        ),
        ({"diversity_penalty": -1.0}, "diversity_penalty must be a number from 0 up, found -1.0"),
        ({"num_beam_groups": 0}, "num_beam_groups must be a whole number from 1 up, found 0"),
    ],
    ids=str,
)
def test_groups_that_are_none_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DecodeOptions(**values)
