"""Weights and activations as small integers: only the arithmetic of quantization, in numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
WeightBits = Literal[7, 8]
BlockBits = Literal[4, 8]

# Activations are unsigned bytes: the kernels that multiply them with signed weights are the fastest on every CPU.
LEVELS = 255
# Shares of the largest activation to try as the end of the range: clipping outliers may cost less than finer steps for
# all other values gain.
CUTS = tuple(step / 20 for step in range(20, 4, -1))
# How many values of an activation ranges are tried on.
MOST_TRIED = 2**18
# Larger blocks are at most a tenth faster, but their kernel sums a row of a batch in another order than the row alone.
# The difference is 2e-6, and rounding the next activations turns it into 4e-2 (x86 with AVX-512, onnxruntime 1.31).
BLOCK_SIZES = (16, 32)
# Factors of channels outside of these limits gain nothing, and products of tiny and huge numbers lose bits.
SMOOTHING_LIMITS = (1e-3, 1e3)
# For 4-bit blocks: a costlier form is chosen only if its squared error is below this share of the cheaper form's. Zero
# points cost next to nothing. Blocks of 16 instead of 32 take two fifths more time per step (batch 1 of
# transformer-base) and a fifth more bytes, and lose about a quarter less wherever no single weight stands out.
WORTH_ZEROS, WORTH_SMALLER = 0.9, 0.6


@dataclass(frozen=True)
class Columns:
    """A matrix [K, N] as signed bytes with one scale per column."""

    values: NDArray[np.int8]
    scales: Floats  # [N]

    def restored(self) -> Floats:
        """Return the matrix that the integers stand for."""
        matrix: Floats = self.values.astype(np.float32) * self.scales
        return matrix

    @property
    def nbytes(self) -> int:
        """Their size when they are stored."""
        return self.values.nbytes + self.scales.nbytes


def columns_from_matrix(matrix: Floats, bits: WeightBits) -> Columns:
    """Return a matrix [K, N] as integers, symmetric around zero, with each column's largest at the end of the range.

    Seven bits are for kernels that add two products in 16 bits: 255·63·2 fits there, 255·127·2 does not.
    """
    limit = 2 ** (bits - 1) - 1
    largest = np.abs(matrix).max(0)
    # A column of zeros gets scale 1; so do numbers too small for a scale above 0, and become zeros.
    scales = np.where(largest < np.finfo(np.float32).tiny * limit, 1, largest / limit).astype(np.float32)
    values = np.clip(np.rint(matrix / scales), -limit, limit).astype(np.int8)
    return Columns(values, scales)


@dataclass(frozen=True)
class Blocks:
    """A matrix [K, N] as integers of 4 or 8 bits whose blocks of one column share a scale.

    Blocks that are not symmetric also share a zero; 8-bit blocks are always symmetric.
    """

    values: NDArray[np.uint8]  # [N, K / block, block]; of 4 bits two per byte, the first in the low half
    scales: Floats  # [N, K / block]
    zeros: NDArray[np.uint8] | None  # [N, ceil(K / block / 2)], two per byte; None means the middle
    size: int
    n_rows: int  # K before padding to whole blocks
    bits: BlockBits = 4

    def restored(self) -> Floats:
        """Return the matrix that the integers stand for."""
        whole = _unpacked(self.values) if self.bits == 4 else self.values  # [N, blocks, size]
        zeros: Any = 2 ** (self.bits - 1)
        if self.zeros is not None:
            zeros = _unpacked(self.zeros)[:, : self.scales.shape[1], None]
        matrix = (whole.astype(np.float32) - zeros) * self.scales[..., None]
        return np.ascontiguousarray(matrix.reshape(len(matrix), -1)[:, : self.n_rows].T)

    def columns(self, which: slice) -> "Blocks":
        """Return some columns of the matrix."""
        zeros = None if self.zeros is None else self.zeros[which]
        return replace(self, values=self.values[which], scales=self.scales[which], zeros=zeros)

    @property
    def nbytes(self) -> int:
        """Their size when they are stored."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def joined_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Return the columns of several matrices in blocks of one layout as one matrix."""
    first = parts[0]
    zeros = None if first.zeros is None else np.concatenate([part.zeros for part in parts if part.zeros is not None])
    values, scales = (np.concatenate([getattr(part, name) for part in parts]) for name in ("values", "scales"))
    return replace(first, values=values, scales=scales, zeros=zeros)


