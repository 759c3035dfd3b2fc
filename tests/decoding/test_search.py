"""Searches and controls on an engine whose every number is known."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.decoding.beams.beam import placed
from fatdeploy.runtimes.decoding.beams.chooser import Chooser
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding, decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.scoring import Scorer
from fatdeploy.runtimes.engines.protocol import Floats, StepOut, Want
from fatdeploy.spec import Tokens
from tests.support.engines.tables import ALIGNED, WORDS, TableEngine, hashed_logits

BOS, EOS = 1, 2
SOURCES = [[5], [6, 7], [8, 9, 3], [4] * 7, [11, 3], [12], [13, 5, 5, 5]]


def log_softmax(logits: Floats) -> Floats:
    return logits - np.log(np.exp(logits.astype(np.float64)).sum())


def greedy_by_hand(source: list[int], limit: int) -> list[int]:
    tokens = [BOS]
    while len(tokens) <= limit:
        tokens.append(int(hashed_logits(tuple(source), tuple(tokens)).argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[1:]


def forced_score(source: list[int], tokens: tuple[int, ...], finish: str) -> list[float]:
    """Return the log-probability of each token of a target, EOS's last."""
    whole = (*tokens, EOS) if finish == "eos" else tokens
    return [
        float(log_softmax(hashed_logits(tuple(source), (BOS, *whole[:place])))[token])
        for place, token in enumerate(whole)
    ]


def test_greedy_takes_the_arg_max_of_every_step() -> None:
    for result, source in zip(decode(TableEngine(), SOURCES), SOURCES, strict=True):
        expected = greedy_by_hand(source, 32)
        assert [*result.tokens, *([EOS] if result.finish == "eos" else [])] == expected


def test_rows_leave_the_batch_when_half_of_them_are_finished() -> None:
    engine = TableEngine()
    decode(engine, SOURCES)
    rows = [shape[0] for shape, _ in engine.calls]
    lengths = [len(greedy_by_hand(source, 32)) for source in SOURCES]
    alive = [sum(length > step for length in lengths) for step in range(max(lengths))]
    # At least as many rows as unfinished targets, but fewer than twice as many.
    assert all(going <= row < 2 * going or row == going for row, going in zip(rows, alive, strict=True))
    assert rows[-1] < len(SOURCES) / 2
    assert engine.n_states == 0


