"""Rounding with care: less error on activations like those it was made for, and never another layout."""

import numpy as np
import pytest

from fatdeploy.export.quantize.integers import best_blocks
from fatdeploy.export.quantize.planning import gptq
from fatdeploy.export.quantize.planning.gptq import blocks_by_hessian, hessian_of

DRAW = np.random.default_rng(0)


def correlated(width: int, count: int) -> np.ndarray:
    mixing = DRAW.standard_normal((width, width)) * 0.2 + np.eye(width)
    return (DRAW.standard_normal((count, width)) @ mixing).astype(np.float32)


def lost(rows: np.ndarray, matrix: np.ndarray, restored: np.ndarray) -> float:
    return float(np.square(rows @ restored - rows @ matrix).mean())


def test_the_error_of_results_is_far_below_that_of_rounding_to_the_nearest() -> None:
    matrix, rows = DRAW.standard_normal((96, 40)).astype(np.float32), correlated(96, 600)
    careful, nearest = blocks_by_hessian(matrix, hessian_of(rows)), best_blocks(matrix)
    assert lost(rows, matrix, careful.restored()) < 0.7 * lost(rows, matrix, nearest.restored())
    # The weights themselves are further away: errors are moved to where activations do not see them.
    assert np.abs(careful.restored() - matrix).mean() > np.abs(nearest.restored() - matrix).mean()
    assert (careful.values.shape, careful.size, careful.bits) == (nearest.values.shape, nearest.size, 4)


def test_without_correlation_each_number_is_the_nearest_of_its_block_and_scales_lose_less() -> None:
    matrix = DRAW.standard_normal((32, 8)).astype(np.float32)
    careful, nearest = blocks_by_hessian(matrix, np.eye(32)), best_blocks(matrix)
    lost_squares = [np.square(blocks.restored() - matrix).sum(0) for blocks in (careful, nearest)]
    # A clipped and fitted scale loses less in every column.
    assert (lost_squares[0] <= lost_squares[1]).all()
    assert lost_squares[0].sum() < 0.95 * lost_squares[1].sum()
    for column in range(8):
        grid = (np.arange(16) - (8 if careful.zeros is None else careful.zeros[column, 0] & 15)) * careful.scales[
            column
        ]
        nearest_numbers = grid[np.abs(matrix[:, column, None] - grid).argmin(1)]
        np.testing.assert_allclose(careful.restored()[:, column], nearest_numbers, atol=1e-6)


def test_rounding_again_lowers_the_error_that_the_first_pass_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, rows = DRAW.standard_normal((96, 40)).astype(np.float32), correlated(96, 600)
    both = lost(rows, matrix, blocks_by_hessian(matrix, hessian_of(rows)).restored())
    monkeypatch.setattr(gptq._Rounding, "_round_again", lambda *_: None)
    assert both < 0.9 * lost(rows, matrix, blocks_by_hessian(matrix, hessian_of(rows)).restored())


def test_a_column_of_zeros_and_one_of_equal_numbers_stay_what_they_are() -> None:
    matrix = np.stack([np.zeros(64), np.full(64, 0.7)], 1).astype(np.float32)
    np.testing.assert_allclose(blocks_by_hessian(matrix, np.eye(64)).restored(), matrix, atol=1e-6)


def test_a_partial_block_and_channels_without_activation_are_rounded_too() -> None:
    matrix, rows = DRAW.standard_normal((40, 5)).astype(np.float32), correlated(40, 200)
    rows[:, 3] = 0
    blocks = blocks_by_hessian(matrix, hessian_of(rows))
    assert blocks.restored().shape == (40, 5)
    assert np.isfinite(blocks.restored()).all()
    assert lost(rows, matrix, blocks.restored()) < lost(rows, matrix, best_blocks(matrix).restored())


def test_columns_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, rows = DRAW.standard_normal((64, 7)).astype(np.float32), correlated(64, 300)
    together = blocks_by_hessian(matrix, hessian_of(rows))
    # Cut into three parts, the last of one column.
    monkeypatch.setattr(gptq, "COLUMNS", 3)
    cut = blocks_by_hessian(matrix, hessian_of(rows))
    np.testing.assert_allclose(cut.restored(), together.restored(), atol=1e-5)
