"""New sources in the places of finished ones, in the arrays of a running decode on the host.

Cross-attention takes time for every column of the source axis, padding too: the arrays are cut when all sources have
become much shorter, and grow again when a longer source comes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.ort.buffers import Array
from fatdeploy.runtimes.engines.protocol import Rows
from fatdeploy.spec import ModelSpec, StateSpec, TensorSpec

Arrays = dict[str, Array]
# Arrays are cut if this share of their columns is enough: a copy costs about as much as a step.
ENOUGH = 3 / 4


def refilled(spec: ModelSpec, arrays: Arrays, places: Rows, newcomers: Mapping[str, Array], width: int) -> Arrays:
    """Return the arrays of all sources, ``width`` columns wide, with newcomers in ``places``.

    These are the same arrays, written in place, unless the width changes. No value of another source changes.
    """
    tensors = [tensor for tensor in (spec.source, spec.source_mask, *spec.memory) if tensor.name in arrays]
    results = {}
    for tensor in tensors:
        padding = spec.pad_id if tensor == spec.source else 0
        array = _resized(arrays[tensor.name], tensor, width, padding)
        array[places] = _resized(newcomers[tensor.name], tensor, width, padding)
        results[tensor.name] = array
    return results


def refilled_width(lengths: NDArray[np.int64], width: int, widest: int, multiple: int) -> int:
    """Return how many columns arrays of ``width`` columns should have for sources of these lengths."""
    needed = min(-(-int(lengths.max()) // multiple) * multiple, widest)
    return needed if needed > width or needed <= ENOUGH * width else width


def next_width(spec: ModelSpec, lengths: NDArray[np.int64], width: int, widest: int, multiple: int) -> int:
    """Return ``refilled_width``, or ``width`` if state has the source's columns too: its buffers are of one width."""
    if any("source" in tensor.shape for tensor in spec.state):
        return width
    return refilled_width(lengths, width, widest, multiple)


def restart_rows(
    specs: Sequence[StateSpec], arrays: Sequence[Array], rows: Rows, newcomers: Sequence[Array], first: Rows
) -> None:
    """Give rows of recurrent state what rows ``first`` of newcomers start from.

    Caches stay as they are: every position is written before it is read.
    """
    for spec, array, started in zip(specs, arrays, newcomers, strict=True):
        if spec.kind == "recurrent":
            width = array.shape[spec.shape.index("source")] if "source" in spec.shape else 0
            array[rows] = _resized(started[first], spec, width, 0)


def _resized(array: Array, tensor: TensorSpec, width: int, padding: int) -> Array:
    """Return an array with its source axis cut or padded to ``width``; the array itself if it has this width."""
    if "source" not in tensor.shape:
        return array
    axis = tensor.shape.index("source")
    if array.shape[axis] == width:
        return array
    # Zeros, not whatever is there: a hidden column has a weight of zero, and zero times a NaN is NaN.
    resized = np.full((*array.shape[:axis], width, *array.shape[axis + 1 :]), padding, array.dtype)
    common = (*[slice(None)] * axis, slice(min(width, array.shape[axis])))
    resized[common] = array[common]
    return resized
