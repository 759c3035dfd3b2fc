"""Beams that are drawn: the distribution is that of ``generate``, and samples do not depend on the batch."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.engines.protocol import Floats
from tests.support import hugging_face
from tests.support.engines.tables import WORDS, TableEngine, hashed_logits
from tests.support.hugging_face import FAMILIES, VOCABULARY, HuggingFaceEngine, generated, lively_model
from tests.support.oracles.drawn_beams import Beginning, DrawnBeams

BOS, EOS = 1, 2
SOURCES = [[5], [6, 7], [8, 9, 3], [4] * 7, [11, 3], [12], [13, 5, 5, 5]]
SIX = replace(WORDS, vocab_size=6, width=6)
DRAWS = {
    "plain": DecodeOptions(sample=True, num_beams=2, max_new_tokens=2),
    "cool": DecodeOptions(sample=True, num_beams=2, max_new_tokens=2, temperature=0.6, length_penalty=0.5),
    "two tokens": DecodeOptions(sample=True, num_beams=2, max_new_tokens=4, top_k=2, temperature=1.5),
    "early": DecodeOptions(sample=True, num_beams=2, max_new_tokens=3, top_k=3, early_stopping=True),
}


def six_logits(source: tuple[int, ...], tokens: tuple[int, ...]) -> Floats:
    """Return logits that depend on the tokens alone: every source draws from one distribution."""
    logits = hashed_logits((5,), tokens, 6) / 2
    logits[EOS] += 1.5
    return logits


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def whole(result: Hypothesis) -> Beginning:
    return (*result.tokens, EOS) if result.finish == "eos" else result.tokens


def assert_drawn_from(targets: list[Beginning], distribution: dict[Beginning, float]) -> None:
    """Compare counts with a distribution by chi-square; targets that are expected less than 5 times count together."""
    assert sum(distribution.values()) == pytest.approx(1)
    counts = Counter(targets)
    assert not set(counts) - set(distribution)
    pairs = [(counts[target], len(targets) * chance) for target, chance in distribution.items()]
    rare = [pair for pair in pairs if pair[1] < 5]
    pairs = [pair for pair in pairs if pair[1] >= 5]
    if rare and sum(expected for _, expected in rare) >= 5:
        pairs.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    freedom = len(pairs) - 1
    assert freedom >= 3
    # Four deviations above the mean of chi-square; with a fixed seed it passes always or never.
    assert sum((count - expected) ** 2 / expected for count, expected in pairs) < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("name", DRAWS)
def test_drawn_beams_follow_the_exact_distribution(name: str) -> None:
    options = DRAWS[name]
    random = np.random.default_rng(1)
    # Sources only differ in their generators.
    sources = random.integers(0, 6, (3000, 8)).tolist()
    results = decode(TableEngine(six_logits, SIX), sources, options)
    exact = DrawnBeams(lambda tokens: log_softmax(six_logits((), (BOS, *tokens))), options, EOS)
    assert_drawn_from([whole(result) for result in results], exact.distribution())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [replace(DRAWS["two tokens"], top_k=3, max_new_tokens=3), replace(DRAWS["early"], temperature=2.0)],
    ids=["patient", "early"],
)
def test_generate_of_transformers_draws_from_the_same_exact_distribution(family: str, options: DecodeOptions) -> None:
    model = lively_model(family, 2.5)
    source, count = [7, 30, 12], 3000
    start = model.config.decoder_start_token_id

    def log_probs_of(tokens: Beginning) -> Floats:
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[start, *tokens]]))
        return out.logits[0, -1].float().log_softmax(-1).numpy()

    ids = torch.tensor([source] * count)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            num_beams=options.num_beams,
            max_new_tokens=options.max_new_tokens,
            top_k=options.top_k,
            temperature=options.temperature,
            early_stopping=options.early_stopping,
        )[:, 1:].tolist()
    eos = hugging_face.EOS
    targets = [tuple(row[: row.index(eos) + 1] if eos in row else row) for row in rows]
    assert_drawn_from(targets, DrawnBeams(log_probs_of, options, eos).distribution())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_at_a_vanishing_temperature_drawn_beams_are_the_beams_of_transformers(family: str, seed: int) -> None:
    random = np.random.default_rng([9, seed])
    engine = HuggingFaceEngine(lively_model(family, float(random.choice([1.5, 2.5, 3.5]))))
    sources = [random.integers(VOCABULARY, size=length).tolist() for length in random.integers(1, 12, 3)]
    beams = int(random.integers(2, 6))
    plain = DecodeOptions(num_beams=beams, num_return_sequences=beams, max_new_tokens=12, length_penalty=0.8)
    cold = replace(plain, sample=True, temperature=1e-8, seed=seed)
    for source, best in zip(sources, decode(engine, sources, cold), strict=True):
        [theirs] = generated(engine.model, [source], plain)
        results = [best, *best.alternatives]
        assert [(result.tokens, result.finish) for result in results] == [(one.tokens, one.finish) for one in theirs]
        scores = [result.score * cold.temperature for result in results if result.score is not None]
        assert scores == pytest.approx([one.score for one in theirs], rel=1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_at_least_one_token_more_than_there_are_ends_can_be_drawn_as_in_transformers(seed: int) -> None:
    random = np.random.default_rng(seed)

    def drawn(low: float, high: float, default: float) -> float:
        return float(random.uniform(low, high)) if random.random() < 0.5 else default

    values = {
        "temperature": drawn(0.3, 2, 1.0),
        "top_k": int(drawn(1, 6, 0)),
        "top_p": drawn(0.05, 0.6, 1.0),
        "min_p": drawn(0.2, 0.9, 0.0),
        "typical_p": drawn(0.05, 0.9, 1.0),
        "epsilon_cutoff": drawn(0, 0.5, 0.0),
        "eta_cutoff": drawn(0, 0.9, 0.0),
    }
    model, eos_ids = lively_model("marian", 1.5), [2, 5][: 1 + seed % 2]
    config = GenerationConfig(do_sample=True, num_beams=3, **{k: v for k, v in values.items() if v})
    config._eos_token_tensor = torch.tensor(eos_ids)
    warpers = model._get_logits_processor(config, input_ids_seq_length=1)
    options = DecodeOptions(sample=True, num_beams=3, eos_ids=eos_ids, **values)
    sampler = Sampler(options, 1 + len(eos_ids))
    scores = random.normal(0, random.uniform(0.2, 4), (4, VOCABULARY)).astype(np.float32)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    theirs = warpers(torch.ones(4, 1, dtype=torch.long), torch.from_numpy(scores.copy())).numpy()
    ours = np.stack([sampler.narrowed(row) for row in scores])
    assert (np.isfinite(ours) == np.isfinite(theirs)).all()
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert np.isfinite(ours).sum(1).min() >= 1 + len(eos_ids)


def test_other_seeds_draw_other_beams_and_the_same_seed_the_same_in_any_batch() -> None:
    options = DecodeOptions(sample=True, num_beams=3, num_return_sequences=2, top_p=0.9)
    first, second, again = (decode(TableEngine(), SOURCES, replace(options, seed=seed)) for seed in (0, 1, 0))
    assert first == again
    assert sum(result != other for result, other in zip(first, second, strict=True)) >= 5
    assert first == [decode(TableEngine(), [source], options)[0] for source in SOURCES]


def test_more_targets_than_drawn_beams_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_return_sequences must lie in 1…2 \(num_beams\), found 3"):
        DecodeOptions(sample=True, num_beams=2, num_return_sequences=3)
