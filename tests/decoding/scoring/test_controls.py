"""Options that favour, force and forbid tokens or end targets, on numbers that can be checked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.biases import BiasedSequences, GrowingEnd
from fatdeploy.runtimes.decoding.processors.chain import processors_of
from fatdeploy.runtimes.decoding.processors.protocol import Processor, rectangular
from fatdeploy.runtimes.decoding.processors.repetition import NoSourceNgram, SourcePenalty
from fatdeploy.runtimes.decoding.prompts import prompts_of
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.decoding.stops import Stops
from fatdeploy.runtimes.engines.protocol import Floats, Want
from tests.support.engines.tables import WORDS, TableEngine

BOS, EOS = 1, 2
SOURCES = [[5], [6, 7], [8, 9, 3], [4] * 7, [11, 3], [12], [13, 5, 5, 5]]
FORBIDDEN = -np.inf


def scripted(*tokens: int) -> TableEngine:
    """Return an engine that writes these tokens, whatever the source is."""
    return TableEngine(lambda source, read: np.eye(24, dtype=np.float32)[tokens[len(read) - 1]])


def processed(processor: Processor, tokens: list[list[int]], scores: list[list[float]], sources: list[int]) -> Floats:
    history = rectangular(np.array(tokens), np.array(sources))
    return processor(history, np.array(scores, np.float32))


# Ends.


def test_a_target_ends_with_any_of_the_ends_and_the_models_own_eos_is_a_token_then() -> None:
    options = DecodeOptions(eos_ids=[9, 11], max_new_tokens=5)
    assert decode(scripted(4, EOS, 11, 5, 6), [[5]], options) == [Hypothesis((4, EOS), "eos")]
    assert decode(scripted(4, 9, 7, 5, 6), [[5]], options) == [Hypothesis((4,), "eos")]
    assert decode(scripted(4, 7, 7, 5, EOS), [[5]], options) == [Hypothesis((4, 7, 7, 5, EOS), "length")]


@pytest.mark.parametrize("beams", [1, 2])
def test_no_end_comes_before_the_fewest_tokens(beams: int) -> None:
    options = DecodeOptions(eos_ids=[4, 5, 6], num_beams=beams)
    results = decode(TableEngine(), SOURCES, replace(options, min_new_tokens=6))
    assert min(len(result.tokens) for result in results) == 6
    assert min(len(result.tokens) for result in decode(TableEngine(), SOURCES, options)) < 6
    assert "eos" in {result.finish for result in results}


@pytest.mark.parametrize("beams", [1, 2])
def test_a_shortlist_contains_every_end_and_nothing_else(beams: int) -> None:
    listed, ends = [3, 8, 12, 14, 16, 17], [4, 5]
    options = DecodeOptions(shortlist=listed, eos_ids=ends, num_beams=beams, max_new_tokens=20)
    results = decode(TableEngine(), SOURCES, options)
    others = np.setdiff1d(np.arange(24), [*listed, *ends]).tolist()
    assert {token for result in results for token in result.tokens} <= set(listed)
    assert "eos" in {result.finish for result in results}
    expected = decode(
        TableEngine(), SOURCES, replace(options, shortlist=None, suppress_tokens=others, renormalize=True)
    )
    assert [(result.tokens, result.finish) for result in results] == [
        (result.tokens, result.finish) for result in expected
    ]


def test_beams_compare_enough_tokens_to_go_on_where_every_end_is_likely() -> None:
    def logits_of(source: tuple[int, ...], tokens: tuple[int, ...]) -> Floats:
        logits = np.linspace(0, -2, 24, dtype=np.float32)
        logits[[4, 5, 6]] = 3
        return logits

    options = DecodeOptions(num_beams=3, eos_ids=[4, 5, 6], max_new_tokens=4, length_penalty=4.0)
    # The three rows of the second step have nine likely ends: twice as many tokens as beams would all be complete.
    [result] = decode(TableEngine(logits_of), [[5]], replace(options, early_stopping="never"))
    assert (result.tokens, result.finish) == ((0, 0, 0), "eos")


@pytest.mark.parametrize(("ends", "want"), [([], Want.TOPK), ([3, 4], Want.TOPK), ([3, 4, 5], Want.LOGITS)], ids=str)
def test_the_engines_best_tokens_are_used_where_they_are_enough_for_all_ends(ends: list[int], want: Want) -> None:
    engine = TableEngine()  # whose top k is 12
    decode(engine, SOURCES, DecodeOptions(num_beams=4, eos_ids=ends))
    assert {wanted for _, wanted in engine.calls} == {want}


def test_a_growing_end_is_raised_by_its_size_and_a_forbidden_one_stays_forbidden() -> None:
    ends = GrowingEnd(np.array([2, 2]), 1.5, np.array([0, 2]))
    scores = [[-2.0, 1, 4], [FORBIDDEN, 1, 0]]
    tokens = [[BOS, 3, 3, 3], [BOS, 4, 4, 4]]
    # Two tokens too many: 1.5² - 1 of the size is added.
    assert processed(ends, tokens, scores, [0, 1]).tolist() == [[0.5, 1, 9], [FORBIDDEN, 1, 0]]
    assert processed(ends, [row[:2] for row in tokens], scores, [0, 1]).tolist() == scores
    huge = processed(GrowingEnd(np.array([0, 0]), 1e200, np.array([0, 2])), tokens, scores, [0, 1])
    assert huge.tolist() == [[np.float32(1e30), 1, np.float32(1e30)], [FORBIDDEN, 1, 0]]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_steep_exponential_penalty_ends_every_target_at_its_start(beams: int) -> None:
    options = DecodeOptions(num_beams=beams, exponential_decay_length_penalty=(3, 1e300), suppress_tokens=[0])
    results = decode(TableEngine(), SOURCES, options)
    assert {(result.finish, len(result.tokens) <= 4) for result in results} == {("eos", True)}
    assert max(len(result.tokens) for result in results) == 4


# The source.


def test_tokens_of_the_source_become_more_likely_once_however_often_they_occur() -> None:
    penalty = SourcePenalty(2.0, [np.array([3, 1, 3]), np.array([2])])
    scores = [[1.0, -4, 3, 5], [1.0, -4, 3, 5], [1.0, -4, -3, 5]]
    assert processed(penalty, [[BOS]] * 3, scores, [0, 1, 1]).tolist() == [
        [1, -2, 3, 10],
        [1, -4, 6, 5],
        [1, -4, -1.5, 5],
    ]


@pytest.mark.parametrize(
    ("size", "tokens", "left"),
    [
        (1, [BOS], [0, 1, 2]),
        (2, [BOS], [0, 1, 2, 3, 4, 5]),
        (2, [BOS, 3], [0, 1, 2, 3]),
        (3, [BOS, 3], [0, 1, 2, 3, 4, 5]),
        (3, [BOS, 3, 4], [0, 1, 2, 4, 5]),
        (5, [BOS, 4, 3, 4], [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_sequences_of_the_source_are_not_repeated(size: int, tokens: list[int], left: list[int]) -> None:
    # Two sources: the rows of the first one must not see the second.
    processor = NoSourceNgram(size, [np.array([3, 4, 3, 5]), np.array([0, 1, 2])])
    [row] = processed(processor, [tokens], [[0.0] * 6], [0])
    assert np.flatnonzero(np.isfinite(row)).tolist() == left


@pytest.mark.parametrize(
    "way", [{}, {"num_beams": 3, "early_stopping": True}, {"sample": True, "num_return_sequences": 3}], ids=str
)
def test_rows_that_leave_and_move_keep_their_source(way: dict) -> None:
    engine = TableEngine()
    options = DecodeOptions(encoder_no_repeat_ngram_size=1, min_new_tokens=3, eos_ids=[EOS, 10, 14, 15], **way)
    results = decode(engine, SOURCES, options)
    rows = [shape[0] for shape, _ in engine.calls]
    assert rows[-1] < max(rows)
    for source, best in zip(SOURCES, results, strict=True):
        for target in (best, *best.alternatives):
            assert not {*source} & {*target.tokens}
    plain = decode(TableEngine(), SOURCES, replace(options, encoder_no_repeat_ngram_size=0))
    assert any({*source} & {*result.tokens} for source, result in zip(SOURCES, plain, strict=True))


# Sequences and places.


def test_a_bias_is_added_after_the_beginning_of_its_sequence() -> None:
    biases = BiasedSequences({(2,): 1.0, (3, 2): 0.5, (4, 3, 2): 8.0, (BOS, 4, 3, 2): FORBIDDEN})
    tokens = [[0, 4, 3], [BOS, 4, 3], [4, 0, 3], [3, 4, 4]]
    assert processed(biases, tokens, [[0.0, 0, 0, 0]] * 4, [0] * 4)[:, 2].tolist() == [9.5, FORBIDDEN, 1.5, 1.0]


def test_a_token_is_not_chosen_first_but_later() -> None:
    engine = scripted(7, 7, EOS)
    assert decode(engine, [[5]], DecodeOptions(begin_suppress_tokens=[7], suppress_tokens=[0]))[0].tokens == (BOS, 7)


def test_the_forced_first_token_gives_way_to_a_prefix_and_to_forced_tokens() -> None:
    def tokens(**values: object) -> tuple[int, ...]:
        return decode(scripted(7, 8, 9, EOS), [[5]], DecodeOptions(forced_bos_id=3, **values))[0].tokens

    assert tokens() == (3, 8, 9)
    assert tokens(prefix=[4]) == (4, 8, 9)
    assert tokens(forced_tokens=[(0, 5)]) == (5, 8, 9)
    assert tokens(begin_suppress_tokens=[3, 8]) == (3, 0, 9)


def test_the_last_token_is_forced_at_the_limit_alone() -> None:
    engine, options = scripted(7, 8, 9, 9, EOS), DecodeOptions(forced_eos_id=EOS)
    assert decode(engine, [[5]], replace(options, max_new_tokens=3)) == [Hypothesis((7, 8), "eos")]
    assert decode(engine, [[5]], replace(options, max_new_tokens=3, prefix=[4])) == [Hypothesis((4, 8, 9), "eos")]
    assert decode(engine, [[5]], replace(options, forced_eos_id=6, max_new_tokens=2)) == [Hypothesis((7, 6), "length")]
    # Without a limit, the model's own: 32 tokens.
    endless = TableEngine(lambda source, read: np.eye(24, dtype=np.float32)[7])
    assert decode(endless, [[5]], options) == [Hypothesis((7,) * 31, "eos")]


@pytest.mark.parametrize("beams", [1, 2])
def test_a_forced_token_that_is_suppressed_leaves_nothing(beams: int) -> None:
    options = DecodeOptions(forced_bos_id=3, suppress_tokens=[3], num_beams=beams, renormalize=True)
    with pytest.raises(ConfigError, match="forbid every token after 0 new ones"):
        decode(TableEngine(), SOURCES, options)


def test_options_that_change_no_scores_need_no_processor() -> None:
    unused = DecodeOptions(
        eos_ids=[3, 4],
        renormalize=True,
        sample=True,
        typical_p=0.5,
        forced_bos_id=3,
        prefix=[3],  # which takes the place of a forced first token
    )
    assert (
        processors_of(Task(unused, WORDS, [np.array([5])], prompts_of(unused, WORDS, None, 1), Stops(unused, None)))
        == []
    )
    engine = TableEngine()
    decode(engine, SOURCES, DecodeOptions(num_beams=3, renormalize=True))
    assert {want for _, want in engine.calls} == {Want.TOPK}
