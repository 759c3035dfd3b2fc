"""Scores of many tokens: log-probabilities without copies, and processors that work in place."""

from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.errors import SpecMismatch
from fatdeploy.runtimes.decoding.beams.chooser import Chooser
from fatdeploy.runtimes.decoding.log_probs import BLOCK, LogProbs, LogSoftmax, row_blocks
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.biases import Suppressed
from fatdeploy.runtimes.decoding.processors.protocol import rectangular
from fatdeploy.runtimes.decoding.scoring import Scorer
from fatdeploy.runtimes.engines.ort.engine import LARGE_VOCABULARY, OrtEngine
from fatdeploy.runtimes.engines.protocol import Floats, Want
from fatdeploy.spec import Tokens
from tests.support.bundles import bundle_of
from tests.support.decoding.processors import OPTIONS, ROWS, applied, processors, ragged_history
from tests.support.engines.tables import WORDS, TableEngine

SIZES = [(1, 1), (3, 9), (5, BLOCK // 2), (2, BLOCK + 1), (2000, 50)]
SOURCES = [[5], [6, 7], [8, 9, 3], [4] * 7]


def drawn(shape: tuple[int, int]) -> Floats:
    return np.random.default_rng(shape).normal(40, 5, shape).astype(np.float32)


def log_probs(scores: Floats) -> np.ndarray:
    exact = scores.astype(float) - scores.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


@pytest.fixture(scope="module", params=["numpy", "onnxruntime"])
def log_softmax(request: pytest.FixtureRequest) -> LogSoftmax | None:
    """Return what normalises a block: nothing stands for numpy."""
    return OrtEngine(bundle_of("transformer-tiny")).log_softmax if request.param == "onnxruntime" else None


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_log_probabilities_are_those_of_a_softmax_and_do_not_depend_on_other_rows(
    shape: tuple[int, int], log_softmax: LogSoftmax | None
) -> None:
    scores, own = drawn(shape), LogProbs(log_softmax)
    columns = np.random.default_rng(1).integers(0, shape[1], shape[0])
    normalized = scores.copy()
    own.normalize(normalized)
    np.testing.assert_allclose(normalized, log_probs(scores), atol=2e-5)
    np.testing.assert_array_equal(own.of_columns(scores, columns), normalized[np.arange(shape[0]), columns])
    np.testing.assert_array_equal(own.of_block(scores[:1])[0], normalized[0])
    alone = scores[-1:].copy()
    own.normalize(alone)
    np.testing.assert_array_equal(alone[0], normalized[-1])


def test_scores_that_lie_apart_in_memory_are_normalized_too(log_softmax: LogSoftmax | None) -> None:
    apart = np.stack([drawn((3, 50)), drawn((3, 51))[:, 1:]], 1)
    LogProbs(log_softmax).normalize(apart[:, 1])
    np.testing.assert_array_equal(apart[:, 0], drawn((3, 50)))
    np.testing.assert_allclose(apart[:, 1], log_probs(drawn((3, 51))[:, 1:]), atol=2e-5)


@pytest.mark.parametrize("shape", SIZES[1:], ids=str)
def test_the_best_log_probabilities_are_those_of_all_and_the_scores_stay_as_they_are(
    shape: tuple[int, int], log_softmax: LogSoftmax | None
) -> None:
    scores = drawn(shape)
    before = scores.copy()
    best, columns = Chooser(4, LogProbs(log_softmax)).best_log_probs(scores)
    np.testing.assert_array_equal(scores, before)
    LogProbs(log_softmax).normalize(scores)
    assert columns.tolist() == np.argsort(-scores, axis=1, kind="stable")[:, :4].tolist()
    np.testing.assert_allclose(best, np.take_along_axis(log_probs(before), columns, 1), atol=2e-5)


def test_where_every_token_is_forbidden_all_log_probabilities_are_infinite(log_softmax: LogSoftmax | None) -> None:
    scores = np.array([[-np.inf] * 3, [0, 0, -np.inf], [-np.inf, 7, -np.inf]], np.float32)
    best, _ = Chooser(3, LogProbs(log_softmax)).best_log_probs(scores)
    expected = [[-np.inf] * 3, [-np.log(2), -np.log(2), -np.inf], [0, -np.inf, -np.inf]]
    np.testing.assert_allclose(best, expected, rtol=1e-6)
    LogProbs(log_softmax).normalize(scores)
    np.testing.assert_allclose(scores[:2], best[:2], rtol=1e-6)


def test_scores_that_are_not_numbers_are_an_error_however_they_are_normalized(log_softmax: LogSoftmax | None) -> None:
    scores = drawn((3, 40))
    scores[1, 17] = np.nan
    with pytest.raises(SpecMismatch, match="scores are not numbers"):
        Chooser(4, LogProbs(log_softmax)).best_log_probs(scores)


@pytest.mark.parametrize(("shape", "count"), [((5, 9), 1), ((5, BLOCK // 2), 3), ((5, BLOCK), 5), ((3, BLOCK * 2), 3)])
def test_rows_are_read_in_blocks_that_a_cache_holds(shape: tuple[int, int], count: int) -> None:
    blocks = [range(*rows.indices(shape[0])) for rows in row_blocks(np.broadcast_to(np.float32(0), shape))]
    assert len(blocks) == count
    assert [row for block in blocks for row in block] == list(range(shape[0]))


def test_processors_change_the_engines_logits_in_place() -> None:
    scorer = Scorer(TableEngine(), DecodeOptions(), [Suppressed(np.array([3, 5]))])
    logits = drawn((2, WORDS.vocab_size))
    expected = logits.copy()
    expected[:, [3, 5]] = -np.inf
    assert scorer.processed(logits, rectangular(np.ones((2, 1), np.int64), np.arange(2))) is logits
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_relative_processor_keeps_a_shift_of_all_scores_or_forgets_it(name: str) -> None:
    chain, scores = processors(OPTIONS[name]), drawn((len(ROWS), WORDS.vocab_size)) - 40
    plain, shifted = (applied(chain, ragged_history(), scores + shift) for shift in (np.float32(0), np.float32(8)))
    for array in (plain, shifted):
        LogProbs().normalize(array)
    relative = Scorer(TableEngine(), OPTIONS[name], chain).relative
    assert relative == np.allclose(plain, shifted, atol=1e-5)
    assert relative == (name not in ("growing end", "repetition"))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_beams_score_what_processors_leave_as_in_transformers(name: str, renormalize: bool) -> None:
    options = replace(OPTIONS[name], num_beams=3, num_return_sequences=3, renormalize=renormalize)
    plain = DecodeOptions(num_beams=3, num_return_sequences=3, max_new_tokens=options.max_new_tokens)
    # One source per decode: a caller's own processor does not know which source a row belongs to.
    for source in SOURCES:
        by_hand = replace(plain, processors=[Normalized(options, source)])
        [ours], [theirs] = (decode(TableEngine(), [source], each) for each in (options, by_hand))
        for first, second in zip((ours, *ours.alternatives), (theirs, *theirs.alternatives), strict=True):
            assert first.tokens == second.tokens
            assert first.score == pytest.approx(second.score, abs=1e-5)


class Normalized:
    """Processors of options on log-probabilities that are computed in full precision, each time they are needed."""

    def __init__(self, options: DecodeOptions, source: list[int]) -> None:
        self.chain, self.renormalize = processors(options, [source]), options.renormalize

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        history = rectangular(tokens, np.zeros(len(tokens), np.int64))
        result = applied(self.chain, history, log_probs(scores).astype(np.float32))
        return log_probs(result).astype(np.float32) if self.renormalize else result


class OwnRanking(TableEngine):
    """An engine that says whether its own top k pays."""

    def __init__(self, *, topk_pays: bool) -> None:
        super().__init__()
        self.topk_pays, self.n_normalized = topk_pays, 0

    def log_softmax(self, scores: Floats, out: Floats) -> None:
        self.n_normalized += len(scores)
        out[...] = log_probs(scores)


def test_beams_search_the_logits_where_the_engines_own_top_k_does_not_pay() -> None:
    options = DecodeOptions(num_beams=3, num_return_sequences=3)
    slow, fast = OwnRanking(topk_pays=False), OwnRanking(topk_pays=True)
    ours, theirs = (decode(engine, SOURCES, options) for engine in (slow, fast))
    assert ({want for _, want in slow.calls}, {want for _, want in fast.calls}) == ({Want.LOGITS}, {Want.TOPK})
    assert (slow.n_normalized, fast.n_normalized) == (sum(shape[0] for shape, _ in slow.calls), 0)
    assert [result.tokens for result in ours] == [result.tokens for result in theirs]
    assert [result.score for result in ours] == pytest.approx([result.score for result in theirs], abs=1e-5)


def test_onnxruntimes_top_k_pays_for_small_vocabularies_and_where_graphs_have_no_branches() -> None:
    for dialect, large_pays in (("ort", False), ("standard", True)):
        engine = OrtEngine(bundle_of("transformer-tiny", dialect))
        assert engine.topk_pays
        engine.spec = replace(engine.spec, vocab_size=LARGE_VOCABULARY)
        assert engine.topk_pays == large_pays
