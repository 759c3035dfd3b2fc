"""The reference on known tokens, many in one call; and how probes are drawn, where unsafe rows leave early."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fatdeploy.errors import ExportFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.export.proof.known_tokens import TOGETHER, KnownTokens
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS, compared
from fatdeploy.runtimes.proof.probes import Probe, read_probes, row_alone
from tests.support.bundles import bundle_of, model_of
from tests.support.choices import tiny


class CountingEngine(EagerEngine):
    """Notes the shape of the tokens of every step."""

    def __init__(self, model: object) -> None:
        super().__init__(model)
        self.shapes: list[tuple[int, ...]] = []

    def step(self, tokens: np.ndarray, state: Any, want: Want) -> StepOut:
        self.shapes.append(tokens.shape)
        return super().step(tokens, state, want)


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny", "transformer-nat-tiny"])
def test_known_tokens_read_alone_and_many_at_once_give_what_steps_of_the_batch_give(preset: str) -> None:
    engine = CountingEngine(model_of(preset))
    probe = read_probes(bundle_of(preset).file(PROBES))[2]
    assert probe.tokens.shape == (8, 48)
    comparison = compared(EagerEngine(model_of(preset)), KnownTokens(engine, probe), probe.source, probe.mask, 48)
    assert comparison.first_miss is None
    np.testing.assert_array_equal(comparison.expected, probe.tokens)
    calls = [(1, 48)] * 8 if "nat" in preset else [(1, TOGETHER)] * 8 + [(1, 48 - TOGETHER)] * 8
    assert engine.shapes == calls


def contradiction(model: torch.nn.Module, probe: Probe) -> str:
    engine = EagerEngine(model)
    with pytest.raises(ExportFailed, match="the model contradicts itself at row") as caught:
        compared(engine, KnownTokens(engine, probe), probe.source, probe.mask, probe.tokens.shape[1])
    return str(caught.value)


def test_a_model_that_answers_differently_when_it_reads_many_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny({"max_source": 8, "max_target": 48})
    probe = drawn_probe(EagerEngine(model), [3, 8], 48)
    right = model.logits

    def wrong(decoded: Any, memory: Any) -> torch.Tensor:
        # The first call of a row is right, the second, which begins at position 32, is not.
        logits = right(decoded, memory)
        return logits.roll(1, -1) if logits.shape[1] == 48 - TOGETHER else logits

    monkeypatch.setattr(model, "logits", wrong)
    known = probe.tokens[0, TOGETHER]
    assert contradiction(model, probe) == (
        f"the model contradicts itself at row 0, step {TOGETHER}: token {known} when it reads rows together and tokens "
        f"one by one, {(known + 1) % 64} when it reads many tokens of one row; "
        "encode and step must give the same for both"
    )


def test_the_last_token_must_match_too() -> None:
    model = tiny({"max_source": 8, "max_target": 48})
    probe = drawn_probe(EagerEngine(model), [3, 8], 48)
    tokens = probe.tokens.copy()
    tokens[1, 47] = (tokens[1, 47] + 1) % 64
    assert f"at row 1, step 47: token {tokens[1, 47]} when" in contradiction(model, replace(probe, tokens=tokens))


def undecided_model() -> torch.nn.Module:
    """Return a model whose logits are so small that only one of six rows stays above the noise for 24 steps."""
    model = tiny({"max_source": 8, "max_target": 40, "tie_embeddings": False})
    with torch.no_grad():
        model.output.weight.mul_(5e-3)
    return model


def test_rows_that_are_decided_by_chance_leave_at_the_step_that_shows_it() -> None:
    engine = CountingEngine(undecided_model())
    probe = drawn_probe(engine, [6, 6], 24, seed=3)
    rows = [shape[0] for shape in engine.shapes]
    assert max(rows) > 2
    # Rows only become fewer until the next batch begins; not half of them were followed to the end.
    batches = [rows[0], *(new for old, new in itertools.pairwise(rows) if new > old)]
    assert sum(rows) < 24 * sum(batches) / 2
    assert (probe.bounds == NOISE).all()
    assert (probe.margins >= SAFE_MARGINS * probe.bounds).all()


def test_rows_that_stay_are_what_they_are_alone() -> None:
    model = undecided_model()
    probe = drawn_probe(EagerEngine(model), [6, 6], 24, seed=3)
    for row in range(2):
        alone = row_alone(probe, row)
        comparison = compared(EagerEngine(model), KnownTokens(EagerEngine(model), alone), alone.source, alone.mask, 24)
        assert comparison.first_miss is None
        np.testing.assert_allclose(comparison.chosen, alone.best, rtol=0, atol=NOISE)