def blocks_from_matrix(matrix: Floats, size: int, *, symmetric: bool) -> Blocks:
    """Return a matrix [K, N] in 4-bit blocks of ``size`` rows; missing rows of the last block are zeros."""
    blocks = in_blocks(matrix, size)
    scales, zeros = block_scales(blocks, symmetric=symmetric)
    values: NDArray[np.uint8] = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint8)
    return packed_blocks(values, scales, None if symmetric else zeros, len(matrix))


def in_blocks(matrix: Floats, size: int) -> Floats:
    """Return a matrix [K, N] as [N, K / size, size], filled with zeros."""
    blocks: Floats = np.pad(matrix, ((0, -len(matrix) % size), (0, 0))).T.reshape(matrix.shape[1], -1, size)
    return blocks


def block_scales(blocks: Floats, *, symmetric: bool) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the scale and the zero of every block [..., size] of 4-bit numbers."""
    if symmetric:
        scales = _signed_largest(blocks) / np.float32(-8)  # the larger side has one more level
        zeros = np.full(scales.shape, 8, np.uint8)
    else:
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        scales = (high - low) / np.float32(15)
        zeros = np.rint(-low / np.where(scales == 0, 1, scales)).astype(np.uint8)
    return np.where(np.abs(scales) < np.finfo(np.float32).tiny, np.float32(1), scales), zeros


def packed_blocks(values: NDArray[np.uint8], scales: Floats, zeros: NDArray[np.uint8] | None, n_rows: int) -> Blocks:
    """Return 4-bit numbers [N, blocks, size] as they are stored; without zeros they are symmetric."""
    return Blocks(_packed(values), scales, None if zeros is None else _packed(zeros), values.shape[-1], n_rows)


def wide_blocks(matrix: Floats) -> Blocks:
    """Return a matrix [K, N] in symmetric 8-bit blocks.

    A block has a scale of its own, or that of its column if it loses less so: weights that were bytes with one scale
    per column before they became floats lose nothing.
    """
    size = min(size for size in BLOCK_SIZES if size >= min(len(matrix), max(BLOCK_SIZES)))
    blocks = in_blocks(matrix, size)
    own = np.abs(blocks).max(-1) / np.float32(127)
    own = np.where(own < np.finfo(np.float32).tiny, np.float32(1), own)
    of_column = np.repeat(own.max(-1, keepdims=True), own.shape[1], 1)
    scales = np.where(_lost(blocks, of_column) < _lost(blocks, own), of_column, own)
    return Blocks((_wide_values(blocks, scales) + 128).astype(np.uint8), scales, None, size, len(matrix), bits=8)


def _wide_values(blocks: Floats, scales: Floats) -> Floats:
    """Return the signed integers of blocks [..., size] with these scales."""
    values: Floats = np.clip(np.rint(blocks / scales[..., None]), -127, 127)
    return values


def _lost(blocks: Floats, scales: Floats) -> Floats:
    """Return the squared error of each block [..., size] with these scales."""
    lost: Floats = np.square(_wide_values(blocks, scales) * scales[..., None] - blocks).sum(-1)
    return lost


def best_blocks(matrix: Floats) -> Blocks:
    """Return a matrix in blocks of the size and symmetry that lose least, or cheaper ones where the gain is small."""
    sizes = [size for size in BLOCK_SIZES if size <= max(len(matrix), BLOCK_SIZES[0])]
    best, *smaller = (_best_symmetry(matrix, size) for size in reversed(sizes))
    for candidate in smaller:
        best = _cheaper(best, candidate, WORTH_SMALLER)
    return best[0]


def _best_symmetry(matrix: Floats, size: int) -> tuple[Blocks, float]:
    plain, with_zeros = (_tried(matrix, size, symmetric=symmetric) for symmetric in (True, False))
    return _cheaper(plain, with_zeros, WORTH_ZEROS)


def _tried(matrix: Floats, size: int, *, symmetric: bool) -> tuple[Blocks, float]:
    """Return blocks and their squared error."""
    blocks = blocks_from_matrix(matrix, size, symmetric=symmetric)
    return blocks, float(np.square(blocks.restored() - matrix).sum())


def _cheaper(cheap: tuple[Blocks, float], dear: tuple[Blocks, float], worth: float) -> tuple[Blocks, float]:
    return dear if dear[1] < worth * cheap[1] else cheap


def _signed_largest(blocks: Floats) -> Floats:
    """Return the number with the largest absolute value of each block, with its sign."""
    place = np.abs(blocks).argmax(-1)[..., None]
    largest: Floats = np.take_along_axis(blocks, place, -1)[..., 0]
    return largest


def _packed(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 4-bit numbers packed two per byte along the last axis."""
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], -1)
    return (values[..., ::2] | values[..., 1::2] << 4).astype(np.uint8)


