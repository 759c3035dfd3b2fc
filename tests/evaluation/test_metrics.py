"""Metrics: numbers worked out by hand, distances against the definition, sacrebleu's own figures."""

import sys
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu import corpus_bleu, corpus_chrf

from fatdeploy.errors import BackendUnavailable, ConfigError
from fatdeploy.runtimes.evaluation.metrics import (
    METRICS,
    Score,
    bleu,
    chrf,
    edit_distance,
    exact_match,
    sequence_error_rate,
    token_error_rate,
)

SYMBOLS = st.lists(st.sampled_from("abcd"), max_size=12)


def distance_by_definition(first: Sequence[str], second: Sequence[str]) -> int:
    @cache
    def of(i: int, j: int) -> int:
        if not (i and j):
            return i + j
        replaced = of(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(of(i - 1, j) + 1, of(i, j - 1) + 1, replaced)

    return of(len(first), len(second))


@given(SYMBOLS, SYMBOLS)
def test_the_distance_is_that_of_the_definition(first: list[str], second: list[str]) -> None:
    assert edit_distance(first, second) == distance_by_definition(first, second)


@given(st.lists(st.integers(0, 30), min_size=60, max_size=90), st.data())
def test_the_distance_is_right_where_a_column_has_more_bits_than_a_machine_word(
    tokens: list[int], data: st.DataObject
) -> None:
    other = tokens.copy()
    for _ in range(data.draw(st.integers(0, 8))):
        place = data.draw(st.integers(0, len(other) - 1))
        other[place : place + data.draw(st.integers(0, 2))] = data.draw(st.lists(st.integers(0, 30), max_size=2))
    assert edit_distance(tokens, other) == distance_by_definition(tuple(map(str, tokens)), tuple(map(str, other)))


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("saturday", "sunday", 3), ("ab", "ba", 2)],
)
def test_well_known_distances(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == distance


def test_the_token_error_rate_sums_edits_and_lengths() -> None:
    # One replaced of 3, none of 4, one added to 2, all 3 left out: 5 edits of 12 symbols.
    hypotheses = ["K AE P", "D AO G Z", "AH N D", ""]
    references = [["K AE T"], ["D AO G Z"], ["AH N"], ["B ER D"]]
    assert token_error_rate(hypotheses, references) == Score(100 * 5 / 12, "5 edits of 12 symbols")


def test_the_reference_with_the_fewest_edits_for_its_length_counts() -> None:
    # 2 edits of 5 symbols (0.4) are nearer than 1 of 2 (0.5), whichever comes first.
    for accepted in (["a b", "a b c d e"], ["a b c d e", "a b"]):
        assert token_error_rate(["a b c"], [accepted]) == Score(40.0, "2 edits of 5 symbols")


def test_among_references_that_are_equally_near_the_one_with_the_fewest_edits_counts() -> None:
    # Both have half of their symbols wrong: 1 of 2, and 2 of 4.
    for accepted in (["a x", "a y b z"], ["a y b z", "a x"]):
        assert token_error_rate(["a b"], [accepted]) == Score(50.0, "1 edits of 2 symbols")


def test_a_rate_may_be_more_than_a_hundred() -> None:
    assert token_error_rate(["a b c d"], [["x"]]) == Score(400.0, "4 edits of 1 symbols")


def test_a_source_counts_as_right_if_it_equals_any_reference() -> None:
    hypotheses = ["K AE T", "T AH M EY T OW", "D AO", "K  AE T "]
    references = [["K AE T"], ["T AH M AA T OW", "T AH M EY T OW"], ["D AO G", "D AA G"], ["K AE T"]]
    assert exact_match(hypotheses, references) == Score(75.0, "3 of 4 sources")
    assert sequence_error_rate(hypotheses, references) == Score(25.0, "1 of 4 sources")


def test_an_empty_reference_is_met_by_an_empty_hypothesis_alone() -> None:
    assert exact_match(["", "a"], [[""], [""]]).value == 50.0
    assert token_error_rate(["", "a"], [["", "b"], ["", "b b"]]).detail == "2 edits of 2 symbols"
    with pytest.raises(ConfigError, match="contain no symbols, so there is no error rate: ignore less"):
        token_error_rate(["a"], [[" "]])


TEXTS = ["the cat sat on the mat .", "a dog, a plan", "nothing like it at all", ""]
ACCEPTED = [
    ["the cat sat on a mat .", "there was a cat on the mat .", "a cat sat there ."],
    ["a dog, a plan"],
    ["something else", "quite another thing"],
    ["one more"],
]
# In sacrebleu's layout; None where a source has fewer references.
STREAMS = [
    ["the cat sat on a mat .", "a dog, a plan", "something else", "one more"],
    ["there was a cat on the mat .", None, "quite another thing", None],
    ["a cat sat there .", None, None, None],
]


def test_bleu_and_chrf_of_several_references_are_sacrebleus() -> None:
    assert bleu(TEXTS, ACCEPTED).value == corpus_bleu(TEXTS, STREAMS).score
    assert chrf(TEXTS, ACCEPTED).value == corpus_chrf(TEXTS, STREAMS).score
    assert 10 < bleu(TEXTS, ACCEPTED).value < 90
    assert bleu(TEXTS, ACCEPTED).value > bleu(TEXTS, [row[:1] for row in ACCEPTED]).value
    assert chrf(TEXTS, ACCEPTED).value != chrf(TEXTS, [row[:1] for row in ACCEPTED]).value


def test_bleu_by_hand() -> None:
    # Of 4 words 3 are right (no smoothing): 2 of 3 pairs, 1 of 2 triples, and of one quadruple none, which
    # sacrebleu's exponential smoothing counts as half of one. Lengths are equal: no brevity penalty.
    expected = 100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** (1 / 4)
    assert bleu(["a b c x"], [["a b c d"]]).value == pytest.approx(expected, abs=1e-9)


def test_bleu_and_chrf_say_how_they_were_computed() -> None:
    assert bleu(TEXTS, ACCEPTED).detail.startswith("nrefs:var|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert chrf(TEXTS, ACCEPTED).detail.startswith("nrefs:var|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert bleu(["a"], [["a"]]).detail.startswith("nrefs:1|")


def test_perfect_hypotheses_have_the_best_scores() -> None:
    right = ["a b c d e", "one two three four"]
    scores = {name: metric(right, [[text] for text in right]).value for name, metric in METRICS.items()}
    rates = {"token_error_rate": 0.0, "sequence_error_rate": 0.0}
    assert scores == pytest.approx({"bleu": 100.0, "chrf": 100.0, **rates, "exact_match": 100.0}, abs=1e-9)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    ("hypotheses", "references", "reason"),
    [
        (["a"], [["a"], ["b"]], "expected one hypothesis per source, found 1 for 2 sources"),
        ([], [], "expected at least one source to evaluate, found none"),
        (["a", "b"], [["a"], []], r"expected a reference for every source, found none for source 1 \(from 0\)"),
    ],
)
def test_mismatched_hypotheses_and_references_are_refused(
    name: str, hypotheses: list[str], references: list[list[str]], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        METRICS[name](hypotheses, references)


def test_without_sacrebleu_the_message_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    others = "--metric token_error_rate or sequence_error_rate or exact_match"
    with pytest.raises(BackendUnavailable, match=rf"fatdeploy\[eval\]', or choose another metric: {others}"):
        bleu(["a"], [["a"]])
    assert exact_match(["a"], [["a"]]).value == 100.0
