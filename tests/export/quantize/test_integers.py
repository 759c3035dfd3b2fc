"""Quantization by hand: matrices so small that their integers can be checked by eye."""

import numpy as np
import pytest

from fatdeploy.export.quantize.integers import (
    ValueRange,
    best_blocks,
    best_range,
    blocks_from_matrix,
    columns_from_matrix,
    range_from_ends,
    restored_row_blocks,
    restored_rows,
    smoothing_factors,
    wide_blocks,
)


def matrix(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_a_column_ends_at_the_end_of_its_range() -> None:
    columns = columns_from_matrix(matrix([6.3, -1], [-3.12, 0.4], [0, 0.25]), 7)
    np.testing.assert_array_equal(columns.values, [[63, -63], [-31, 25], [0, 16]])
    np.testing.assert_allclose(columns.scales, [0.1, 1 / 63], rtol=1e-6)


@pytest.mark.parametrize(("bits", "limit"), [(7, 63), (8, 127)])
def test_no_weight_exceeds_its_bits(bits: int, limit: int) -> None:
    drawn = np.random.default_rng(0).standard_normal((50, 20)).astype(np.float32)
    columns = columns_from_matrix(drawn, bits)
    assert np.abs(columns.values.astype(int)).max(0).tolist() == [limit] * 20
    assert np.abs(columns.restored() - drawn).max() <= columns.scales.max() / 2 * 1.0001


def test_a_column_of_zeros_stays_zero_and_a_zero_row_too() -> None:
    columns = columns_from_matrix(matrix([0, 2], [0, 0], [0, -1]), 8)
    np.testing.assert_array_equal(columns.values, [[0, 127], [0, 0], [0, -64]])
    assert columns.scales.tolist() == [1.0, np.float32(2 / 127)]
    np.testing.assert_array_equal(columns.restored()[:, 0], [0, 0, 0])


def test_a_constant_column_is_exact() -> None:
    columns = columns_from_matrix(np.full((9, 3), [0.7, -0.7, 1e-3], np.float32), 7)
    np.testing.assert_array_equal(columns.values, [[63, -63, 63]] * 9)
    np.testing.assert_allclose(columns.restored(), np.full((9, 3), [0.7, -0.7, 1e-3]), rtol=1e-6)


def test_an_outlier_costs_only_its_own_column() -> None:
    plain = np.random.default_rng(1).standard_normal((64, 2)).astype(np.float32)
    spoiled = plain.copy()
    spoiled[3, 0] = 100
    columns = columns_from_matrix(spoiled, 8)
    np.testing.assert_array_equal(columns.values[:, 1], columns_from_matrix(plain, 8).values[:, 1])
    assert columns.values[3, 0] == 127
    assert np.abs(np.delete(columns.values[:, 0], 3)).max() <= 4


def test_numbers_too_small_for_a_scale_are_zeros() -> None:
    columns = columns_from_matrix(matrix([1e-44], [-1e-44]), 7)
    assert columns.values.tolist() == [[0], [0]]


def test_a_symmetric_block_gives_its_larger_side_the_eighth_level() -> None:
    column = np.zeros((16, 1), np.float32)
    column[:3, 0] = [8, -7, 1]
    blocks = blocks_from_matrix(column, 16, symmetric=True)
    assert blocks.scales.tolist() == [[-1.0]]  # 8 is level 0 of a scale below zero
    assert blocks.values[0, 0, :2].tolist() == [0 | 15 << 4, 7 | 8 << 4]
    assert blocks.zeros is None
    np.testing.assert_array_equal(blocks.restored(), column)


def test_a_block_with_its_own_zero_point_is_finer_for_numbers_of_one_sign() -> None:
    column = np.linspace(0, 15, 16, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(blocks_from_matrix(column, 16, symmetric=False).restored(), column)
    assert np.abs(blocks_from_matrix(column, 16, symmetric=True).restored() - column).max() > 0.4
    blocks = best_blocks(column)
    assert (blocks.size, blocks.zeros is None) == (16, False)


def test_a_partial_block_is_padded_with_zeros_that_are_not_restored() -> None:
    drawn = np.random.default_rng(2).standard_normal((40, 3)).astype(np.float32)
    blocks = blocks_from_matrix(drawn, 32, symmetric=False)
    assert blocks.values.shape == (3, 2, 16)
    assert blocks.scales.shape == (3, 2)
    assert blocks.zeros is not None
    assert blocks.zeros.shape == (3, 1)
    assert blocks.restored().shape == (40, 3)
    assert np.abs(blocks.restored() - drawn).max() <= blocks.scales.max() / 2 * 1.0001


def test_a_block_of_zeros_stays_zero() -> None:
    drawn = np.zeros((32, 2), np.float32)
    drawn[:, 1] = 3
    for symmetric in (True, False):
        np.testing.assert_array_equal(blocks_from_matrix(drawn, 16, symmetric=symmetric).restored(), drawn)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 25.5, ValueRange(float(np.float32(0.1)), 0)),
        (-12.8, 12.7, ValueRange(float(np.float32(25.5 / 255)), 128)),
        (-25.5, -1, ValueRange(float(np.float32(0.1)), 255)),
        (0, 0, ValueRange(1.0, 0)),
    ],
)
def test_a_range_holds_both_ends_and_zero(low: float, high: float, expected: ValueRange) -> None:
    value_range = range_from_ends(low, high)
    assert (round(value_range.scale, 6), value_range.zero) == (round(expected.scale, 6), expected.zero)
    assert value_range.restored(np.zeros(1, np.float32)).tolist() == [0.0]