def _unpacked(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)


@dataclass(frozen=True)
class ValueRange:
    """How activations become unsigned bytes: x / scale + zero, rounded."""

    scale: float
    zero: int

    def restored(self, values: Floats) -> Floats:
        """Return numbers as they are after a round trip."""
        scale = np.float32(self.scale)
        levels = np.clip(np.rint(values / scale) + self.zero, 0, LEVELS)
        restored: Floats = ((levels - self.zero) * scale).astype(np.float32)
        return restored


def range_from_ends(low: float, high: float) -> ValueRange:
    """Return the range that holds both numbers and zero. Zero stays exact: padding and ReLU produce it often."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32((high - low) / LEVELS))
    if scale < np.finfo(np.float32).tiny:
        return ValueRange(1.0, 0)
    return ValueRange(scale, int(np.clip(np.rint(-low / scale), 0, LEVELS)))


def best_range(values: Floats) -> tuple[ValueRange, float]:
    """Return the range that loses least for these activations, and its noise as a share of their power."""
    ends = float(values.min()), float(values.max())
    # Both ends are always included: a range chosen without them might clip what matters.
    sample = np.append(values.ravel()[:: 1 + values.size // MOST_TRIED], np.array(ends, np.float32))
    power = float(np.square(sample, dtype=np.float64).sum())
    best, least = (1.0, 1.0), np.inf
    for cuts in [(1.0, cut) for cut in CUTS] + [(cut, None) for cut in CUTS]:
        low, high = cuts[0], best[1] if cuts[1] is None else cuts[1]
        candidate = range_from_ends(low * ends[0], high * ends[1])
        lost = float(np.square(candidate.restored(sample) - sample, dtype=np.float64).sum())
        if lost < least:
            best, least = (low, high), lost
    return range_from_ends(best[0] * ends[0], best[1] * ends[1]), least / power if power else 0.0


def restored_rows(rows: Floats) -> Floats:
    """Return activations [..., K] after a round trip through signed bytes with one scale per row."""
    scales = np.maximum(np.abs(rows).max(-1, keepdims=True), np.finfo(np.float32).tiny * 127) / np.float32(127)
    restored: Floats = np.rint(rows / scales) * scales
    return restored


def restored_row_blocks(rows: Floats, size: int) -> Floats:
    """Return activations [n, K] after a round trip through signed bytes with one scale per block of a row."""
    n_rows, width = rows.shape
    blocks = np.pad(rows, ((0, 0), (0, -width % size))).reshape(n_rows, -1, size)
    return np.ascontiguousarray(restored_rows(blocks).reshape(n_rows, -1)[:, :width])


def smoothing_factors(largest: Floats, matrix: Floats, alpha: float) -> Floats:
    """Return the factor [K] that each channel of activations is divided by and its row of the matrix multiplied with.

    ``largest`` are the largest magnitudes of the channels. A large ``alpha`` moves more of them into the weights.
    """
    weights = np.abs(matrix).max(1)
    usable = (largest > np.finfo(np.float32).tiny) & (weights > np.finfo(np.float32).tiny)
    factors = np.ones(len(matrix))
    factors[usable] = largest[usable].astype(np.float64) ** alpha / weights[usable].astype(np.float64) ** (1 - alpha)
    if usable.any():
        factors[usable] /= np.median(factors[usable])
    limited: Floats = np.clip(factors, *SMOOTHING_LIMITS).astype(np.float32)
    return limited
