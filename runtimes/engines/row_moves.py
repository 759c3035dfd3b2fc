"""Rows of decoder state that change places: which are copied, in which order, and which part of each is written.

Copies in numpy arrays happen here; copies on a GPU take their order and their strips of bytes from here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def move_rows(specs: Sequence[StateSpec], arrays: Sequence[NDArray[Any]], rows: Rows, position: int) -> None:
    """Make row i of every array continue row rows[i], up to the written position; nothing else is touched."""
    pairs = [(new, old) for new, old in enumerate(rows.tolist()) if new != old]
    if not pairs:
        return
    news, olds = (list(part) for part in zip(*pairs, strict=True))
    for spec, array in zip(specs, arrays, strict=True):
        state = array[written_slices(spec, position)]
        if set(news) & set(olds):
            # Some row is read after it is overwritten, so all rows that move are read first.
            state[news] = state[olds]
            continue
        for new, old in pairs:
            state[new] = state[old]


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
