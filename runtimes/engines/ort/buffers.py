"""State buffers of a decode, allocated once for the most rows it may have, zeroed and reused by later decodes."""

from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.spec import ModelSpec

Array = NDArray[Any]

# The number of decodes that usually run concurrently on a device; a set may be many megabytes.
MOST_WAITING = 4


@dataclass
class Buffers:
    """State of one decode, and the bindings that an engine made for it and may reuse."""

    sets: list[list[Any]]  # arrays of the host or a device: one set for caches, two that alternate for recurrent state
    position: NDArray[np.int64] = field(default_factory=lambda: np.zeros((), np.int64))  # or one per row
    written: int = 0  # the furthest position that any row reached
    bound: dict[Any, Any] = field(default_factory=dict)

    def first_positions(self, rows: int) -> NDArray[np.int64]:
        """Return the position as a decoder reads it: that of all rows, or those of the first ``rows`` rows."""
        return self.position[:rows] if self.position.ndim else self.position


def state_buffers(spec: ModelSpec, sets: list[list[Any]]) -> Buffers:
    """Return buffers of state before the first token."""
    rows = len(sets[0][0]) if sets[0] else 0
    return Buffers(sets, np.zeros(spec.position.sized({"rows": rows}), np.int64))


class BufferPool:
    """Zeroed state buffers that wait for the next decode of their shapes; the oldest are dropped."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._waiting: deque[Buffers] = deque(maxlen=most)
        self._lock = Lock()  # held by takers

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, shapes: list[tuple[int, ...]]) -> Buffers | None:
        """Return the newest buffers of these shapes, which the CPU may still cache; None if there are none."""
        others: list[Buffers] = []
        fitting = None
        with self._lock:
            while self._waiting and fitting is None:
                newest = self._waiting.pop()
                if [array.shape for array in newest.sets[0]] == shapes:
                    fitting = newest
                else:
                    others.append(newest)
            self._waiting.extend(reversed(others))
        return fitting

    def give(self, buffers: Buffers) -> None:
        """Keep buffers for another decode.

        It takes no lock, and a deque needs none to append. It may run inside the garbage collector, which returns the
        buffers of a dropped stream, on a thread that is taking buffers at that moment.
        """
        self._waiting.append(buffers)

    def clear(self) -> None:
        """Drop all waiting buffers."""
        with self._lock:
            self._waiting.clear()