def test_a_range_cuts_off_a_lone_outlier_and_keeps_common_extremes() -> None:
    common = np.random.default_rng(3).uniform(-1, 1, 200_000).astype(np.float32)
    whole, noise = best_range(common)
    assert 254 < 2 / whole.scale < 256
    assert noise < 2e-5
    cut, _ = best_range(np.append(common, np.float32(2)))
    assert 2.2 < cut.scale * 255 < 2.9  # the end with the outlier is cut, the other one is not
    assert cut.zero == round(1 / cut.scale)


def test_a_scale_per_row_suits_rows_of_different_sizes() -> None:
    rows = np.random.default_rng(4).standard_normal((100, 64)).astype(np.float32)
    rows *= np.geomspace(1e-3, 1e3, 100, dtype=np.float32)[:, None]
    small = rows[:50]
    power = np.square(small).sum()
    assert np.square(restored_rows(small) - small).sum() < 1e-4 * power
    chosen, _ = best_range(rows)
    assert np.square(chosen.restored(small) - small).sum() > 0.9 * power
    np.testing.assert_array_equal(restored_rows(np.zeros((2, 4), np.float32)), np.zeros((2, 4)))


def test_a_scale_per_block_of_a_row_keeps_an_outlier_to_its_block() -> None:
    rows = np.random.default_rng(5).standard_normal((20, 72)).astype(np.float32)
    rows[:, 3] = 1000
    lost = np.abs(restored_row_blocks(rows, 32) - rows).mean(0)
    assert lost[:3].min() > 0.3  # beside the outlier nearly everything is lost
    assert lost[32:].max() < 0.02
    assert np.abs(restored_rows(rows) - rows).mean(0)[32:].min() > 0.3


def test_wide_blocks_have_a_scale_each_and_the_middle_is_zero() -> None:
    column = np.zeros((64, 1), np.float32)
    column[0], column[1], column[40] = 12.7, -6.35, 1.27
    blocks = wide_blocks(column)
    assert (blocks.bits, blocks.size, blocks.zeros) == (8, 32, None)
    np.testing.assert_allclose(blocks.scales, [[0.1, 0.01]], rtol=1e-6)
    assert blocks.values[0, 0, :3].tolist() == [255, 64, 128]
    assert blocks.values[0, 1, 8] == 255
    np.testing.assert_allclose(blocks.restored()[[0, 40]], [[12.7], [1.27]], rtol=1e-6)
    assert blocks.nbytes == 64 + 2 * 4


def test_wide_blocks_of_weights_that_were_bytes_lose_nothing() -> None:
    draw = np.random.default_rng(0)
    integers = draw.integers(-127, 128, (96, 5))
    integers[7] = 127  # each column's largest
    integers[32:64] //= 3
    matrix = (integers * draw.uniform(0.001, 0.1, 5)).astype(np.float32)
    blocks = wide_blocks(matrix)
    np.testing.assert_allclose(blocks.restored(), matrix, rtol=1e-6)
    np.testing.assert_array_equal(blocks.values[:, 1], 128 + integers[32:64].T)


def test_wide_blocks_of_other_weights_have_the_finest_scale() -> None:
    matrix = np.random.default_rng(1).standard_normal((64, 7)).astype(np.float32)
    matrix[32:] *= np.float32(1e-3)
    largest = np.abs(matrix.reshape(2, 32, 7)).max(1).T
    np.testing.assert_array_equal(wide_blocks(matrix).scales, largest / np.float32(127))


def test_wide_blocks_of_a_narrow_matrix_are_filled() -> None:
    drawn = np.random.default_rng(6).standard_normal((24, 3)).astype(np.float32)
    blocks = wide_blocks(drawn)
    assert blocks.values.shape == (3, 1, 32)
    assert blocks.restored().shape == (24, 3)
    assert np.abs(blocks.restored() - drawn).max() <= blocks.scales.max() / 2 * 1.0001


def test_factors_move_large_channels_into_the_weights() -> None:
    largest = np.array([16, 1, 4, 0], np.float32)
    weights = matrix([1, -1], [1, 0.5], [0.25, -1], [1, 1])
    np.testing.assert_allclose(smoothing_factors(largest, weights, 0.5), [2, 0.5, 1, 1])
    # All of it: every channel has the same size afterwards.
    factors = smoothing_factors(largest, weights, 1.0)
    np.testing.assert_allclose(largest[:3] / factors[:3], [4, 4, 4])
    huge = smoothing_factors(np.array([1e9, 1, 1], np.float32), np.ones((3, 2), np.float32), 1.0)
    assert huge.max() == np.float32(1e3)


def test_blocks_are_small_only_where_single_numbers_stand_out() -> None:
    drawn = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    assert best_blocks(drawn).size == 32
    # One number in 32 is a hundred times the others: every second block of 16 is free of it.
    drawn[::32] *= 100
    assert best_blocks(drawn).size == 16
