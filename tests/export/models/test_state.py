"""Memory of decoding: constant-size state, caches allocated once, shapes of the contract, slow attention."""

import subprocess
import sys

import numpy as np
import pytest

from fatdeploy.errors import SpecMismatch
from fatdeploy.export.models.eager import EagerEngine, EagerState
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.weights import random_model
from fatdeploy.runtimes.engines.checks import sources_of_rows
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from tests.support.choices import AUTOREGRESSIVE


def after(engine: EagerEngine, state: EagerState, steps: int) -> EagerState:
    for _ in range(steps):
        engine.step(np.full((state.rows, 1), 7), state, Want.HIDDEN)
    return state


def started(preset: str, rows: int = 2) -> tuple[EagerEngine, EagerState]:
    engine = EagerEngine(random_model(config_from_preset(f"{preset}-tiny")))
    source = np.arange(3, 3 + 6 * rows).reshape(rows, 6)
    return engine, engine.encode(source, np.ones_like(source, bool), Capacity(2, engine.spec.max_target))


@pytest.mark.parametrize("preset", ["fat", "at-linear"])
def test_recurrent_state_is_as_large_after_200_steps_as_after_5(preset: str) -> None:
    engine, state = started(preset)
    at_5 = after(engine, state, 5).n_bytes()
    # rows x heads x (features x width + features) floats per layer
    assert at_5 == 2 * (2 * 2 * (16 * 16 + 16)) * 4
    assert after(engine, state, 195).n_bytes() == at_5


@pytest.mark.parametrize("preset", ["transformer", "fast"])
def test_caches_are_allocated_once_and_never_move(preset: str) -> None:
    engine, state = started(preset)
    addresses = [tensor.data_ptr() for tensor in state.tensors]
    size = state.n_bytes()
    assert size == 2 * (2 * 2 * 2 * 256 * 16) * 4
    after(engine, state, 200)
    assert [tensor.data_ptr() for tensor in state.tensors] == addresses
    assert state.n_bytes() == size


@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
def test_state_tensors_have_the_shapes_of_the_contract(preset: str) -> None:
    engine, state = started(preset)
    sizes = {"rows": 2, "capacity": 256}
    expected = [tuple(sizes.get(axis, axis) for axis in spec.shape) for spec in engine.spec.state]
    assert [tuple(tensor.shape) for tensor in state.tensors] == expected
    names = [spec.name for spec in engine.spec.state]
    assert len(set(names)) == len(names) == {"at": 1, "fat-published": 2}.get(preset, 4)


def test_a_reordered_state_continues_the_chosen_rows() -> None:
    for preset in AUTOREGRESSIVE:
        engine, state = started(preset)
        engine.step(np.array([[5], [6]]), state, Want.HIDDEN)
        engine.reorder(state, np.array([0, 0, 1, 1]))
        grown = engine.step(np.array([[8], [9], [8], [9]]), state, Want.LOGITS).logits
        engine.reorder(state, np.array([3, 2]))
        shrunk = engine.step(np.array([[4], [4]]), state, Want.LOGITS).logits
        assert grown is not None
        assert shrunk is not None

        engine, plain = started(preset)
        engine.step(np.array([[5], [6]]), plain, Want.HIDDEN)
        engine.reorder(plain, np.array([1]))
        alone = engine.step(np.array([[9]]), plain, Want.LOGITS).logits
        np.testing.assert_allclose(grown[3], alone[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(
            shrunk[0], engine.step(np.array([[4]]), plain, Want.LOGITS).logits[0], rtol=0, atol=1e-5
        )


def test_top_k_is_the_head_of_the_log_softmax() -> None:
    engine, state = started("fat")
    engine2, state2 = started("fat")
    top = engine.step(np.array([[5], [6]]), state, Want.TOPK)
    logits = engine2.step(np.array([[5], [6]]), state2, Want.LOGITS).logits.astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-log_probs, axis=-1)[..., :16]
    assert top.logits is None
    np.testing.assert_array_equal(top.top_ids, order)
    np.testing.assert_allclose(top.top_log_probs, np.take_along_axis(log_probs, order, -1), atol=1e-5)


@pytest.mark.parametrize(("rows", "per_source"), [([0, 1, 0], 1), ([0, 0, 1], 1), ([], 1), ([0, 2, 1, 3], 2)], ids=str)
def test_rows_that_are_not_adjacent_and_equally_many_per_source_are_refused(rows: list[int], per_source: int) -> None:
    with pytest.raises(SpecMismatch, match="rows of one source must be adjacent"):
        sources_of_rows(np.array(rows, np.int64), per_source)


def test_rows_that_the_state_does_not_have_are_refused() -> None:
    engine, state = started("fat")
    with pytest.raises(SpecMismatch, match=r"the state has rows 0…1, found \[2\]"):
        engine.reorder(state, np.array([2]))
    with pytest.raises(SpecMismatch, match="3 rows of tokens, the state has 2"):
        engine.step(np.full((3, 1), 5), state, Want.HIDDEN)


def test_a_model_without_length_head_has_no_lengths() -> None:
    engine, state = started("fat")
    with pytest.raises(SpecMismatch, match="no length head"):
        engine.length_log_probs(state)


SLOW_AT_512 = """
from pathlib import Path
import torch
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
torch.set_num_threads(1)
model = ReferenceModel(config_from_preset("fat-base")).eval()
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
with torch.inference_mode():
    model.encode(torch.full((1, 8), 5), torch.ones(1, 8, dtype=torch.bool))
    before = peak()
    model.encode(torch.full((4, 512), 5), torch.ones(4, 512, dtype=torch.bool))
print(peak() - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="the peak is read from /proc, because a child inherits its parent's ru_maxrss"
)
def test_slow_attention_over_512_positions_needs_less_than_600_mb() -> None:
    run = subprocess.run([sys.executable, "-c", SLOW_AT_512], capture_output=True, text=True, check=True)
    extra = int(run.stdout)
    print(f"slow attention, fat-base, B = 4, S = 512: {extra / 1e6:.0f} MB extra")
    # One [B, H, S, S] plane is 34 MB and must have existed: a smaller number would mean that nothing was measured.
    assert 34e6 < extra < 600e6
