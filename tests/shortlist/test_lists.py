"""Lists by source: a row chooses from its own list alone, whatever else is in its batch."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.runtimes.shortlist.lists import Shortlists, shortlists_of
from fatdeploy.spec import Tokens
from tests.support.bundles import bundle_of
from tests.support.decoding.source_lists import TABLE, Multiples, listed
from tests.support.quantized import quantized_of

TINY = "transformer-tiny"
SOURCES = [[5, 9, 33], [8, 60, 4, 4, 12], [7], [20, 21, 22, 23, 24, 25, 26], [50, 3], [33, 9, 5]]


def test_columns_cover_the_sources_of_a_batch_and_a_mask_keeps_rows_apart() -> None:
    lists = Shortlists([1, 3], 12, sources=[np.array([5]), np.array([2])], table=Multiples(np.array([3]), 12))
    assert lists.ids.tolist() == [1, 3]
    assert lists.cover(np.array([0, 1]))
    assert lists.ids.tolist() == sorted({1, 3, *(5 * k % 12 for k in range(1, 9)), *(2 * k % 12 for k in range(1, 9))})
    scores = np.zeros((2, len(lists.ids)), np.float32)
    lists.restrict(scores)
    allowed = [set(lists.ids[row == 0].tolist()) for row in scores]
    assert allowed == [{1, 3, 5, 10, 8, 6, 11, 4}, {1, 3, 2, 4, 6, 8, 10, 0}]


def test_columns_change_only_for_sources_that_they_do_not_cover() -> None:
    sources = [np.array([5]), np.array([2]), np.array([2, 2]), np.array([7])]
    lists = Shortlists([1, 3], 12, sources=sources, table=Multiples(np.array([3]), 12))
    assert [lists.cover(np.array(rows)) for rows in ([0, 1], [0, 1], [1], [1, 1, 0], [3, 1], [3])] == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    scores = np.zeros((1, len(lists.ids)), np.float32)
    lists.restrict(scores)
    assert set(lists.ids[scores[0] == 0].tolist()) == {1, 3, *(7 * k % 12 for k in range(1, 9))}


def test_what_is_never_chosen_is_in_no_list_and_there_are_enough_columns() -> None:
    lists = Shortlists(
        [1, 3], 12, sources=[np.array([5])], table=Multiples(np.array([3]), 12), never=[3, 10], fewest=11
    )
    lists.cover(np.array([0]))
    assert len(lists.ids) == 11
    scores = np.zeros((1, 11), np.float32)
    lists.restrict(scores)
    assert set(lists.ids[scores[0] == 0].tolist()) == {1, 5, 8, 6, 11, 4}


def bundles() -> dict[str, Bundle]:
    """Return bundles of each way to multiply."""
    return {
        "fp32": bundle_of(TINY),
        "int8": quantized_of(TINY, "int8"),
        "int4": quantized_of(TINY, "int4"),
        "standard": bundle_of(TINY, "standard"),
    }


OPTIONS = {
    "greedy": DecodeOptions(scores=True),
    "beams": DecodeOptions(num_beams=3, num_return_sequences=3),
    "groups": DecodeOptions(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "samples": DecodeOptions(sample=True, num_return_sequences=2, top_p=0.9, seed=7, scores=True),
    "drawn": DecodeOptions(sample=True, num_beams=2, seed=7),
    "processors": DecodeOptions(repetition_penalty=1.3, min_new_tokens=4, scores=True),
    "forbidden": DecodeOptions(suppress_tokens=[10], bad_words=[[17], [3, 3]], forced_eos_id=2, scores=True),
    "renormalized": DecodeOptions(num_beams=3, bad_words=[[17]], forced_eos_id=2, renormalize=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_of_int8_is_bit_for_bit_what_it_is_alone(name: str) -> None:
    options = replace(OPTIONS[name], shortlist="auto", max_new_tokens=12)
    with closing(OrtEngine(bundles()["int8"])) as engine:
        together = decode(engine, SOURCES, options, table=TABLE)
        alone = [decode(engine, [source], options, table=TABLE)[0] for source in SOURCES]
        shuffled = decode(engine, SOURCES[::-1], options, table=TABLE)[::-1]
    assert together == alone == shuffled
    assert len({result.tokens for result in together}) > 3


@pytest.mark.parametrize("name", ["fp32", "int4", "standard"])
def test_a_row_has_the_tokens_that_it_has_alone(name: str) -> None:
    options = DecodeOptions(shortlist="auto", max_new_tokens=12)
    with closing(OrtEngine(bundles()[name])) as engine:
        together = decode(engine, SOURCES, options, table=TABLE)
        assert together == [decode(engine, [source], options, table=TABLE)[0] for source in SOURCES]


@pytest.mark.parametrize("name", ["greedy", "beams", "processors", "samples"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_token_is_in_the_list_of_its_source(name: str, precision: str) -> None:
    options = replace(OPTIONS[name], shortlist="auto", max_new_tokens=12)
    with closing(OrtEngine(bundles()[precision])) as engine:
        results = decode(engine, SOURCES, options, table=TABLE)
        plain = decode(engine, SOURCES, replace(options, shortlist=None))
    for source, result in zip(SOURCES, results, strict=True):
        assert set(result.tokens) <= listed(source)
    assert [result.tokens for result in results] != [result.tokens for result in plain]


def test_lists_forbid_exactly_what_a_processor_would() -> None:
    def only_listed(tokens: Tokens, scores: Floats) -> Floats:
        others = np.setdiff1d(np.arange(64), [*listed(SOURCES[0]), 2])
        scores[:, others] = -np.inf
        return scores

    with closing(OrtEngine(bundles()["int8"])) as engine:
        [result] = decode(engine, SOURCES[:1], DecodeOptions(shortlist="auto", max_new_tokens=12), table=TABLE)
        [expected] = decode(engine, SOURCES[:1], DecodeOptions(processors=[only_listed], max_new_tokens=12))
    assert result == expected


def test_a_list_with_every_token_changes_nothing_in_int8() -> None:
    everything = Multiples(np.arange(64))
    with closing(OrtEngine(bundles()["int8"])) as engine:
        for beams in (1, 3):
            options = DecodeOptions(num_beams=beams, max_new_tokens=12)
            plain: list[Hypothesis] = decode(engine, SOURCES, options)
            results = decode(engine, SOURCES, replace(options, shortlist="auto"), table=everything)
            assert [result.tokens for result in results] == [result.tokens for result in plain]


def test_forced_tokens_and_ends_are_in_every_list() -> None:
    options = DecodeOptions(
        shortlist="auto", max_new_tokens=6, forced_bos_id=61, forced_tokens=[(1, 62)], eos_ids=[63], suppress_tokens=[5]
    )
    with closing(OrtEngine(bundles()["int8"])) as engine:
        for source, result in zip(SOURCES, decode(engine, SOURCES, options, table=TABLE), strict=True):
            assert result.tokens[0] == 61
            assert result.tokens[1] == 62
            assert set(result.tokens) <= listed(source, 61, 62) - {5}


def test_without_a_table_there_are_no_lists_by_source() -> None:
    with pytest.raises(ConfigError, match=r"shortlist='auto' refused: the bundle has no shortlist; build one"):
        shortlists_of(DecodeOptions(shortlist="auto"), bundle_of(TINY).spec)
