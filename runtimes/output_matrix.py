"""The output matrix of a bundle: rows of it are read from the weights file, the rest of which is never touched."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import OUTPUT_MATRIX_SINCE, WEIGHTS, Bundle
from fatdeploy.errors import BundleError, ConfigError
from fatdeploy.runtimes.engine import Floats, Ids, check_ids

BITS = np.dtype(np.uint16)


def stored_output_rows(bundle: Bundle, ids: Ids) -> Floats | None:
    """Return the rows of a bundle's output matrix that belong to ids, [n, M]; None if it has none."""
    check_ids(bundle.spec, ids)
    matrix = _mapped(bundle)
    return None if matrix is None else _floats(matrix[ids])


def _floats(rows: NDArray[Any]) -> Floats:
    """Return numbers of any stored type as float32: what a hidden state is multiplied with."""
    if rows.dtype == BITS:
        # A bfloat16 is the first half of a float32; numpy does not know it by name.
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(rows, np.float32)


def _mapped(bundle: Bundle) -> NDArray[Any] | None:
    """Return the output matrix [V, M] as a view of the file."""
    manifest, spec = bundle.manifest, bundle.spec
    if manifest.format < OUTPUT_MATRIX_SINCE:
        raise ConfigError(
            f"{bundle.path} was written before bundles said where their output matrix stands: export it again with "
            "this version: fatdeploy export SOURCE --out DIR --force"
        )
    found = manifest.output_matrix
    if found is None or spec.width is None:
        return None
    shape = (spec.width, spec.vocab_size) if found.transposed else (spec.vocab_size, spec.width)
    dtype = BITS if found.dtype == "bfloat16" else np.dtype(found.dtype)
    end = found.offset + math.prod(shape) * dtype.itemsize
    if end > manifest.files[WEIGHTS].size:
        raise BundleError(
            f"{bundle.path}: the output matrix must end within {manifest.files[WEIGHTS].size} bytes of {WEIGHTS}, "
            f"the manifest says {end}; export the bundle again"
        )
    stored = np.memmap(bundle.file(WEIGHTS), dtype, "r", found.offset, shape)
    # As a plain array: what is gathered from a memmap is one too, and the file stays open as long as it lives.
    matrix: NDArray[Any] = np.asarray(stored.T if found.transposed else stored)
    return matrix
