"""Rounding with care: less error on activations like those it was made for, and never another layout."""

import numpy as np
import pytest

from fatdeploy.export.quantize.integers import best_blocks
from fatdeploy.export.quantize.planning import gptq
from fatdeploy.export.quantize.planning.gptq import blocks_by_hessian

DRAW = np.random.default_rng(0)


def correlated(width: int, count: int) -> np.ndarray:
    mixing = DRAW.standard_normal((width, width)) * 0.2 + np.eye(width)
    return (DRAW.standard_normal((count, width)) @ mixing).astype(np.float32)


def lost(rows: np.ndarray, matrix: np.ndarray, restored: np.ndarray) -> float:
    return float(np.square(rows @ restored - rows @ matrix).mean())


def test_the_error_of_results_is_far_below_that_of_rounding_to_the_nearest() -> None:
    matrix, rows = DRAW.standard_normal((96, 40)).astype(np.float32), correlated(96, 600)
    careful, nearest = blocks_by_hessian(matrix, rows), best_blocks(matrix)
    assert lost(rows, matrix, careful.restored()) < 0.7 * lost(rows, matrix, nearest.restored())
    # The weights themselves are further away: errors are moved to where activations do not see them.
    assert np.abs(careful.restored() - matrix).mean() > np.abs(nearest.restored() - matrix).mean()
    assert (careful.values.shape, careful.size, careful.bits) == (nearest.values.shape, nearest.size, 4)


def test_activations_that_do_not_correlate_round_to_the_nearest() -> None:
    matrix = DRAW.standard_normal((32, 8)).astype(np.float32)
    careful = blocks_by_hessian(matrix, np.eye(32, dtype=np.float32))
    np.testing.assert_array_equal(careful.values, best_blocks(matrix).values)


def test_a_partial_block_and_channels_without_activation_are_rounded_too() -> None:
    matrix, rows = DRAW.standard_normal((40, 5)).astype(np.float32), correlated(40, 200)
    rows[:, 3] = 0
    blocks = blocks_by_hessian(matrix, rows)
    assert blocks.restored().shape == (40, 5)
    assert np.isfinite(blocks.restored()).all()
    assert lost(rows, matrix, blocks.restored()) < lost(rows, matrix, best_blocks(matrix).restored())


def test_columns_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, rows = DRAW.standard_normal((64, 7)).astype(np.float32), correlated(64, 300)
    together = blocks_by_hessian(matrix, rows)
    # Cut into three parts, the last of one column.
    monkeypatch.setattr(gptq, "COLUMNS", 3)
    cut = blocks_by_hessian(matrix, rows)
    np.testing.assert_allclose(cut.restored(), together.restored(), atol=1e-5)
