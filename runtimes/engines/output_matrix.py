"""Rows of a bundle's output matrix and its bias, read from the weights file without touching the rest of it."""

import math
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
    manifest = bundle.manifest
    if manifest.format < OUTPUT_MATRIX_SINCE:
        raise ConfigError(
            f"{bundle.path} was written before bundles recorded where their output matrix is: export it again with "
            "this version: fatdeploy export SOURCE --out DIR --force"
        )
    matrix, width = manifest.output_matrix, bundle.spec.width
    if matrix is None or width is None:
        return None
    return _integers(bundle, matrix, ids, width) if matrix.scales is not None else _floats(bundle, matrix, ids, width)


def stored_output_bias(bundle: Bundle, ids: Ids) -> Floats | None:
    """Return what a bundle adds to the products with the rows of ids, [n]; None if it adds nothing."""
    check_ids(bundle.spec, ids)
    matrix = bundle.manifest.output_matrix
    if matrix is None or matrix.bias is None:
        return None
    bias: Floats = _mapped(bundle, matrix.bias, "float32", (bundle.spec.vocab_size, 1))[ids, 0]
    return bias


def _floats(bundle: Bundle, matrix: OutputMatrix, ids: Ids, width: int) -> Floats:
    """Return rows of floats of any size as float32, the type of hidden states."""
    shape = (width, bundle.spec.vocab_size) if matrix.transposed else (bundle.spec.vocab_size, width)
    stored = _mapped(bundle, matrix.offset, BITS if matrix.dtype == "bfloat16" else matrix.dtype, shape)
    rows = (stored.T if matrix.transposed else stored)[ids]
    if matrix.dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(rows, np.float32)


def _integers(bundle: Bundle, matrix: OutputMatrix, ids: Ids, width: int) -> Floats:
    """Return dequantized rows of integers."""
    rows = _columns(bundle, matrix, ids, width) if matrix.block_size is None else _blocks(bundle, matrix, ids, width)
    if matrix.smoothing is None:
        return rows
    unsmoothed: Floats = rows / _mapped(bundle, matrix.smoothing, "float32", (1, width))
    return unsmoothed


def _columns(bundle: Bundle, matrix: OutputMatrix, ids: Ids, width: int) -> Floats:
    n_rows = bundle.spec.vocab_size
    scales = _mapped(bundle, matrix.scales or 0, "float32", (n_rows, 1))[ids]
    rows: Floats = _mapped(bundle, matrix.offset, "int8", (n_rows, width))[ids] * scales
    return rows


def _blocks(bundle: Bundle, matrix: OutputMatrix, ids: Ids, width: int) -> Floats:
    n_rows, size = bundle.spec.vocab_size, matrix.block_size or 1
    n_scales = -(-width // size)
    scales = _mapped(bundle, matrix.scales or 0, "float32", (n_rows, n_scales))[ids]
    zeros: Any = 128
    if matrix.dtype == "int8":
        values = _mapped(bundle, matrix.offset, "uint8", (n_rows, n_scales * size))[ids]
    else:
        values = _unpacked(_mapped(bundle, matrix.offset, "uint8", (n_rows, n_scales * size // 2))[ids])
        zeros = 8
    if matrix.zeros is not None:
        shape = (n_rows, -(-n_scales // 2))
        zeros = _unpacked(_mapped(bundle, matrix.zeros, "uint8", shape)[ids])[:, :n_scales, None]
    numbers = (values.reshape(len(ids), n_scales, size).astype(np.float32) - zeros) * scales[..., None]
    return np.ascontiguousarray(numbers.reshape(len(ids), -1)[:, :width])


def _unpacked(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 4-bit numbers that are stored two per byte, the first in the low half."""
    return np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)


def _mapped(bundle: Bundle, offset: int, dtype: str, shape: tuple[int, int]) -> NDArray[Any]:
    """Return a view of an array in the weights file."""
    end, size = offset + math.prod(shape) * np.dtype(dtype).itemsize, bundle.manifest.files[WEIGHTS].size
    if end > size:
        raise BundleError(
            f"{bundle.path}: the output matrix must end within {size} bytes of {WEIGHTS}, "
            f"the manifest says {end}; export the bundle again"
        )
    # As a plain array: rows picked from a memmap would be memmaps too, and keep the file open as long as they live.
    return np.asarray(np.memmap(bundle.file(WEIGHTS), dtype, "r", offset, shape))
