"""Sources, options and comparisons for the equalities that hold for every engine."""

import pytest

from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.proof.probes import read_probes
from tests.support.bundles import bundle_of

BEAMS = DecodeOptions(num_beams=4, num_return_sequences=4, max_new_tokens=24, length_penalty=0.8)
SAMPLES = DecodeOptions(sample=True, num_return_sequences=2, max_new_tokens=24, top_k=4, seed=5)


def sources_of(preset: str) -> list[list[int]]:
    """Return sources of lengths 1 to the longest whose greedy steps have a clear winner."""
    probes = read_probes(bundle_of(preset).file(PROBES))[1:3]
    rows = [row for probe in probes for row in zip(probe.source, probe.mask, strict=True)]
    return [row[real].tolist() for row, real in rows][1:]


def tokens_of(results: list[Hypothesis]) -> list[list[tuple[int, ...]]]:
    return [[best.tokens, *(alternative.tokens for alternative in best.alternatives)] for best in results]


def assert_alike(results: list[Hypothesis], expected: list[Hypothesis]) -> None:
    """Check tokens exactly, scores closely."""
    assert tokens_of(results) == tokens_of(expected)
    for result, other in zip(results, expected, strict=True):
        assert result.finish == other.finish
        assert result.score == pytest.approx(other.score, abs=1e-4)
        assert [alternative.score for alternative in result.alternatives] == pytest.approx(
            [alternative.score for alternative in other.alternatives], abs=1e-4
        )
