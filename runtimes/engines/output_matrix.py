"""Rows of a bundle's output matrix and its bias, read from the weights file without touching the rest of it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleError, ConfigError
from fatdeploy.manifest import OUTPUT_MATRIX_SINCE, WEIGHTS, OutputMatrix
from fatdeploy.runtimes.engines.checks import check_ids
from fatdeploy.runtimes.engines.protocol import Floats, Ids

# numpy has no bfloat16, which is the upper half of a float32.
BITS = "uint16"


def stored_output_rows(bundle: Bundle, ids: Ids) -> Floats | None:
    """Return the rows of a bundle's output matrix that belong to ids, [n, M]; None if it has no matrix."""
    check_ids(bundle.spec, ids)
    stored = stored_matrix(bundle)
    return None if stored is None else stored.rows(ids)


def stored_output_bias(bundle: Bundle, ids: Ids) -> Floats | None:
    """Return what a bundle adds to the products with the rows of ids, [n]; None if it adds nothing."""
    check_ids(bundle.spec, ids)
    matrix = bundle.manifest.output_matrix
    return None if matrix is None else StoredMatrix(bundle, matrix, 1).bias(ids)


def stored_matrix(bundle: Bundle) -> "StoredMatrix | None":
    """Return a bundle's output matrix; None if it has none."""
    manifest = bundle.manifest
    if manifest.format < OUTPUT_MATRIX_SINCE:
        raise ConfigError(
            f"{bundle.path} was written before bundles recorded where their output matrix is: export it again with "
            "this version: fatdeploy export SOURCE --out DIR --force"
        )
    if manifest.output_matrix is None or bundle.spec.width is None:
        return None
    return StoredMatrix(bundle, manifest.output_matrix, bundle.spec.width)


