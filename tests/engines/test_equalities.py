"""Equalities of every engine: beams, samples, prefixes and shortlists give the same tokens on reference and graphs."""

from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from tests.support.engines.equalities import BEAMS, SAMPLES, assert_alike, sources_of, tokens_of
from tests.support.engines.kinds import Kind, engine_of
from tests.support.quantized import quantized_of

PRESETS = ["transformer-tiny", "fast-tiny", "at-tiny", "rnn-tiny", "fat-tiny"]
# Graphs on onnxruntime, and plans on the test device.
GRAPHS = ["ort", "trt"]
ENGINES = ["eager", *GRAPHS]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("preset", PRESETS)
def test_beams_on_graphs_are_the_references_and_each_row_is_as_it_is_alone(preset: str, kind: Kind) -> None:
    sources = sources_of(preset)
    expected = decode(engine_of(preset, "eager"), sources, BEAMS)
    engine = engine_of(preset, kind)
    assert_alike(decode(engine, sources, BEAMS), expected)
    alone = [decode(engine, [source], BEAMS)[0] for source in sources]
    assert_alike(alone, expected)
    assert_alike(decode(engine, sources[::-1], BEAMS)[::-1], expected)
    # Most targets differ, so swapped rows would show; random weights give some sources the same target.
    assert len({hypothesis.tokens for hypothesis in expected}) > len(sources) // 2
    assert any(
        hypothesis.tokens != greedy.tokens for hypothesis, greedy in zip(expected, decode(engine, sources), strict=True)
    )


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("preset", PRESETS)
def test_searches_agree_with_each_other(preset: str, kind: Kind) -> None:
    engine, sources = engine_of(preset, kind), sources_of(preset)[:5]
    limit = 20
    greedy = tokens_of(decode(engine, sources, DecodeOptions(max_new_tokens=limit)))
    assert tokens_of(decode(engine, sources, DecodeOptions(num_beams=1, max_new_tokens=limit, scores=True))) == greedy
    cold = DecodeOptions(sample=True, temperature=1e-5, max_new_tokens=limit)
    assert tokens_of(decode(engine, sources, cold)) == greedy
    listed = DecodeOptions(
        shortlist=sorted({token for sequences in greedy for token in sequences[0]}), max_new_tokens=limit
    )
    assert tokens_of(decode(engine, sources, listed)) == greedy
    # If the beginning of a greedy target is forced in one call, the rest of it follows.
    for source, [tokens] in zip(sources, greedy, strict=True):
        prefix = tokens[: len(tokens) // 2]
        rest = DecodeOptions(prefix=prefix, max_new_tokens=limit - len(prefix))
        assert decode(engine, [source], rest)[0].tokens == tokens


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("preset", PRESETS)
def test_samples_are_the_same_on_every_engine_and_in_every_batch(preset: str, kind: Kind) -> None:
    sources = sources_of(preset)[:5]
    expected = tokens_of(decode(engine_of(preset, "eager"), sources, SAMPLES))
    engine = engine_of(preset, kind)
    assert tokens_of(decode(engine, sources, SAMPLES)) == expected
    assert [tokens_of(decode(engine, [source], SAMPLES))[0] for source in sources] == expected
    assert any(samples[0] != samples[1] for samples in expected)


def test_a_standard_graph_finds_the_same_beams() -> None:
    preset = "fat-tiny"
    sources = sources_of(preset)
    expected = decode(engine_of(preset, "eager"), sources, BEAMS)
    assert_alike(decode(engine_of(preset, "standard"), sources, BEAMS), expected)


@pytest.mark.parametrize("kind", GRAPHS)
def test_controls_change_graphs_and_reference_alike(kind: Kind) -> None:
    preset = "transformer-tiny"
    sources = sources_of(preset)
    options = DecodeOptions(
        num_beams=3, repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=5, max_new_tokens=24, prefix=[9]
    )
    expected = decode(engine_of(preset, "eager"), sources, options)
    assert_alike(decode(engine_of(preset, kind), sources, options), expected)
    for hypothesis in expected:
        windows = np.lib.stride_tricks.sliding_window_view(np.array(hypothesis.tokens), 3).tolist()
        assert len(windows) == len({tuple(window) for window in windows})


MIXED = {
    "greedy": DecodeOptions(max_new_tokens=14, scores=True),
    "beams": DecodeOptions(num_beams=3, num_return_sequences=2, max_new_tokens=14),
    "controlled beams": DecodeOptions(num_beams=2, max_new_tokens=14, min_new_tokens=3, repetition_penalty=1.2),
    "samples": DecodeOptions(sample=True, num_return_sequences=2, max_new_tokens=14, top_k=4, scores=True),
}


def drawn_prefixes(count: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 60, random.integers(7)).tolist() for _ in range(count)]


@pytest.mark.parametrize("options", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("preset", PRESETS)
def test_rows_with_prefixes_of_different_lengths_are_what_they_are_alone(
    preset: str, kind: Kind, options: DecodeOptions
) -> None:
    engine, sources = engine_of(preset, kind), sources_of(preset)[:6]
    prefixes = drawn_prefixes(len(sources), 3)
    assert len({len(prefix) for prefix in prefixes}) > 3
    alone = [
        decode(engine, [source], replace(options, prefix=prefix))[0]
        for source, prefix in zip(sources, prefixes, strict=True)
    ]
    assert_alike(decode(engine, sources, options, prefixes=prefixes), alone)


@pytest.mark.parametrize("options", MIXED.values(), ids=MIXED)
def test_rows_of_int8_with_prefixes_of_different_lengths_are_what_they_are_alone_bit_for_bit(
    options: DecodeOptions,
) -> None:
    engine = OrtEngine(quantized_of("fat-tiny", "int8"), OrtOptions(threads=1))
    sources = sources_of("fat-tiny")[:6]
    prefixes = drawn_prefixes(len(sources), 3)
    together = decode(engine, sources, options, prefixes=prefixes)
    for result, source, prefix in zip(together, sources, prefixes, strict=True):
        assert result == decode(engine, [source], replace(options, prefix=prefix))[0]
