"""State buffers of a decode, allocated once for the most rows it may have: moved in place, zeroed, used again."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.protocol import Rows
from fatdeploy.spec import StateSpec

Array = NDArray[Any]

# As many as decodes that usually run side by side on a device; a set may be many megabytes.
MOST_WAITING = 4


@dataclass
class Buffers:
    """State of one decode, and what an engine has made for it and may use again."""

    sets: list[list[Any]]  # arrays, here or on a device: one set of caches, two that change places of recurrent state
    position: NDArray[np.int64] = field(default_factory=lambda: np.zeros((), np.int64))
    bound: dict[Any, Any] = field(default_factory=dict)


class BufferPool:
    """State buffers that wait, zeroed, for the next decode of their shapes; the oldest are dropped."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._waiting: deque[Buffers] = deque(maxlen=most)
        self._lock = Lock()  # of those who take

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, shapes: list[tuple[int, ...]]) -> Buffers | None:
        """Return buffers of these shapes, if there are any; the newest, which the processor may still hold."""
        others: list[Buffers] = []
        found = None
        with self._lock:
            while self._waiting and found is None:
                newest = self._waiting.pop()
                if [array.shape for array in newest.sets[0]] == shapes:
                    found = newest
                else:
                    others.append(newest)
            self._waiting.extend(reversed(others))
        return found

    def give(self, buffers: Buffers) -> None:
        """Keep buffers for another decode.

        Without the lock, which a deque does not need for this: the garbage collector gives back what a dropped stream
        held, in whichever thread it runs, and that one may be taking buffers just now.
        """
        self._waiting.append(buffers)

    def clear(self) -> None:
        """Drop all that wait."""
        with self._lock:
            self._waiting.clear()


def move_rows(specs: Sequence[StateSpec], arrays: Sequence[Array], rows: Rows, position: int) -> None:
    """Let row i of every array hold what row rows[i] held, as far as it is written; nothing else is touched."""
    pairs = [(new, old) for new, old in enumerate(rows.tolist()) if new != old]
    if not pairs:
        return
    news, olds = (list(part) for part in zip(*pairs, strict=True))
    for spec, array in zip(specs, arrays, strict=True):
        held = array[written(spec, position)]
        if set(news) & set(olds):
            # Some row is read after it was written over: all that move are read first.
            held[news] = held[olds]
            continue
        for new, old in pairs:
            held[new] = held[old]


def zero_rows(specs: Sequence[StateSpec], sets: Sequence[Sequence[Array]], rows: int, position: int) -> None:
    """Make the first rows of state, those that were ever used, as good as new.

    A sum starts from zero. A cache is hidden from its reader beyond the position, but some graphs hide by a weight
    of zero, and zero times a NaN that another source left there is NaN: so what was written is zeroed too.
    """
    for spec, *arrays in zip(specs, *sets, strict=True):
        _, *rest = written(spec, position)
        for array in arrays:
            array[:rows, *rest] = 0


def written(spec: StateSpec, position: int) -> tuple[slice, ...]:
    """Return the part of a state tensor that steps up to a position have written."""
    return tuple([slice(position) if axis == "capacity" else slice(None) for axis in spec.shape])