class StoredMatrix:
    """A bundle's output matrix in its weights file, which is opened once however often rows are read."""

    def __init__(self, bundle: Bundle, matrix: OutputMatrix, width: int) -> None:
        self._bundle, self._matrix, self._width = bundle, matrix, width
        self._n_rows = bundle.spec.vocab_size
        self._arrays: dict[tuple[int, str, tuple[int, int]], NDArray[Any]] = {}

    @property
    def has_byte_rows(self) -> bool:
        """Whether a row is bytes with one scale."""
        return self._matrix.dtype == "int8" and self._matrix.block_size is None

    @property
    def activation(self) -> tuple[float, int] | None:
        """The scale and the zero of hidden states as bytes; None if each row has a scale of its own."""
        return self._matrix.activation

    def rows(self, ids: Ids) -> Floats:
        """Return rows [n, M] as float32, the type of hidden states."""
        if self._matrix.scales is None:
            return self._floats(ids)
        rows = self._columns(ids) if self.has_byte_rows else self._blocks(ids)
        smoothing = self.smoothing
        return rows if smoothing is None else rows / smoothing

    def byte_rows(self, ids: Ids) -> tuple[NDArray[np.int8], Floats]:
        """Return rows [n, M] of bytes, and their scales [n]."""
        scales = self._mapped(self._matrix.scales or 0, "float32", (self._n_rows, 1))[ids, 0]
        return self._mapped(self._matrix.offset, "int8", (self._n_rows, self._width))[ids], scales

    @property
    def smoothing(self) -> Floats | None:
        """What hidden states are divided by before they are multiplied with bytes, [M]; None if they are not."""
        if self._matrix.smoothing is None:
            return None
        smoothing: Floats = self._mapped(self._matrix.smoothing, "float32", (1, self._width))[0]
        return smoothing

    def bias(self, ids: Ids) -> Floats | None:
        """Return what is added to the products with rows, [n]; None if nothing is."""
        if self._matrix.bias is None:
            return None
        bias: Floats = self._mapped(self._matrix.bias, "float32", (self._n_rows, 1))[ids, 0]
        return bias

    def _floats(self, ids: Ids) -> Floats:
        matrix = self._matrix
        shape = (self._width, self._n_rows) if matrix.transposed else (self._n_rows, self._width)
        stored = self._mapped(matrix.offset, BITS if matrix.dtype == "bfloat16" else matrix.dtype, shape)
        rows = (stored.T if matrix.transposed else stored)[ids]
        if matrix.dtype == "bfloat16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(rows, np.float32)

    def _columns(self, ids: Ids) -> Floats:
        """Return dequantized rows of bytes with one scale each."""
        values, scales = self.byte_rows(ids)
        rows: Floats = values * scales[:, None]
        return rows

    def _blocks(self, ids: Ids) -> Floats:
        """Return dequantized rows of blocks of 8-bit or 4-bit numbers; the first may have 8 where others have 4."""
        wide, n_wide = self._matrix.wide, self._n_wide
        if wide is None:
            return self._restored(_places(self._matrix, self._n_rows), ids)
        rows = np.empty((len(ids), self._width), np.float32)
        first = ids < n_wide
        rows[first] = self._restored(_Places(n_wide, 8, wide.offset, wide.scales, None, wide.block_size), ids[first])
        rows[~first] = self._restored(_places(self._matrix, self._n_rows - n_wide), ids[~first] - n_wide)
        return rows

    @property
    def _n_wide(self) -> int:
        """How many of the first rows have 8 bits where the others have 4."""
        n_wide = 0 if self._matrix.wide is None else self._matrix.wide.rows
        if n_wide >= self._n_rows:
            raise BundleError(
                f"{self._bundle.path}: the output matrix has {self._n_rows} rows, and the manifest says that the first "
                f"{n_wide} are wide and others follow; export the bundle again"
            )
        return n_wide

    def _restored(self, places: "_Places", ids: Ids) -> Floats:
        size = places.block_size
        n_scales = -(-self._width // size)
        scales = self._mapped(places.scales, "float32", (places.rows, n_scales))[ids]
        values = self._mapped(places.offset, "uint8", (places.rows, n_scales * size * places.bits // 8))[ids]
        if places.bits == 4:
            values = _unpacked(values)
        zeros: Any = 2 ** (places.bits - 1)
        if places.zeros is not None:
            shape = (places.rows, -(-n_scales // 2))
            zeros = _unpacked(self._mapped(places.zeros, "uint8", shape)[ids])[:, :n_scales, None]
        numbers = (values.reshape(len(ids), n_scales, size).astype(np.float32) - zeros) * scales[..., None]
        return np.ascontiguousarray(numbers.reshape(len(ids), n_scales * size)[:, : self._width])

    def _mapped(self, offset: int, dtype: str, shape: tuple[int, int]) -> NDArray[Any]:
        """Return a view of an array in the weights file."""
        key = offset, dtype, shape
        if key in self._arrays:
            return self._arrays[key]
        bundle = self._bundle
        end, size = offset + math.prod(shape) * np.dtype(dtype).itemsize, bundle.manifest.files[WEIGHTS].size
        if end > size:
            raise BundleError(
                f"{bundle.path}: the output matrix must end within {size} bytes of {WEIGHTS}, "
                f"the manifest says {end}; export the bundle again"
            )
        self._arrays[key] = bundle.weights[offset:end].view(dtype).reshape(shape)
        return self._arrays[key]


@dataclass(frozen=True)
class _Places:
    """Where rows of blocks are in the weights file, and how many bits a number has."""

    rows: int
    bits: int
    offset: int
    scales: int
    zeros: int | None
    block_size: int


def _places(matrix: OutputMatrix, rows: int) -> _Places:
    assert matrix.scales is not None and matrix.block_size is not None  # noqa: S101, PT018 - the record checks it
    bits = 8 if matrix.dtype == "int8" else 4
    return _Places(rows, bits, matrix.offset, matrix.scales, matrix.zeros, matrix.block_size)


def _unpacked(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 4-bit numbers that are stored two per byte, the first in the low half."""
    return np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], 2 * values.shape[-1])
