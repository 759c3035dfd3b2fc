"""The output matrix of a bundle: rows of it are read from the weights file, the rest of which is never touched."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleError, ConfigError
from fatdeploy.manifest import OUTPUT_MATRIX_SINCE, WEIGHTS, OutputMatrix
from fatdeploy.runtimes.engines.checks import check_ids
from fatdeploy.runtimes.engines.protocol import Floats, Ids

# numpy does not know a bfloat16 by name: it is the first half of a float32.
BITS = "uint16"


def stored_output_rows(bundle: Bundle, ids: Ids) -> Floats | None:
    """Return the rows of a bundle's output matrix that belong to ids, [n, M]; None if it has none."""
    check_ids(bundle.spec, ids)
    manifest = bundle.manifest
    if manifest.format < OUTPUT_MATRIX_SINCE:
        raise ConfigError(
            f"{bundle.path} was written before bundles said where their output matrix stands: export it again with "
            "this version: fatdeploy export SOURCE --out DIR --force"
        )
    found, width = manifest.output_matrix, bundle.spec.width
    if found is None or width is None:
        return None
    return _integers(bundle, found, ids, width) if found.scales is not None else _floats(bundle, found, ids, width)


def _floats(bundle: Bundle, found: OutputMatrix, ids: Ids, width: int) -> Floats:
    """Return rows of numbers of any type as float32: what a hidden state is multiplied with."""
    shape = (width, bundle.spec.vocab_size) if found.transposed else (bundle.spec.vocab_size, width)
    stored = _mapped(bundle, found.offset, BITS if found.dtype == "bfloat16" else found.dtype, shape)
    rows = (stored.T if found.transposed else stored)[ids]
    if found.dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(rows, np.float32)


def _integers(bundle: Bundle, found: OutputMatrix, ids: Ids, width: int) -> Floats:
    """Return the numbers that rows of integers stand for."""
    n_rows = bundle.spec.vocab_size
    n_scales = 1 if found.block_size is None else -(-width // found.block_size)
    scales = _mapped(bundle, found.scales or 0, "float32", (n_rows, n_scales))[ids]
    if found.block_size is None:
        rows: Floats = _mapped(bundle, found.offset, "int8", (n_rows, width))[ids] * scales
        return rows
    packed = _mapped(bundle, found.offset, "uint8", (n_rows, n_scales * found.block_size // 2))[ids]
    values = _unpacked(packed).reshape(len(ids), n_scales, found.block_size).astype(np.float32)
    zeros: Any = 8
    if found.zeros is not None:
        shape = (n_rows, -(-n_scales // 2))
        zeros = _unpacked(_mapped(bundle, found.zeros, "uint8", shape)[ids])[:, :n_scales, None]
    return np.ascontiguousarray(((values - zeros) * scales[..., None]).reshape(len(ids), -1)[:, :width])


def _unpacked(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 4-bit numbers that stand two a byte, the first in the low half."""
    return np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)


def _mapped(bundle: Bundle, offset: int, dtype: str, shape: tuple[int, int]) -> NDArray[Any]:
    """Return an array of the weights file as a view of it."""
    end, size = offset + math.prod(shape) * np.dtype(dtype).itemsize, bundle.manifest.files[WEIGHTS].size
    if end > size:
        raise BundleError(
            f"{bundle.path}: the output matrix must end within {size} bytes of {WEIGHTS}, "
            f"the manifest says {end}; export the bundle again"
        )
    # As a plain array: what is gathered from a memmap is one too, and the file stays open as long as it lives.
    return np.asarray(np.memmap(bundle.file(WEIGHTS), dtype, "r", offset, shape))
