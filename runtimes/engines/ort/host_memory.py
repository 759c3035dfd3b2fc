"""Where the arrays of an onnxruntime decode live: on the host they are numpy's, and nothing is ever copied."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fatdeploy.runtimes.engines.ort.buffers import Array, Buffers, move_rows, zero_rows
from fatdeploy.runtimes.engines.protocol import Rows
from fatdeploy.spec import ModelSpec

# What an engine calls an array: numpy's own, or something on a device with the same ``shape`` and ``nbytes``.
Held = Any
Shape = tuple[int, ...]


class ArrayMemory(Protocol):
    """What an engine does with arrays beside running graphs on them."""

    def encoded(self, encoder: Any, feeds: dict[str, Array]) -> dict[str, Held]:
        """Return what a decode reads of its sources: them, and what the encoder makes of them."""
        ...

    def zeros(self, shapes: Sequence[Shape]) -> Buffers:
        """Return state before the first token."""
        ...

    def moved(self, buffers: Buffers, turn: int, rows: Rows, before: int) -> int:
        """Let row i of the state hold what row rows[i] of ``before`` held; return which set holds it now."""
        ...

    def kept(self, sources: dict[str, Held], kept: Rows) -> dict[str, Held]:
        """Return those sources alone."""
        ...

    def clear(self, buffers: Buffers, rows: int) -> None:
        """Make the first rows of state, those that were ever used, as good as new."""
        ...


class HostMemory:
    """Arrays of numpy, which onnxruntime's CPU provider reads and writes where they are."""

    def __init__(self, spec: ModelSpec, n_sets: int) -> None:
        self._spec, self._n_sets = spec, n_sets
        self._made = [one.name for one in spec.encoder_outputs()]

    def encoded(self, encoder: Any, feeds: dict[str, Array]) -> dict[str, Held]:
        return {**feeds, **dict(zip(self._made, encoder.run(self._made, feeds), strict=True))}

    def zeros(self, shapes: Sequence[Shape]) -> Buffers:
        dtypes = [one.dtype for one in self._spec.state]
        return Buffers([[np.zeros(*one) for one in zip(shapes, dtypes, strict=True)] for _ in range(self._n_sets)])

    def moved(self, buffers: Buffers, turn: int, rows: Rows, before: int) -> int:  # noqa: ARG002
        # Only rows that another continues are copied, only their written positions, and in place.
        move_rows(self._spec.state, buffers.sets[turn], rows, int(buffers.position))
        return turn

    def kept(self, sources: dict[str, Held], kept: Rows) -> dict[str, Held]:
        return {name: np.ascontiguousarray(array[kept]) for name, array in sources.items()}

    def clear(self, buffers: Buffers, rows: int) -> None:
        zero_rows(self._spec.state, buffers.sets, rows, int(buffers.position))