OPTIONS = {
    "greedy": DecodeOptions(scores=True),
    "beams": DecodeOptions(num_beams=4, num_return_sequences=3, length_penalty=0.7),
    "many beams": DecodeOptions(num_beams=9, early_stopping=True),
    "patient beams": DecodeOptions(num_beams=3, early_stopping="never", no_repeat_ngram_size=2),
    "samples": DecodeOptions(sample=True, num_return_sequences=3, temperature=0.8, top_k=9, top_p=0.9, scores=True),
    "controls": DecodeOptions(repetition_penalty=1.3, bad_words=[[3], [4, 5]], min_new_tokens=4, stop=[[7, 7]]),
    "shortlist": DecodeOptions(shortlist=range(3, 15), num_beams=2),
    "prefix": DecodeOptions(prefix=[9, 8], max_new_tokens=12),
    "of the source": DecodeOptions(encoder_repetition_penalty=2.5, encoder_no_repeat_ngram_size=2, scores=True),
    "beams of the source": DecodeOptions(
        num_beams=3, encoder_repetition_penalty=0.4, encoder_no_repeat_ngram_size=1, renormalize=True
    ),
    "samples of the source": DecodeOptions(
        sample=True, num_return_sequences=3, encoder_repetition_penalty=2.5, typical_p=0.9, eta_cutoff=0.05
    ),
    "many ends": DecodeOptions(eos_ids=[2, 5, 9], min_new_tokens=2, exponential_decay_length_penalty=(3, 1.2)),
    "beams with many ends": DecodeOptions(
        num_beams=4, eos_ids=[7, 5, 9], forced_bos_id=6, forced_eos_id=9, sequence_bias=[([6, 7], 2.0)]
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_result_does_not_depend_on_what_else_is_in_the_batch(options: DecodeOptions) -> None:
    together = decode(TableEngine(), SOURCES, options)
    assert together == [decode(TableEngine(), [source], options)[0] for source in SOURCES]
    assert together == decode(TableEngine(), SOURCES[::-1], options)[::-1]
    assert together == decode(TableEngine(), SOURCES[:3], options) + decode(TableEngine(), SOURCES[3:], options)
    assert len({result.tokens for result in together}) > 4


@pytest.mark.parametrize("name", ["greedy", "beams", "samples", "prefix"])
def test_log_probabilities_are_those_of_the_tokens(name: str) -> None:
    options = replace(OPTIONS[name], scores=True)
    results = decode(TableEngine(), SOURCES, options)
    for best, source in zip(results, SOURCES, strict=True):
        for result in (best, *best.alternatives):
            log_probs = forced_score(source, result.tokens, result.finish)[len(options.prefix) :]
            assert result.log_probs == pytest.approx(log_probs[: len(result.log_probs)], abs=1e-5)
            assert len(result.log_probs) == len(result.tokens) - len(options.prefix)
            penalty = len(log_probs) ** options.length_penalty if options.num_beams > 1 else 1
            assert result.score == pytest.approx(sum(log_probs) / penalty, abs=1e-4)


def test_a_wide_beam_finds_the_best_of_all_targets() -> None:
    # Three steps over six tokens: beams of 36 hold every beginning, so the best of all 258 targets must be found.
    spec = replace(WORDS, vocab_size=6, max_target=3, width=6)
    spec = replace(spec, vocab_size=80)

    def logits_of(source: tuple[int, ...], tokens: tuple[int, ...]) -> Floats:
        return np.concatenate([hashed_logits(source, tokens, 6), np.full(74, -40, np.float32)])

    every = [
        (tokens, finish)
        for n in range(4)
        for tokens in itertools.product((0, 1, 3, 4, 5), repeat=n)
        for finish in (("eos",) if n < 3 else ("length",))
    ]

    def score(source: tuple[int, ...], tokens: tuple[int, ...], finish: str) -> float:
        whole = (*tokens, EOS) if finish == "eos" else tokens
        log_probs = [log_softmax(logits_of(source, (BOS, *whole[:place])))[token] for place, token in enumerate(whole)]
        return float(np.sum(log_probs))

    options = DecodeOptions(num_beams=36, length_penalty=0.0, early_stopping="never", num_return_sequences=2)
    for source in SOURCES:
        best = decode(TableEngine(logits_of, spec), [source], options)[0]
        ranked = sorted(every, key=lambda target: -score(tuple(source), *target))[:2]
        assert [(result.tokens, result.finish) for result in (best, *best.alternatives)] == ranked


def test_beams_begin_in_all_their_rows_and_ask_the_engine_for_its_best() -> None:
    engine = TableEngine()
    decode(engine, [[5], [6]], DecodeOptions(num_beams=4, max_new_tokens=5, min_new_tokens=0))
    assert engine.calls[0] == ((8, 1), Want.TOPK)
    assert engine.calls[1] == ((8, 1), Want.TOPK)
    assert engine.capacity.rows_per_source == 4


def test_one_row_of_a_source_reads_its_prefix() -> None:
    engine = TableEngine()
    decode(engine, [[5], [6]], DecodeOptions(num_beams=4, max_new_tokens=5), prefixes=[[3, 4], [4, 3]])
    assert [shape for shape, _ in engine.calls[:2]] == [(2, 2), (8, 1)]


def test_beams_wider_than_the_engines_best_read_logits_and_find_the_same() -> None:
    wide, narrow = TableEngine(), TableEngine(spec=replace(WORDS, top_k=3))
    options = DecodeOptions(num_beams=4, num_return_sequences=4)
    first, second = decode(wide, SOURCES, options), decode(narrow, SOURCES, options)
    assert narrow.calls[0][1] is Want.LOGITS
    for result, other in zip(first, second, strict=True):
        assert (result.tokens, result.score) == (other.tokens, pytest.approx(other.score, abs=1e-5))
        assert [hypothesis.tokens for hypothesis in result.alternatives] == [
            hypothesis.tokens for hypothesis in other.alternatives
        ]


@given(st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_a_hypothesis_stays_in_its_parents_row_if_it_is_the_first(parents: list[int]) -> None:
    places = placed(parents, 6)
    assert sorted(places) == list(range(6))
    for index, (place, parent) in enumerate(zip(places, parents, strict=True)):
        assert (place == parent) == (parents.index(parent) == index)


@given(st.lists(st.floats(-10, 10, width=32), min_size=9, max_size=9), st.integers(1, 9))
def test_the_best_columns_are_those_of_a_sort(row: list[float], count: int) -> None:
    scores = np.array([row, row[::-1]], np.float32)
    values, columns = Chooser(count).best(scores)
    assert columns.tolist() == np.argsort(-scores, axis=1, kind="stable")[:, :count].tolist()
    assert values.tolist() == np.take_along_axis(scores, columns, 1).tolist()


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 1000, 1024])
@pytest.mark.parametrize("count", [1, 8, 40])
def test_the_best_columns_of_a_large_vocabulary_are_those_of_a_sort(vocab_size: int, count: int) -> None:
    draw = np.random.default_rng(vocab_size + count)
    few = np.where(draw.random((2, vocab_size)) < 0.98, -np.inf, draw.random((2, vocab_size)))
    for scores in (draw.standard_normal((2, vocab_size)), draw.integers(0, 20, (2, vocab_size)), few):
        scores = scores.astype(np.float32)
        _, columns = Chooser(count).best(scores)
        assert columns.tolist() == np.argsort(-scores, axis=1, kind="stable")[:, :count].tolist()


@pytest.mark.parametrize("place", [0, 511, 599])
def test_a_nan_score_is_an_error_in_any_column(place: int) -> None:
    scores = np.zeros((2, 600), np.float32)
    scores[1, place] = np.nan
    with pytest.raises(SpecMismatch, match="scores are not numbers"):
        Chooser(4).best(scores)


# Sampling.


def chi_square(counts: Counter[int], expected: Floats) -> float:
    n = counts.total()
    kept = expected > 0
    assert not set(counts) - set(np.flatnonzero(kept).tolist())
    observed = np.array([counts[token] for token in range(len(expected))])[kept]
    return float(((observed - n * expected[kept]) ** 2 / (n * expected[kept])).sum())


def narrowed(options: DecodeOptions) -> Floats:
    """Return the distribution of a first token, computed in the simplest way."""
    weights = np.exp(hashed_logits((5,), (BOS,)).astype(np.float64) / options.temperature)
    probabilities = weights / weights.sum()
    order = np.argsort(-probabilities)
    if options.top_k:
        probabilities[order[options.top_k :]] = 0
        probabilities /= probabilities.sum()
    # The fewest tokens that together reach top_p.
    n_kept = int((np.cumsum(probabilities[order]) < options.top_p).sum()) + 1
    probabilities[order[n_kept:]] = 0
    probabilities[probabilities < options.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(sample=True),
        DecodeOptions(sample=True, temperature=0.5),
        DecodeOptions(sample=True, temperature=1.7, top_k=5),
        DecodeOptions(sample=True, top_p=0.7),
        DecodeOptions(sample=True, min_p=0.1),
        DecodeOptions(sample=True, temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_samples_follow_the_distribution(options: DecodeOptions) -> None:
    options = replace(options, max_new_tokens=1, num_return_sequences=3000, seed=11)
    hypothesis = decode(TableEngine(), [[5]], options)[0]
    counts = Counter((result.tokens or (EOS,))[0] for result in (hypothesis, *hypothesis.alternatives))
    expected = narrowed(options)
    freedom = int((expected > 0).sum()) - 1
    # Four deviations above the mean of chi-square; with a fixed seed it passes always or never.
    assert chi_square(counts, expected) < freedom + 4 * np.sqrt(2 * max(freedom, 1))


def test_other_seeds_give_other_samples_and_the_same_seed_the_same() -> None:
    runs = [decode(TableEngine(), SOURCES, DecodeOptions(sample=True, seed=seed)) for seed in (0, 1, 0)]
    assert runs[0] == runs[2]
    assert sum(first != second for first, second in zip(runs[0], runs[1], strict=True)) >= 5


def test_several_samples_of_a_source_differ_and_read_its_prefix_once() -> None:
    engine = TableEngine()
    results = decode(engine, [[5], [6]], DecodeOptions(sample=True, num_return_sequences=4, prefix=[3, 4, 5]))
    assert [shape for shape, _ in engine.calls[:3]] == [(2, 3), (8, 1), (8, 1)]
    assert len({result.tokens for result in (results[0], *results[0].alternatives)}) == 4
    assert all(result.tokens[:3] == (3, 4, 5) for result in results[1].alternatives)


def test_sampling_with_a_temperature_near_zero_is_greedy() -> None:
    cold = decode(TableEngine(), SOURCES, DecodeOptions(sample=True, temperature=1e-4))
    assert cold == decode(TableEngine(), SOURCES)


# Controls.


def test_a_prefix_is_read_in_one_call_without_a_vocabulary_and_is_the_same_as_token_by_token() -> None:
    engine = TableEngine()
    result = decode(engine, [[5]], DecodeOptions(prefix=[9, 8, 7, 6]))[0]
    assert engine.calls[:2] == [((1, 4), Want.HIDDEN), ((1, 1), Want.LOGITS)]
    forced = DecodeOptions(forced_tokens=[(0, 9), (1, 8), (2, 7), (3, 6)])
    assert result.tokens == decode(TableEngine(), [[5]], forced)[0].tokens
    assert result.tokens[:4] == (9, 8, 7, 6)


def test_a_prefix_leaves_less_room() -> None:
    endless = TableEngine(lambda source, tokens: np.eye(24, dtype=np.float32)[5])
    assert decode(endless, [[5]], DecodeOptions(prefix=[7] * 30))[0] == Hypothesis((7,) * 30 + (5, 5), "length")


@pytest.mark.parametrize("beams", [1, 3])
def test_controls_hold(beams: int) -> None:
    many = {"num_beams": beams, "max_new_tokens": 16}

    def decoded(**values: object) -> list[tuple[int, ...]]:
        return [result.tokens for result in decode(TableEngine(), SOURCES, DecodeOptions(**many, **values))]

    plain = decoded()
    assert min(map(len, plain)) < 8
    assert min(map(len, decoded(min_new_tokens=8))) >= 8
    common = Counter(token for tokens in plain for token in tokens).most_common(1)[0][0]
    assert common not in {token for tokens in decoded(suppress_tokens=[common]) for token in tokens}
    first, second = next(pair for tokens in plain for pair in itertools.pairwise(tokens) if pair[0] != pair[1])
    without = decoded(bad_words=[[first, second]])
    assert without != plain
    assert (first, second) not in {pair for tokens in without for pair in itertools.pairwise(tokens)}
    assert first in {token for tokens in without for token in tokens}
    for tokens in decoded(no_repeat_ngram_size=2, min_new_tokens=14):
        pairs = list(itertools.pairwise((BOS, *tokens)))
        assert len(pairs) == len(set(pairs))
    assert all(tokens[2] == 19 for tokens in decoded(forced_tokens=[(2, 19)], min_new_tokens=4))


def test_a_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    rows = {(BOS,): [0, 0, 0, 3, 2.5, -1], (BOS, 3): [-9, -9, -9, 3, 1.6, -1], (BOS, 3, 4): [-9, -9, -9, -2, -3, -2.5]}

    def logits_of(source: tuple[int, ...], tokens: tuple[int, ...]) -> Floats:
        return np.array(rows[tokens], np.float32)

    spec = replace(WORDS, vocab_size=6, width=6)
    options = DecodeOptions(repetition_penalty=2.0, max_new_tokens=3)
    # 3 falls to 1.5 below 1.6; then -2 falls to -4 below -2.5.
    assert decode(TableEngine(logits_of, spec), [[5]], options)[0].tokens == (3, 4, 5)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_stop_sequence_ends_a_target_and_is_not_part_of_it(beams: int) -> None:
    options = DecodeOptions(num_beams=beams, num_return_sequences=beams, min_new_tokens=6)
    plain = decode(TableEngine(), SOURCES, options)
    longest = max((result.tokens for result in plain), key=len)
    stop = longest[2:4]
    best = decode(TableEngine(), SOURCES, replace(options, stop=[stop, [23, 23, 23]]))
    results = [result for first in best for result in (first, *first.alternatives)]
    stopped = [result for result in results if result.finish == "stop"]
    assert stopped
    for result in results:
        assert stop not in set(itertools.pairwise(result.tokens))
        assert result.log_probs is None or len(result.log_probs) == len(result.tokens)
    if beams == 1:
        assert longest[:2] in {result.tokens for result in stopped}


def test_a_stop_text_may_begin_and_end_inside_of_tokens() -> None:
    letters = {3: "he", 4: "llo", 5: "wo", 6: "rld"}
    script = [3, 4, 5, 6, EOS]
    engine = TableEngine(lambda source, tokens: np.eye(24, dtype=np.float32)[script[len(tokens) - 1]])

    def text_of(tokens: object) -> str:
        return "".join(letters[token] for token in tokens)

    with Decoding(engine, [[5]], DecodeOptions(stop=["ow"]), text_of=text_of) as decoding:
        while decoding.advance():
            pass
        assert decoding.results() == [Hypothesis((3, 4, 5), "stop")]


def test_a_shortlist_multiplies_its_own_rows_alone() -> None:
    engine = TableEngine()
    allowed = [3, 4, 5, 9]
    results = decode(engine, SOURCES, DecodeOptions(shortlist=allowed))
    assert {token for result in results for token in result.tokens} <= set(allowed)
    assert {want for _, want in engine.calls} == {Want.HIDDEN}

    def only_listed(tokens: Tokens, scores: Floats) -> Floats:
        others = np.setdiff1d(np.arange(24), [*allowed, EOS])
        scores[:, others] = -np.inf
        return scores

    assert results == decode(TableEngine(), SOURCES, DecodeOptions(processors=[only_listed]))


@pytest.mark.parametrize("beams", [1, 2])
def test_a_shortlist_with_all_winners_changes_nothing(beams: int) -> None:
    options = DecodeOptions(num_beams=beams, scores=True)
    plain = decode(TableEngine(), SOURCES, options)
    if beams == 1:
        winners = sorted({token for result in plain[:3] for token in result.tokens})
        assert len(winners) < 16
        results = decode(TableEngine(), SOURCES[:3], replace(options, shortlist=winners))
        assert [result.tokens for result in results] == [result.tokens for result in plain[:3]]
    everything = decode(TableEngine(), SOURCES, replace(options, shortlist=range(24)))
    assert [result.tokens for result in everything] == [result.tokens for result in plain]
    assert [result.score for result in everything] == pytest.approx([result.score for result in plain], abs=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("listed", [3, 700])
def test_a_shortlists_scores_are_the_products_with_its_rows(rows: int, listed: int) -> None:
    draw = np.random.default_rng(rows)
    matrix, hidden = draw.standard_normal((900, 96), np.float32), draw.standard_normal((rows, 2, 96), np.float32)
    engine = TableEngine(spec=replace(WORDS, vocab_size=900, width=96))
    engine.output_rows = lambda ids: matrix[ids]  # type: ignore[method-assign]
    ids = sorted({EOS, *draw.permutation(900)[:listed].tolist()})
    scorer = Scorer(engine, DecodeOptions(shortlist=ids))
    for _ in range(2):  # in buffers that are used again
        logits = scorer.logits(StepOut(hidden=hidden))
        np.testing.assert_allclose(logits, hidden[:, -1].astype(float) @ matrix[ids].T.astype(float), atol=1e-4)
        assert logits.shape == (rows, len(ids))


def test_a_shortlist_goes_with_controls() -> None:
    results = decode(
        TableEngine(), SOURCES, DecodeOptions(shortlist=range(3, 12), suppress_tokens=[5], min_new_tokens=3)
    )
    assert {token for result in results for token in result.tokens} <= set(range(3, 12)) - {5}


@pytest.mark.parametrize("beams", [1, 2])
def test_a_users_processor_sees_the_tokens_so_far_and_the_next_scores(beams: int) -> None:
    seen = []

    def processor(tokens: Tokens, scores: Floats) -> Floats:
        seen.append(tokens.copy())
        scores[:, 7] = 50
        return scores

    options = DecodeOptions(processors=[processor], num_beams=beams, max_new_tokens=4, prefix=[9])
    results = decode(TableEngine(), [[5], [6]], options)
    assert [result.tokens for result in results] == [(9, 7, 7, 7, 7)] * 2
    assert [tokens.shape[1] for tokens in seen] == [2, 3, 4, 5]
    assert seen[-1][0].tolist() == [BOS, 9, 7, 7, 7]


def test_a_processor_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must return scores of shape \(1, 24\), found NoneType"):
        decode(TableEngine(), [[5]], DecodeOptions(processors=[lambda tokens, scores: None]))


WAYS = [{}, {"num_beams": 2}, {"sample": True}, {"sample": True, "top_k": 3, "num_return_sequences": 2}]
WAYS += [{"sample": True, "num_beams": 2}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_controls_that_forbid_everything_are_an_error(way: dict) -> None:
    options = DecodeOptions(suppress_tokens=range(24), **way)
    engine = TableEngine()
    with pytest.raises(ConfigError, match="forbid every token after 0"):
        decode(engine, [[5]], options)
    assert engine.n_states == 0


@pytest.mark.parametrize("top_k", [2, 12])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_engine_that_returns_nan_is_an_error(way: dict, top_k: int) -> None:
    def broken(source: tuple[int, ...], tokens: tuple[int, ...]) -> Floats:
        logits = hashed_logits(source, tokens)
        if len(tokens) > 2:
            logits[7] = np.nan
        return logits

    engine = TableEngine(broken, replace(WORDS, top_k=top_k))
    with pytest.raises(SpecMismatch, match="the engine's scores are not numbers: fatdeploy verify"):
        decode(engine, [[4] * 7], DecodeOptions(max_new_tokens=6, min_new_tokens=0, **way))
    assert engine.n_states == 0


# Other results.


@pytest.mark.parametrize("options", [DecodeOptions(), DecodeOptions(num_beams=3), DecodeOptions(prefix=[9])], ids=str)
def test_alignments_belong_to_the_tokens_that_they_chose(options: DecodeOptions) -> None:
    engine = TableEngine(spec=ALIGNED)
    for result, source in zip(decode(engine, SOURCES, options), SOURCES, strict=True):
        n_prefix = len(options.prefix)
        assert result.alignments.shape == (len(result.tokens) - n_prefix, len(source))
        # The engine writes the token that was read, so the weights of a token show the one before it.
        before = (BOS, *result.tokens)[n_prefix:-1]
        assert result.alignments[:, 0].tolist() == list(before)


def test_a_right_to_left_target_has_everything_in_reading_order() -> None:
    options = DecodeOptions(scores=True)
    plain = decode(TableEngine(spec=ALIGNED), SOURCES, options)
    turned = decode(TableEngine(spec=replace(ALIGNED, target_order="right_to_left")), SOURCES, options)
    for result, other in zip(plain, turned, strict=True):
        assert (result.tokens[::-1], result.log_probs[::-1], result.score) == (
            other.tokens,
            other.log_probs,
            other.score,
        )
        assert result.alignments[::-1].tolist() == other.alignments.tolist()


@pytest.mark.parametrize("options", [DecodeOptions(), DecodeOptions(num_beams=3)], ids=str)
def test_a_deadline_cancels_unfinished_targets(options: DecodeOptions) -> None:
    whole = decode(TableEngine(), SOURCES, options)
    engine = TableEngine()
    with Decoding(engine, SOURCES, options, deadline=float("inf")) as decoding:
        n_steps = 0
        while all(result.finish == "cancelled" for result in decoding.results()):
            n_steps += decoding.advance()
        decoding._deadline = 0.0
        assert not decoding.advance()
        results = decoding.results()
    assert {result.finish for result in results} == {"eos", "cancelled"}
    for result, expected in zip(results, whole, strict=True):
        if result.finish == "cancelled":
            assert len(result.tokens) == n_steps or (options.num_beams > 1 and len(result.tokens) < n_steps)
        else:
            assert result == expected
    assert engine.n_states == 0


def test_a_timeout_that_has_already_passed_gives_no_tokens() -> None:
    engine = TableEngine()
    results = decode(engine, SOURCES[:2], DecodeOptions(timeout_s=1e-9))
    assert results == [Hypothesis((), "cancelled")] * 2
    assert (engine.calls, engine.n_states) == ([], 0)


def test_tokens_so_far_can_be_read_between_steps() -> None:
    with Decoding(TableEngine(), [[5]], DecodeOptions(prefix=[9])) as decoding:
        targets = [decoding.tokens_so_far()]
        while decoding.advance():
            targets.append(decoding.tokens_so_far())
        assert targets[0] == (9,)
        assert [len(tokens) for tokens in targets] == list(range(1, len(targets) + 1))
        assert decoding.results()[0].tokens == decoding.tokens_so_far()
