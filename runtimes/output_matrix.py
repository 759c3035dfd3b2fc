"""The output matrix of a bundle: rows of it are read from the weights file, the rest of which is never touched."""

import math

import numpy as np

from fatdeploy.bundle import OUTPUT_MATRIX_SINCE, WEIGHTS, Bundle
from fatdeploy.errors import BundleError, ConfigError
from fatdeploy.runtimes.engine import Floats, Ids, check_ids


def stored_output_rows(bundle: Bundle, ids: Ids) -> Floats | None:
    """Return the rows of a bundle's output matrix that belong to ids, [n, M]; None if it has none."""
    check_ids(bundle.spec, ids)
    matrix = _mapped(bundle)
    return None if matrix is None else np.ascontiguousarray(matrix[ids])


def _mapped(bundle: Bundle) -> Floats | None:
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
    end = found.offset + math.prod(shape) * np.dtype(found.dtype).itemsize
    if end > manifest.files[WEIGHTS].size:
        raise BundleError(
            f"{bundle.path}: the output matrix must end within {manifest.files[WEIGHTS].size} bytes of {WEIGHTS}, "
            f"the manifest says {end}; export the bundle again"
        )
    stored = np.memmap(bundle.file(WEIGHTS), found.dtype, "r", found.offset, shape)
    # As a plain array: what is gathered from a memmap is one too, and the file stays open as long as it lives.
    matrix: Floats = np.asarray(stored.T if found.transposed else stored)
    return matrix
