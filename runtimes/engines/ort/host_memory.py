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
# Positions that the encoder reads at once. The numbers of more positions leave the processor's cache: from 768 on, each
# took a fifth longer (512 wide, 1 MB of second-level cache), and 384 were as fast as any.
ENCODED_TOGETHER = 512


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

    def __init__(self, ort: Any, spec: ModelSpec, n_sets: int) -> None:
        self._spec, self._n_sets = spec, n_sets
        self._value = ort.OrtValue.ortvalue_from_numpy
        self._outputs = [tensor.name for tensor in spec.encoder_outputs()]
        self._starts = frozenset(tensor.name for tensor in spec.starts)
        self._by_source = all(tensor.shape[:1] == ("batch",) for tensor in spec.encoder_outputs())

    def encoded(self, encoder: Any, feeds: dict[str, Array]) -> dict[str, HostOrDeviceArray]:
        n_sources, length = feeds[self._spec.source.name].shape
        count = max(1, ENCODED_TOGETHER // length)
        if n_sources <= count or not self._by_source:
            return {**feeds, **dict(zip(self._outputs, encoder.run(self._outputs, feeds), strict=True))}
        sizes = {"batch": n_sources, "source": length}
        results = {tensor.name: np.empty(tensor.sized(sizes), tensor.dtype) for tensor in self._spec.encoder_outputs()}
        for begin in range(0, n_sources, count):
            self._encode_part(encoder, feeds, results, slice(begin, begin + count))
        return {**feeds, **results}

    def _encode_part(self, encoder: Any, feeds: dict[str, Array], results: dict[str, Array], sources: slice) -> None:
        """Encode some sources; onnxruntime writes their results to where those of all are."""
        binding = encoder.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, self._value(array[sources]))
        for name, array in results.items():
            binding.bind_ortvalue_output(name, self._value(array[sources]))
        encoder.run_with_iobinding(binding)

    def zeros(self, shapes: Sequence[Shape]) -> Buffers:
        layout = [(shape, tensor.dtype) for shape, tensor in zip(shapes, self._spec.state, strict=True)]
        first = [np.zeros(shape, dtype) for shape, dtype in layout]
        # A cache beside recurrent state is one array in all sets: a step writes it in place.
        sets = [
            [
                np.zeros_like(array) if tensor.kind == "recurrent" else array
                for array, tensor in zip(first, self._spec.state, strict=True)
            ]
            for _ in range(self._n_sets - 1)
        ]
        return state_buffers(self._spec, [first, *sets])

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
