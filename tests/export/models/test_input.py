"""Bad input to a model or an engine is a clear error before anything is computed."""

import numpy as np
import pytest
import torch

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from tests.support.choices import tiny

SOURCE = np.array([[5, 6, 7], [8, 9, 0]])
MASK = np.array([[True, True, True], [True, True, False]])


@pytest.fixture(scope="module")
def engine() -> EagerEngine:
    return EagerEngine(tiny({"max_source": 4, "max_target": 3}))


@pytest.mark.parametrize(
    ("source", "mask", "reason"),
    [
        (np.zeros((1, 0), np.int64), np.zeros((1, 0), bool), r"source is empty: shape \(1, 0\)"),
        (np.zeros((0, 3), np.int64), np.zeros((0, 3), bool), r"source is empty: shape \(0, 3\)"),
        (SOURCE * 10, MASK, "source ids must lie in 0…63, found 90"),
        (SOURCE - 7, MASK, "source ids must lie in 0…63, found -7"),
        (np.ones((1, 5), np.int64), np.ones((1, 5), bool), "length 5 is more than max_source = 4"),
        (SOURCE.astype(np.int32), MASK, "source must be int64, found int32"),
        (SOURCE.astype(np.float32), MASK, "source must be int64, found float32"),
        (SOURCE, MASK.astype(np.int64), "mask must be bool, found int64"),
        (SOURCE, MASK[:, :2], r"mask has shape \(2, 2\), the source has \(2, 3\)"),
        (SOURCE[0], MASK[0], r"source must have two axes \(rows, positions\), found shape \(3,\)"),
        (SOURCE, ~MASK, "row 0 has no real token"),
        (SOURCE, MASK[:, ::-1].copy(), "row 1 of the mask is not a run of True followed by a run of False"),
        (SOURCE, np.array([[True, False, True]] * 2), "row 0 of the mask is not a run"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(
    engine: EagerEngine, source: np.ndarray, mask: np.ndarray, reason: str
) -> None:
    with pytest.raises(SpecMismatch, match=reason):
        engine.encode(source, mask, Capacity(1, 3))
    with pytest.raises(SpecMismatch, match=reason):
        engine.model.encode(torch.from_numpy(source), torch.from_numpy(mask))


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (np.full((2, 0), 1), "tokens is empty"),
        (np.full((2, 1), 64), "tokens ids must lie in 0…63, found 64"),
        (np.full((2, 1), -1), "tokens ids must lie in 0…63, found -1"),
        (np.array([[1]] * 40 + [[64]]), "tokens ids must lie in 0…63, found 64"),
        (np.array([[-1]] + [[1]] * 40), "tokens ids must lie in 0…63, found -1"),
        (np.full((2, 1), 1, np.int32), "tokens must be int64, found int32"),
        (np.full(2, 1), "tokens must have two axes"),
        (np.full((2, 4), 1), "a step to position 4 is past max_target = 3"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(engine: EagerEngine, tokens: np.ndarray, reason: str) -> None:
    state = engine.encode(SOURCE, MASK, Capacity(1, 3))
    with pytest.raises(SpecMismatch, match=reason):
        engine.step(tokens, state, Want.LOGITS)


@pytest.mark.parametrize("attention", ["scaled_dot", "linear"])
def test_a_step_past_max_target_is_refused_and_the_state_is_unchanged(attention: str) -> None:
    engine = EagerEngine(tiny({"max_target": 3, "decoder_attention": attention}))
    state = engine.encode(SOURCE, MASK, Capacity(1, 3))
    engine.step(np.full((2, 2), 1), state, Want.HIDDEN)
    with pytest.raises(SpecMismatch, match="a step to position 4 is past max_target = 3"):
        engine.step(np.full((2, 2), 1), state, Want.HIDDEN)
    engine.step(np.full((2, 1), 1), state, Want.HIDDEN)
    assert state.position == 3


def test_a_step_past_the_requested_capacity_is_refused(engine: EagerEngine) -> None:
    state = engine.encode(SOURCE, MASK, Capacity(1, 2))
    with pytest.raises(SpecMismatch, match="a step to position 3 is past"):
        engine.step(np.full((2, 3), 1), state, Want.LOGITS)


@pytest.mark.parametrize("positions", [0, 4])
def test_a_capacity_outside_the_models_range_is_refused(engine: EagerEngine, positions: int) -> None:
    with pytest.raises(ConfigError, match=rf"capacity must lie in 1…3 \(max_target\), found {positions}"):
        engine.encode(SOURCE, MASK, Capacity(1, positions))


def test_rows_that_do_not_divide_among_the_sources_are_refused(engine: EagerEngine) -> None:
    memory = engine.model.encode(torch.from_numpy(SOURCE), torch.from_numpy(MASK))
    with pytest.raises(SpecMismatch, match="3 rows do not divide among 2 sources"):
        engine.model.step(torch.full((3, 1), 1), engine.model.start(memory), memory)
