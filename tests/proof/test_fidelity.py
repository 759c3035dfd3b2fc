"""Fidelity: counted by hand on an engine with scripted tokens, and on real bundles."""

from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.errors import ParityFailed
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import StepOut
from fatdeploy.runtimes.proof.fidelity import Fidelity, token_fidelity
from fatdeploy.runtimes.proof.probes import Probe, read_probes
from tests.support.bundles import bundle_of
from tests.support.engines.scripted import ScriptedEngine

REFERENCE = [[7, 8, 2, 4], [5, 6, 9, 3]]


def probe(tokens: list[list[int]], first: int = 5) -> Probe:
    """Return a batch whose sources differ in their first token, from ``first`` up."""
    rows, steps = np.shape(tokens)
    source = np.arange(first, first + rows)[:, None]
    best = np.zeros((rows, steps), np.float32)
    return Probe(source, np.ones((rows, 1), bool), np.array(tokens), best, np.ones(rows), np.ones(rows))


def test_every_token_that_equals_the_reference_agrees() -> None:
    engine = ScriptedEngine({5: REFERENCE[0], 6: REFERENCE[1]})
    fidelity = token_fidelity(engine, [probe(REFERENCE)])
    assert (fidelity, fidelity.share) == (Fidelity(tokens=8, same=8), 1.0)
    assert engine.released == 1


def test_a_wrong_token_counts_once_and_the_next_step_reads_the_references_own() -> None:
    engine = ScriptedEngine({5: [7, 9, 2, 4], 6: REFERENCE[1]})
    fidelity = token_fidelity(engine, [probe(REFERENCE)])
    assert fidelity == Fidelity(tokens=8, same=7)
    assert fidelity.as_dict() == {"tokens": 8, "same": 7, "share": 0.875}
    # BOS is 1; the wrong 9 is never read.
    assert engine.fed == [[[1], [1]], [[7], [5]], [[8], [6]], [[2], [9]]]


def test_all_probes_are_counted_together() -> None:
    engine = ScriptedEngine({5: [7, 8], 6: [3, 3], 8: [4, 4, 4]})
    fidelity = token_fidelity(engine, [probe([[7, 8], [3, 4]]), probe([[4, 5, 6]], first=8)])
    assert fidelity == Fidelity(tokens=7, same=4)
    assert engine.released == 2


def test_nothing_compared_is_no_agreement() -> None:
    assert token_fidelity(ScriptedEngine({}), []) == Fidelity(0, 0)
    assert Fidelity(0, 0).share == 0.0


class Silent(ScriptedEngine):
    def step(self, *_: object) -> StepOut:
        return StepOut()


def test_an_engine_without_logits_is_refused_and_its_state_released() -> None:
    engine = Silent({5: [7]})
    with pytest.raises(ParityFailed, match="the engine returned no logits"):
        token_fidelity(engine, [probe([[7]])])
    assert engine.released == 1


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny", "transformer-nat-tiny"])
def test_bundles_return_all_tokens_of_their_probes_and_miss_a_changed_one(preset: str) -> None:
    bundle = bundle_of(preset)
    engine, probes = OrtEngine(bundle, OrtOptions(threads=1)), read_probes(bundle.file(PROBES))
    assert token_fidelity(engine, probes) == Fidelity(832, 832)
    # The last token, which nothing reads.
    tokens = probes[1].tokens.copy()
    tokens[2, -1] = (tokens[2, -1] + 1) % 64
    assert token_fidelity(engine, [probes[0], replace(probes[1], tokens=tokens)]) == Fidelity(4 * 48, 4 * 48 - 1)
