"""Rounding of 4-bit weights that minimises the error of results on calibration data, row by row of the matrix.

Each row's rounding error is passed on to the rows that are not rounded yet, as far as the activations correlate:
Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023. Then every
number is rounded once more with all others known, and every scale is fitted to its integers: Behdin et al.,
"QuantEase: Optimization-based Quantization for Language Models", 2023.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fatdeploy.export.quantize.integers import (
    Blocks,
    Floats,
    best_blocks,
    block_scales,
    packed_blocks,
)

# Added to the diagonal of the Hessian, as a share of its mean. Calibration has few rows for the width of some matrices:
# less would fit the rounding to those rows alone, and the error on others would grow.
DAMPING = 0.1
# Columns of results at once: the errors of a block of rows fit into the processor's cache.
COLUMNS = 4096
# Shares of a block's range to try: clipping its largest number may cost less than finer steps for all others gain.
CUTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
HIGHEST = 15

Hessian = NDArray[np.float64]


def hessian_of(rows: Floats) -> Hessian:
    """Return the mean product of activations [n, K] with themselves, [K, K]."""
    wide = rows.astype(np.float64)
    hessian: Hessian = wide.T @ wide / max(1, len(rows))
    return hessian


def blocks_by_hessian(matrix: Floats, hessian: Hessian, layout: Blocks | None = None) -> Blocks:
    """Return a matrix [K, N] in 4-bit blocks, rounded for the quadratic error that a Hessian [K, K] describes.

    The size and symmetry of the blocks are those of ``layout``; without it, those that lose least when every number is
    rounded to the nearest.
    """
    layout = best_blocks(matrix) if layout is None else layout
    rounding = _rounding(hessian, layout)
    parts = [
        rounding.integers(matrix[:, start : start + COLUMNS]) for start in range(0, max(1, matrix.shape[1]), COLUMNS)
    ]
    values, scales, zeros = (np.concatenate(part) for part in zip(*parts, strict=True))
    return packed_blocks(values, scales, None if rounding.symmetric else zeros, len(matrix))


def _rounding(hessian: Hessian, layout: Blocks) -> "_Rounding":
    """Return the damped Hessian over whole blocks, and the upper Cholesky factor of its inverse."""
    size, width = layout.size, len(hessian)
    filled = width + -width % size
    damped = np.zeros((filled, filled))
    damped[:width, :width] = hessian
    damped[np.arange(filled), np.arange(filled)] += DAMPING * (float(np.diag(hessian).mean()) or 1.0)
    # Reversed twice: the factor of an inverse without computing the inverse first.
    lower = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    factor = np.linalg.inv(lower).astype(np.float32)
    return _Rounding(damped.astype(np.float32), factor, size, symmetric=layout.zeros is None)


@dataclass(frozen=True, eq=False)
class _Rounding:
    hessian: Floats
    factor: Floats
    size: int
    symmetric: bool

    def integers(self, matrix: Floats) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
        """Return values [n, blocks, size], scales and zeros [n, blocks] of some columns [K, n]."""
        width, count = matrix.shape
        whole: Floats = np.zeros((len(self.hessian), count), np.float32)
        whole[:width] = matrix
        n_blocks = len(whole) // self.size
        levels = np.empty_like(whole)
        scales, zeros = (np.empty((n_blocks, count), np.float32) for _ in range(2))
        self._round_forward(whole, levels, scales, zeros)
        self._round_again(whole, levels, scales, zeros)
        values = (levels + np.repeat(zeros, self.size, 0)).astype(np.uint8)
        return (
            np.ascontiguousarray(values.T).reshape(count, n_blocks, self.size),
            np.ascontiguousarray(scales.T),
            np.ascontiguousarray(zeros.T.astype(np.uint8)),
        )

    def _round_forward(self, matrix: Floats, levels: Floats, scales: Floats, zeros: Floats) -> None:
        """Round row by row; what a row loses is passed on to the rows after it."""
        rest, factor = matrix.copy(), self.factor
        for block in range(len(scales)):
            begin, end = block * self.size, (block + 1) * self.size
            scale, zero = scales[block], zeros[block] = self._scales(rest[begin:end], np.diag(factor)[begin:end])
            errors = np.empty_like(rest[begin:end])
            for place in range(begin, end):
                levels[place] = np.clip(np.rint(rest[place] / scale), -zero, HIGHEST - zero)
                error = errors[place - begin] = (rest[place] - levels[place] * scale) / factor[place, place]
                # Only the rest of the block at once; later blocks get the errors of all its rows together.
                rest[place + 1 : end] -= factor[place, place + 1 : end, None] * error
            rest[end:] -= factor[begin:end, end:].T @ errors

    def _round_again(self, matrix: Floats, levels: Floats, scales: Floats, zeros: Floats) -> None:
        """Fit the scale of each block, and round each number to what is best with all others as they are."""
        errors = matrix - levels * np.repeat(scales, self.size, 0)
        for block in range(len(scales)):
            part = slice(block * self.size, (block + 1) * self.size)
            own, numbers = self.hessian[part, part], levels[part]
            slopes = self.hessian[part] @ errors
            seen = own @ numbers
            change = _ratio((numbers * slopes).sum(0), (numbers * seen).sum(0))
            scale, zero = scales[block] + change, zeros[block]
            # A scale that would change its sign or vanish belongs to a block of noise: it stays.
            fits = scale * scales[block] > 0
            scale, change = np.where(fits, scale, scales[block]), np.where(fits, change, 0)
            slopes -= seen * change
            for place in range(self.size):
                best = numbers[place] + slopes[place] / (own[place, place] * scale)
                level = np.clip(np.rint(best), -zero, HIGHEST - zero)
                slopes[place + 1 :] -= own[place, place + 1 :, None] * ((level - numbers[place]) * scale)
                numbers[place] = level
            errors[part] = matrix[part] - numbers * scale
            scales[block] = scale

    def _scales(self, rows: Floats, factors: Floats) -> tuple[Floats, Floats]:
        """Return the scale and the zero [n] of a block [size, n] that lose least, each row weighed as it is here."""
        blocks, weights = np.ascontiguousarray(rows.T), 1 / np.square(factors)
        least = np.full(len(blocks), np.inf, np.float32)
        best, middle = np.ones_like(least), np.zeros_like(least)
        for cut in CUTS:
            scale, zero = block_scales(blocks * np.float32(cut), symmetric=self.symmetric)
            low = -zero.astype(np.float32)[:, None]
            levels = np.clip(np.rint(blocks / scale[:, None]), low, HIGHEST + low)
            lost = np.square(levels * scale[:, None] - blocks) @ weights
            better = lost < least
            least = np.where(better, lost, least)
            best, middle = np.where(better, scale, best), np.where(better, -low[:, 0], middle)
        return best, middle


def _ratio(above: Floats, below: Floats) -> Floats:
    """Return a quotient, 0 where it has no value."""
    ratio: Floats = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return ratio
