"""The search matches ``generate`` of transformers: same tokens, same scores, for well-known models."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions, LogitsProcessor
from fatdeploy.runtimes.engines.protocol import Floats, Want
from fatdeploy.spec import Tokens
from tests.support.hugging_face import (
    EOS,
    FAMILIES,
    MAX_SOURCE,
    VOCABULARY,
    Generated,
    HuggingFaceEngine,
    generated,
    lively_model,
)

TOLERANCE = 1e-4
# Added to EOS's logit: from targets that run to the limit to some that are empty.
EOS_BIASES = (1.5, 2.5, 3.5)
in_every_family = pytest.mark.parametrize("family", FAMILIES)


def drawn_sources(random: np.random.Generator, count: int) -> list[list[int]]:
    """Return sources of different lengths: their batch is padded."""
    lengths = random.permutation(MAX_SOURCE)[:count] + 1
    return [random.integers(VOCABULARY, size=length).tolist() for length in lengths]


def drawn_engine(random: np.random.Generator, family: str) -> HuggingFaceEngine:
    return HuggingFaceEngine(lively_model(family, float(random.choice(EOS_BIASES))))


def drawn_beams(random: np.random.Generator) -> DecodeOptions:
    """Return a beam search of any width, length penalty and ending; one in eight has no or a negative penalty."""
    beams = int(random.integers(2, 9))
    limit = int(random.integers(1, 19))
    penalty = random.uniform(0.5, 2) if random.random() < 7 / 8 else random.choice([0.0, -0.5])
    return DecodeOptions(
        num_beams=beams,
        num_return_sequences=int(random.integers(1, beams + 1)),
        length_penalty=float(penalty),
        early_stopping=[True, False, "never"][random.integers(3)],
        max_new_tokens=limit,
        min_new_tokens=int(random.integers(limit + 1)) if random.random() < 1 / 4 else 0,
    )


def less_of_the_same(tokens: Tokens, scores: Floats) -> Floats:
    """Make the last two tokens less likely, BOS and the prefix among them."""
    rows = np.arange(len(tokens))
    for place in range(1, min(3, tokens.shape[1] + 1)):
        scores[rows, tokens[:, -place]] -= 1.5
    return scores


def drawn_controls(
    random: np.random.Generator, options: DecodeOptions, target: Sequence[int], bos_id: int
) -> DecodeOptions:
    """Return the options with some controls, which forbid parts of the ``target`` decoded without them."""

    def likely() -> bool:
        return bool(random.random() < 0.4)

    limit = max(3, options.max_new_tokens or 0)
    tokens = [*target, *random.integers(VOCABULARY, size=3).tolist()]
    words = [tokens[start : start + 1 + n] for n, start in enumerate(random.integers(len(tokens), size=4).tolist())]
    words.append([bos_id, tokens[0]])  # tokens that were read count, not only generated ones
    prefix = random.integers(3, VOCABULARY, size=random.integers(1, 5)).tolist() if likely() else []
    begin = [(0, int(random.integers(3, VOCABULARY)))] if not prefix and likely() else []
    end = [(limit - 1, EOS)] if likely() else []
    forced = {token for _, token in (*begin, *end)}
    # Suppressing a forced token would leave no token at all.
    suppressed = [token for token in tokens[: random.integers(1, 4)] if token not in forced]
    return replace(
        options,
        max_new_tokens=limit,
        prefix=prefix,
        repetition_penalty=float(random.uniform(0.7, 2)) if likely() else 1.0,
        no_repeat_ngram_size=int(random.integers(1, 4)) if likely() else 0,
        suppress_tokens=suppressed if likely() else [],
        # A bad word that is only EOS forbids it here and is ignored by transformers.
        bad_words=[word for word in words if word != [EOS]] if likely() else [],
        forced_tokens=[*begin, *end],
        processors=[less_of_the_same] if likely() else [],
    )


def check_same(ours: Hypothesis, theirs: Sequence[Generated]) -> None:
    results = [ours, *ours.alternatives]
    assert [(result.tokens, result.finish) for result in results] == [
        (result.tokens, result.finish) for result in theirs
    ]
    for result, other in zip(results, theirs, strict=True):
        assert result.score == pytest.approx(other.score, rel=0, abs=TOLERANCE)
        assert result.log_probs == pytest.approx(other.log_probs, rel=0, abs=TOLERANCE)


def check_each(engine: HuggingFaceEngine, sources: Sequence[Sequence[int]], options: DecodeOptions) -> None:
    """Compare our batch with one call of ``generate`` per source."""
    for source, ours in zip(sources, decode(engine, sources, options), strict=True):
        [theirs] = generated(engine.model, [source], options)
        check_same(ours, theirs)


@in_every_family
@pytest.mark.parametrize("seed", range(70))
def test_beams_find_what_transformers_finds(family: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    engine = drawn_engine(random, family)
    check_each(engine, drawn_sources(random, 1 + seed % 4), drawn_beams(random))


@in_every_family
@pytest.mark.parametrize("seed", range(30))
def test_controlled_beams_find_what_transformers_finds(family: str, seed: int) -> None:
    random = np.random.default_rng([1, seed])
    engine, sources, options = drawn_engine(random, family), drawn_sources(random, 1 + seed % 3), drawn_beams(random)
    target = decode(engine, sources[:1], options)[0].tokens
    check_each(engine, sources, drawn_controls(random, options, target, engine.spec.bos_id))


@in_every_family
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("controlled", [False, True], ids=["plain", "controlled"])
def test_greedy_decoding_gives_the_tokens_of_transformers(family: str, seed: int, controlled: bool) -> None:
    random = np.random.default_rng([2, seed])
    engine, sources = drawn_engine(random, family), drawn_sources(random, 1 + seed % 4)
    options = DecodeOptions(max_new_tokens=int(random.integers(1, 19)), scores=True)
    if controlled:
        target = decode(engine, sources[:1], options)[0].tokens
        options = drawn_controls(random, options, target, engine.spec.bos_id)
    check_each(engine, sources, options)


@in_every_family
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_batch_of_transformers_finds_the_same(family: str, seed: int, early_stopping: bool | str) -> None:
    random = np.random.default_rng([3, seed])
    engine, sources = drawn_engine(random, family), drawn_sources(random, 4)
    options = replace(drawn_beams(random), early_stopping=early_stopping)
    for ours, theirs in zip(decode(engine, sources, options), generated(engine.model, sources, options), strict=True):
        check_same(ours, theirs)


def test_a_negative_penalty_looks_no_further_than_the_present_length() -> None:
    # One source in thousands for which a search that looks as far as the limit would stop too soon.
    source = drawn_sources(np.random.default_rng([8, 2]), 10)[5]
    options = DecodeOptions(
        num_beams=8, num_return_sequences=8, early_stopping="never", length_penalty=-0.2, max_new_tokens=18
    )
    check_each(HuggingFaceEngine(lively_model("bart", 3.5)), [source], options)


@in_every_family
def test_the_engines_own_best_tokens_lead_where_all_logits_do(family: str) -> None:
    random = np.random.default_rng(4)
    model, sources = lively_model(family, EOS_BIASES[1]), drawn_sources(random, 4)
    options = DecodeOptions(num_beams=4, num_return_sequences=4, max_new_tokens=18)
    narrow, wide = HuggingFaceEngine(model, top_k=7), HuggingFaceEngine(model, top_k=8)
    for first, second, source in zip(
        *(decode(engine, sources, options) for engine in (narrow, wide)), sources, strict=True
    ):
        [theirs] = generated(model, [source], options)
        check_same(first, theirs)
        check_same(second, theirs)
    assert (set(narrow.wanted), set(wide.wanted)) == ({Want.LOGITS}, {Want.TOPK})


def only(targets: Sequence[Sequence[int]]) -> LogitsProcessor:
    """Return a control that allows only one of the targets, followed by EOS."""
    allowed = [(*target, EOS) for target in targets]

    def processor(tokens: Tokens, scores: Floats) -> Floats:
        left = np.full_like(scores, -np.inf)
        for row, (_, *prefix) in enumerate(tokens.tolist()):
            begun = [target for target in allowed if list(target[: len(prefix)]) == prefix]
            following = [target[len(prefix)] for target in begun if len(target) > len(prefix)]
            left[row, following] = scores[row, following]
        return left

    return processor


@in_every_family
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("beams", [1, 4])
def test_one_of_a_list_of_targets_is_found(family: str, seed: int, beams: int) -> None:
    random = np.random.default_rng([5, seed])
    engine, sources = drawn_engine(random, family), drawn_sources(random, 3)
    targets = [random.integers(3, VOCABULARY, size=random.integers(1, 9)).tolist() for _ in range(24)]
    options = DecodeOptions(num_beams=beams, max_new_tokens=12, processors=[only(targets)], scores=True)
    check_each(engine, sources, options)


@in_every_family
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_fewer_targets_than_beams_are_all_real(family: str, seed: int, early_stopping: bool | str) -> None:
    """With too few continuations transformers lets a complete target run on, at -1e9, and may return it as well."""
    random = np.random.default_rng([6, seed])
    engine, sources = drawn_engine(random, family), drawn_sources(random, 2)
    forbidden = random.permutation(np.delete(np.arange(VOCABULARY), EOS))[1:].tolist()
    options = DecodeOptions(
        num_beams=6,
        num_return_sequences=6,
        max_new_tokens=2 + seed % 3,
        early_stopping=early_stopping,
        suppress_tokens=forbidden,
    )
    for source, ours in zip(sources, decode(engine, sources, options), strict=True):
        [theirs] = generated(engine.model, [source], options)
        check_same(ours, [result for result in theirs if result.score > -1e6])


@in_every_family
def test_the_models_are_lively(family: str) -> None:
    random = np.random.default_rng(7)
    sources = [random.integers(VOCABULARY, size=length).tolist() for length in [*range(1, MAX_SOURCE + 1)] * 3]
    results = []
    for bias in EOS_BIASES:
        engine = HuggingFaceEngine(lively_model(family, bias))
        results += decode(engine, sources, DecodeOptions(num_beams=4, max_new_tokens=18, length_penalty=1.5))
    assert len({result.tokens for result in results}) > len(results) / 3
    assert np.mean([len(set(result.tokens)) for result in results if result.finish == "length"]) > 4
    assert len({len(result.tokens) for result in results if result.finish == "eos"}) >= 8
    assert 0.2 < np.mean([result.finish == "eos" for result in results]) < 0.8
