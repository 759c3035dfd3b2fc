"""A trained OPUS-MT on real sentences: our bundle in fp32, transformers and CTranslate2 give the same tokens.

Needs `make real-models`. The originals' answers are computed once and kept in build/real.
"""

import os
from collections.abc import Iterator

import pytest

from benchmarks.real.answers import BEAMS, MAX_NEW_TOKENS, NOISE, Answer, answers
from benchmarks.real.exports import FP32, kept_bundle
from benchmarks.real.folders.opus_mt import EOS
from benchmarks.real.sources import MODEL, REAL, all_sentences, sentences, source_ids
from fatdeploy import Model, load
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (REAL / MODEL).exists(), reason=f"build/real/{MODEL} does not exist: run make real-models"),
]
TIE = 2  # noise bounds; a smaller margin of the reference may fall either way
SCORES = 1e-4


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load(kept_bundle(FP32), threads=os.cpu_count()) as loaded:
        yield loaded


def greedy_misses(ours: list[list[int]], expected: list[Answer]) -> tuple[list[int], list[float]]:
    """Return the sentences that differ, and the reference's margins where only fp32 noise decided."""
    misses, ties = [], []
    for row, (tokens, answer) in enumerate(zip(ours, expected, strict=True)):
        if tokens == answer.tokens:
            continue
        assert answer.margins is not None
        pairs = zip([*tokens, EOS], [*answer.tokens, EOS], strict=False)
        step = next(step for step, (found, token) in enumerate(pairs) if found != token)
        if answer.margins[step] <= TIE * NOISE * max(1.0, answer.largest):
            ties.append(answer.margins[step])
        else:
            misses.append(row)
    return misses, ties


def tokens_of(hypotheses: list[Hypothesis]) -> list[list[int]]:
    return [list(hypothesis.tokens) for hypothesis in hypotheses]


def different_rows(first: list[list[int]], second: list[list[int]]) -> list[int]:
    return [row for row, (ours, theirs) in enumerate(zip(first, second, strict=True)) if ours != theirs]


def worst_score(hypotheses: list[Hypothesis], expected: list[Answer]) -> float:
    pairs = [(ours.score, answer.score) for ours, answer in zip(hypotheses, expected, strict=True)]
    assert all(ours is not None and theirs is not None for ours, theirs in pairs)
    return max(abs((ours or 0.0) - (theirs or 0.0)) for ours, theirs in pairs)


def test_there_are_more_than_five_hundred_real_sentences() -> None:
    assert (len(all_sentences()), len(sentences())) == (2331, 583)
    assert all(8 <= len(sentence) <= 60 for sentence in all_sentences())


@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_transformers_and_ctranslate2_agree_on_every_sentence(search: str) -> None:
    originals = [[answer.tokens for answer in answers(f"{name}-{search}")] for name in ("transformers", "ctranslate2")]
    assert different_rows(*originals) == []


def test_greedy_tokens_are_those_of_generate_and_of_ctranslate2(model: Model) -> None:
    ours = tokens_of(model.generate(source_ids(sentences()), num_beams=1, max_new_tokens=MAX_NEW_TOKENS))
    misses, ties = greedy_misses(ours, answers("transformers-greedy"))
    print(f"{len(ours)} sentences, {len(ties)} ties {ties}")
    assert misses == []
    peer = [answer.tokens for answer in answers("ctranslate2-greedy")]
    assert len(different_rows(ours, peer)) == len(ties)


def test_four_beams_are_those_of_generate_and_of_ctranslate2(model: Model) -> None:
    changes = {"early_stopping": BEAMS.early_stopping, "max_new_tokens": MAX_NEW_TOKENS}
    hypotheses = model.generate(source_ids(sentences()), num_beams=BEAMS.beams, **changes)
    for name in ("transformers-beams", "ctranslate2-beams"):
        assert different_rows(tokens_of(hypotheses), [answer.tokens for answer in answers(name)]) == [], name
    assert worst_score(hypotheses, answers("transformers-beams")) <= SCORES


def test_the_settings_of_the_folder_give_what_generate_gives(model: Model) -> None:
    expected = answers("transformers-folder")
    assert (model.options.num_beams, model.options.forced_eos_id, model.options.renormalize) == (4, EOS, True)
    hypotheses = model.generate(source_ids(sentences()), max_new_tokens=MAX_NEW_TOKENS)
    assert different_rows(tokens_of(hypotheses), [answer.tokens for answer in expected]) == []
    assert worst_score(hypotheses, expected) <= SCORES


def test_text_becomes_the_ids_of_marians_tokenizer(model: Model) -> None:
    texts = all_sentences()
    assert [model.read(text).ids.tolist() for text in texts] == source_ids(texts)


def test_a_sentence_in_chinese_comes_out_in_english(model: Model) -> None:
    [hypothesis] = model.generate(["今天天气很好，我们去公园散步吧。"])
    assert hypothesis.text == "It's a nice day. Let's go for a walk in the park."
