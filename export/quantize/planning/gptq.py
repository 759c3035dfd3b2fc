"""Rounding of 4-bit weights that minimises the error of results on calibration data, row by row of the matrix.

Each row's rounding error is passed on to the rows that are not rounded yet, as far as the activations correlate:
Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023.
"""

import numpy as np

from fatdeploy.export.quantize.integers import (
    Blocks,
    Floats,
    best_blocks,
    block_scales,
    in_blocks,
    packed_blocks,
)

# Added to the diagonal of the Hessian, as a share of its mean: channels that hardly vary would be divided by nothing.
DAMPING = 0.01
# Columns of results at once: the errors of a block of rows fit into the processor's cache.
COLUMNS = 4096


def blocks_by_hessian(matrix: Floats, rows: Floats) -> Blocks:
    """Return a matrix [K, N] in 4-bit blocks, rounded for activations [n, K] like ``rows``.

    The size and symmetry of the blocks are those that lose least when every number is rounded to the nearest.
    """
    nearest = best_blocks(matrix)
    symmetric, size = nearest.zeros is None, nearest.size
    factor = _inverse_factor(rows, len(matrix), size)
    parts = [
        _rounded(matrix[:, start : start + COLUMNS], factor, size, symmetric=symmetric)
        for start in range(0, matrix.shape[1], COLUMNS)
    ]
    values, scales, zeros = (np.concatenate(part) for part in zip(*parts, strict=True))
    return packed_blocks(values, scales, None if symmetric else zeros, len(matrix))


def _inverse_factor(rows: Floats, width: int, size: int) -> Floats:
    """Return the upper Cholesky factor of the inverse Hessian XᵀX, over whole blocks."""
    filled = width + -width % size
    hessian = np.zeros((filled, filled))
    hessian[:width, :width] = rows.T.astype(np.float64) @ rows
    mean = float(np.diag(hessian)[:width].mean()) or 1.0
    hessian[np.arange(filled), np.arange(filled)] += DAMPING * mean
    # Reversed twice: the factor of an inverse without computing the inverse first.
    lower = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
    inverse = np.linalg.inv(lower)
    factor: Floats = inverse.astype(np.float32)
    return factor


def _rounded(matrix: Floats, factor: Floats, size: int, *, symmetric: bool) -> tuple[np.ndarray, Floats, np.ndarray]:
    """Return values [N, blocks, size], scales and zeros of some columns of a matrix."""
    rest = np.array(in_blocks(matrix, size).reshape(matrix.shape[1], -1))  # [N, K]
    n_blocks = rest.shape[1] // size
    values = np.empty(rest.shape, np.uint8)
    scales = np.empty((len(rest), n_blocks), np.float32)
    zeros = np.empty((len(rest), n_blocks), np.uint8)
    for block in range(n_blocks):
        begin, end = block * size, (block + 1) * size
        scale, zero = block_scales(rest[:, begin:end], symmetric=symmetric)
        errors = np.empty((len(rest), size), np.float32)
        for place in range(begin, end):
            column = rest[:, place]
            level = np.clip(np.rint(column / scale) + zero, 0, 15)
            errors[:, place - begin] = (column - (level - zero) * scale) / factor[place, place]
            # Only the rest of the block at once; later blocks get the errors of all its rows together.
            rest[:, place:end] -= errors[:, place - begin, None] * factor[place, place:end]
            values[:, place] = level
        rest[:, end:] -= errors @ factor[begin:end, end:]
        scales[:, block], zeros[:, block] = scale, zero
    return values.reshape(len(rest), n_blocks, size), scales, zeros
