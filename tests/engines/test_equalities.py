"""What holds for every engine: beams, samples, prefixes and shortlists say the same on the reference and on graphs."""

import numpy as np
import pytest

from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.decode import decode
from fatdeploy.runtimes.hypothesis import Hypothesis
from fatdeploy.runtimes.options import DecodeOptions
from fatdeploy.runtimes.verify import read_probes
from tests.bundles import bundle_of
from tests.engines import Kind, engine_of

PRESETS = ["transformer-tiny", "fast-tiny", "at-tiny", "fat-tiny"]
# Graphs on onnxruntime, and plans on the test device.
GRAPHS = ["ort", "trt"]
ENGINES = ["eager", *GRAPHS]

BEAMS = DecodeOptions(num_beams=4, num_return_sequences=4, max_new_tokens=24, length_penalty=0.8)
SAMPLES = DecodeOptions(sample=True, num_return_sequences=2, max_new_tokens=24, top_k=4, seed=5)


def sources_of(preset: str) -> list[list[int]]:
    """Return sources whose greedy steps are all decided clearly, of lengths 1 to the longest."""
    probes = read_probes(bundle_of(preset).file(PROBES))[1:3]
    rows = [row for probe in probes for row in zip(probe.source, probe.mask, strict=True)]
    return [row[real].tolist() for row, real in rows][1:]


def tokens_of(found: list[Hypothesis]) -> list[list[tuple[int, ...]]]:
    return [[one.tokens, *(other.tokens for other in one.alternatives)] for one in found]


def assert_alike(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    """Check tokens exactly, scores closely."""
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.finish == other.finish
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert [two.score for two in one.alternatives] == pytest.approx(
            [two.score for two in other.alternatives], abs=1e-4
        )


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
    # Most differ, so that rows which changed places would be seen; random weights give some sources the same target.
    assert len({one.tokens for one in expected}) > len(sources) // 2
    assert any(one.tokens != greedy.tokens for one, greedy in zip(expected, decode(engine, sources), strict=True))


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("preset", PRESETS)
def test_searches_agree_with_each_other(preset: str, kind: Kind) -> None:
    engine, sources = engine_of(preset, kind), sources_of(preset)[:5]
    limit = 20
    greedy = tokens_of(decode(engine, sources, DecodeOptions(max_new_tokens=limit)))
    assert tokens_of(decode(engine, sources, DecodeOptions(num_beams=1, max_new_tokens=limit, scores=True))) == greedy
    cold = DecodeOptions(sample=True, temperature=1e-5, max_new_tokens=limit)
    assert tokens_of(decode(engine, sources, cold)) == greedy
    listed = DecodeOptions(shortlist=sorted({token for one in greedy for token in one[0]}), max_new_tokens=limit)
    assert tokens_of(decode(engine, sources, listed)) == greedy
    # What greedy begins with, forced in one call, is followed by what greedy goes on with.
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
    assert any(one[0] != one[1] for one in expected)


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
    for one in expected:
        windows = np.lib.stride_tricks.sliding_window_view(np.array(one.tokens), 3).tolist()
        assert len(windows) == len({tuple(window) for window in windows})
