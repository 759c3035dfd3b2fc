"""Where the arrays of an onnxruntime decode live: on the host they are numpy arrays, and no step copies them."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fatdeploy.runtimes.engines.ort.buffers import Array, Buffers, state_buffers
from fatdeploy.runtimes.engines.protocol import Rows
from fatdeploy.runtimes.engines.row_moves import move_rows, zero_rows
from fatdeploy.spec import ModelSpec

# A numpy array, or an array on a device that has ``shape`` and ``nbytes`` too.
HostOrDeviceArray = Any
Shape = tuple[int, ...]


class ArrayMemory(Protocol):
    """What an engine does with arrays beside running graphs on them."""

    def encoded(self, encoder: Any, feeds: dict[str, Array]) -> dict[str, HostOrDeviceArray]:
        """Run the encoder; return its inputs and outputs."""
        ...

    def zeros(self, shapes: Sequence[Shape]) -> Buffers:
        """Return state before the first token."""
        ...

    def started(self, buffers: Buffers, sources: dict[str, HostOrDeviceArray]) -> dict[str, HostOrDeviceArray]:
        """Write state that starts from the source to the first set; return the sources without it."""
        ...

    def moved(self, buffers: Buffers, turn: int, rows: Rows, n_rows: int) -> int:
        """Make row i of the state continue row rows[i] of ``n_rows``; return which set holds the state now."""
        ...

    def kept(self, sources: dict[str, HostOrDeviceArray], kept: Rows) -> dict[str, HostOrDeviceArray]:
        """Return the kept sources only."""
        ...

    def clear(self, buffers: Buffers, rows: int) -> None:
        """Zero the first rows of state, those that were ever used."""
        ...


class HostMemory:
    """Numpy arrays, which onnxruntime's CPU provider reads and writes in place."""

    def __init__(self, spec: ModelSpec, n_sets: int) -> None:
        self._spec, self._n_sets = spec, n_sets
        self._outputs = [tensor.name for tensor in spec.encoder_outputs()]
        self._starts = frozenset(tensor.name for tensor in spec.starts)

    def encoded(self, encoder: Any, feeds: dict[str, Array]) -> dict[str, HostOrDeviceArray]:
        return {**feeds, **dict(zip(self._outputs, encoder.run(self._outputs, feeds), strict=True))}

    def zeros(self, shapes: Sequence[Shape]) -> Buffers:
        layout = [(shape, tensor.dtype) for shape, tensor in zip(shapes, self._spec.state, strict=True)]
        sets = [[np.zeros(shape, dtype) for shape, dtype in layout] for _ in range(self._n_sets)]
        return state_buffers(self._spec, sets)

    def started(self, buffers: Buffers, sources: dict[str, HostOrDeviceArray]) -> dict[str, HostOrDeviceArray]:
        if not self._starts:
            return sources
        for array, start in zip(buffers.sets[0], self._spec.started_by(sources), strict=True):
            if start is not None:
                array[: len(start)] = start
        return {name: array for name, array in sources.items() if name not in self._starts}

    def moved(self, buffers: Buffers, turn: int, rows: Rows, n_rows: int) -> int:  # noqa: ARG002
        # In place: only rows that move, and only their written positions.
        move_rows(self._spec.state, buffers.sets[turn], rows, buffers.position)
        return turn

    def kept(self, sources: dict[str, HostOrDeviceArray], kept: Rows) -> dict[str, HostOrDeviceArray]:
        return {name: np.ascontiguousarray(array[kept]) for name, array in sources.items()}

    def clear(self, buffers: Buffers, rows: int) -> None:
        zero_rows(self._spec.state, buffers.sets, rows, buffers.written)
