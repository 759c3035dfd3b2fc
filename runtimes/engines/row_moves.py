"""Rows of decoder state that change places: which are copied, in which order, and which part of each is written.

Copies in numpy arrays happen here; copies on a GPU take their order and their strips of bytes from here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES
from fatdeploy.runtimes.engines.protocol import Rows
from fatdeploy.spec import StateSpec

SPARE = -1  # an extra row, which holds one row of a circle meanwhile


def planned_moves(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Return copies (to, from) after which row i is what row parents[i] was; rows that stay are not touched.

    A row is written once nobody reads it any more. What is left are circles, which a copy to the spare row opens.
    """
    missing = {row: parent for row, parent in enumerate(parents) if row != parent}
    readers = [0] * (1 + max([len(parents), *(parent + 1 for parent in parents)], default=0))
    for parent in missing.values():
        readers[parent] += 1
    moves: list[tuple[int, int]] = []
    ready = [row for row in missing if not readers[row]]
    while missing:
        if not ready:
            row = next(iter(missing))
            moves.append((SPARE, row))
            missing.update({child: SPARE for child, parent in missing.items() if parent == row})
            ready.append(row)
        row = ready.pop()
        parent = missing.pop(row)
        moves.append((row, parent))
        if parent != SPARE:
            readers[parent] -= 1
            if not readers[parent] and parent in missing:
                ready.append(parent)
    return moves


def move_rows(
    specs: Sequence[StateSpec], arrays: Sequence[NDArray[Any]], rows: Rows, position: NDArray[np.int64]
) -> None:
    """Make row i of every array continue row rows[i], up to the position it has written; nothing else is touched.

    The position is one number for all rows, or one per row.
    """
    pairs = [(new, old) for new, old in enumerate(rows.tolist()) if new != old]
    if not pairs:
        return
    news, olds = (set(part) for part in zip(*pairs, strict=True))
    groups = _equally_long(pairs, position)
    for spec, array in zip(specs, arrays, strict=True):
        parts = [(array[written_slices(spec, written)], *rows_of) for written, rows_of in groups]
        if news & olds:
            # Some row is read after it is overwritten, so all rows that move are read first.
            copies = [state[old] for state, _, old in parts]
            for (state, new, _), copied in zip(parts, copies, strict=True):
                state[new] = copied
            continue
        for state, new, old in parts:
            for to, source in zip(new, old, strict=True):
                state[to] = state[source]


def _equally_long(
    pairs: Sequence[tuple[int, int]], position: NDArray[np.int64]
) -> list[tuple[int, tuple[list[int], list[int]]]]:
    """Return pairs of new and old rows as two lists for each number of written positions."""
    written = position.tolist()
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for new, old in pairs:
        news, olds = groups.setdefault(written[old] if position.ndim else written, ([], []))
        news.append(new)
        olds.append(old)
    return list(groups.items())


def zero_rows(specs: Sequence[StateSpec], sets: Sequence[Sequence[NDArray[Any]]], rows: int, position: int) -> None:
    """Zero the first ``rows`` rows of state, those that were ever used, up to the written position.

    A sum starts from zero. A cache is hidden from its reader beyond the position, but some graphs hide it by a weight
    of zero, and zero times a NaN left there by another source is NaN.
    """
    for spec, *arrays in zip(specs, *sets, strict=True):
        _, *rest = written_slices(spec, position)
        for array in arrays:
            array[:rows, *rest] = 0


def written_slices(spec: StateSpec, position: int) -> tuple[slice, ...]:
    """Return the part of a state array that steps up to a position have written."""
    return tuple([slice(position) if axis == "capacity" else slice(None) for axis in spec.shape])


@dataclass(frozen=True)
class Strips:
    """Runs of bytes of one length at equal distances: the written part of a row of a cache. One run is a whole row."""

    width: int
    pitch: int
    count: int


def written_strips(spec: StateSpec, sizes: Mapping[str, int], position: int) -> Strips:
    """Return the bytes of a row of state that steps up to a position have written."""
    _, *axes = spec.shape
    shape = spec.sized(sizes)[1:]
    item = ELEMENT_TYPES[spec.dtype].n_bytes
    if "capacity" not in axes:
        row_bytes = math.prod(shape) * item
        return Strips(row_bytes, row_bytes, 1)
    place = axes.index("capacity")
    inner = math.prod(shape[place + 1 :]) * item
    return Strips(position * inner, shape[place] * inner, math.prod(shape[:place]))
