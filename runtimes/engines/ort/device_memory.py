"""Memory of a device for onnxruntime: state and sources stay there, tokens go in, the wanted results come out.

Rows are moved by a small graph, one Gather per tensor, from one set of state buffers to another, and the sets change
places: onnxruntime's kernels do it in its own stream, no other CUDA package is needed, and a row is never overwritten
before it is read. It costs a second set of buffers and copies whole rows; a decode of one row has no second set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from fatdeploy.errors import BackendUnavailable
from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES
from fatdeploy.runtimes.engines.ort.bindings import Binder, BoundCall
from fatdeploy.runtimes.engines.ort.buffers import Array, Buffers, state_buffers
from fatdeploy.runtimes.engines.ort.host_memory import HostOrDeviceArray, Shape
from fatdeploy.runtimes.engines.ort.row_graphs import ROWS, gathered_name, row_graph, shape_name, zero_graph
from fatdeploy.runtimes.engines.protocol import Rows, StepOut, Want
from fatdeploy.spec import ModelSpec, TensorSpec


@dataclass(frozen=True)
class DeviceArray:
    """An array on a device, which Python cannot read: it wraps onnxruntime's value."""

    value: Any
    dtype: str
    shape: Shape

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_TYPES[self.dtype].n_bytes


class OrtDevice(Protocol):
    """What a device must do. On a GPU onnxruntime does it; tests use a device that counts."""

    provider: str  # onnxruntime's name
    kind: str  # onnxruntime's name of its memory
    index: int

    def empty(self, dtype: str, shape: Shape) -> DeviceArray:
        """Return uninitialised memory of the device."""
        ...

    def copied_in(self, array: Array) -> DeviceArray:
        """Return a copy of a host array on the device."""
        ...

    def feed(self, binding: Any, name: str, array: Array) -> None:
        """Make the next run read the current content of a host array."""
        ...

    def fetched(self, array: Array) -> Any:
        """Return the value to bind so that every run writes a result to a host array."""
        ...


class OrtCudaDevice:
    """The first GPU through onnxruntime; CUDA_VISIBLE_DEVICES chooses which one is first."""

    provider, kind, index = "CUDAExecutionProvider", "cuda", 0

    def __init__(self, ort: Any) -> None:
        self._value = ort.OrtValue

    def empty(self, dtype: str, shape: Shape) -> DeviceArray:
        try:
            value = self._value.ortvalue_from_shape_and_type(shape, ELEMENT_TYPES[dtype].onnx, self.kind, self.index)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise BackendUnavailable(
                f"the GPU has no {prod(shape) * ELEMENT_TYPES[dtype].n_bytes:,} bytes for an array {list(shape)} "
                f"({' '.join(str(error).split())}): decode fewer sources at once (batch_tokens), with fewer beams"
            ) from error
        return DeviceArray(value, dtype, shape)

    def copied_in(self, array: Array) -> DeviceArray:
        value = self._value.ortvalue_from_numpy(np.ascontiguousarray(array), self.kind, self.index)
        return DeviceArray(value, str(array.dtype), array.shape)

    def feed(self, binding: Any, name: str, array: Array) -> None:
        # Bound again each time: onnxruntime copies a value when it is bound, to where the graph reads it. For
        # positions that is the host: attention kernels take them as launch parameters.
        binding.bind_ortvalue_input(name, self._value.ortvalue_from_numpy(array))

    def fetched(self, array: Array) -> Any:
        # A value on the host: onnxruntime copies to it after the graph has run.
        return self._value.ortvalue_from_numpy(array)


class DeviceMemory:
    """State and sources on a device; with ``alternates`` a step does not write the set that it reads."""

    def __init__(
        self, device: OrtDevice, spec: ModelSpec, open_session: Callable[[bytes], Any], *, alternates: bool
    ) -> None:
        self.device, self._spec, self._alternates = device, spec, alternates
        self._read = (spec.source, spec.source_mask, *spec.memory)
        self._host = frozenset(tensor.name for tensor in spec.length_log_probs)
        self._rows_of_sources = open_session(row_graph(self._read))
        if spec.state:
            self._rows_of_state, self._zero = open_session(row_graph(spec.past)), open_session(zero_graph(spec.past))
        if spec.starts:
            self._rows_of_starts = open_session(row_graph(spec.starts))

    def encoded(self, encoder: Any, feeds: dict[str, Array]) -> dict[str, HostOrDeviceArray]:
        inputs = {name: self.device.copied_in(array) for name, array in feeds.items()}
        binding = encoder.io_binding()
        for name, array in inputs.items():
            bind_input(self.device, binding, name, array, len(array))
        for tensor in self._spec.encoder_outputs():
            if tensor.name in self._host:
                binding.bind_output(tensor.name, "cpu")
            else:
                binding.bind_output(tensor.name, self.device.kind, self.device.index)
        encoder.run_with_iobinding(binding)
        outputs = zip(self._spec.encoder_outputs(), binding.get_outputs(), strict=True)
        return {**inputs, **{tensor.name: self._array(tensor, value) for tensor, value in outputs}}

    def zeros(self, shapes: Sequence[Shape]) -> Buffers:
        # A single row never moves; it needs a second set only if a graph cannot write where it reads.
        n_sets = 2 if self._alternates or any(shape[0] > 1 for shape in shapes) else 1
        sets = [
            [self.device.empty(tensor.dtype, shape) for tensor, shape in zip(self._spec.state, shapes, strict=True)]
            for _ in range(n_sets)
        ]
        buffers = state_buffers(self._spec, sets)
        self.clear(buffers, shapes[0][0] if shapes else 0)
        return buffers

    def started(self, buffers: Buffers, sources: dict[str, HostOrDeviceArray]) -> dict[str, HostOrDeviceArray]:
        starts = {tensor.name: sources[tensor.name] for tensor in self._spec.starts}
        if not starts:
            return sources
        places = dict(zip(starts, self._from_source(buffers.sets[0]), strict=True))
        batch = len(next(iter(starts.values())))
        self._gather(self._rows_of_starts, starts, places, np.arange(batch), batch)
        return {name: array for name, array in sources.items() if name not in starts}

    def _from_source(self, arrays: Sequence[DeviceArray]) -> list[DeviceArray]:
        pairs = zip(self._spec.state, arrays, strict=True)
        return [array for tensor, array in pairs if tensor.start == "source"]

    def moved(self, buffers: Buffers, turn: int, rows: Rows, n_rows: int) -> int:
        if rows.tolist() == list(range(n_rows)) or not self._spec.state:
            return turn
        other = 1 - turn
        inputs, outputs = (
            dict(zip((tensor.name for tensor in self._spec.past), buffers.sets[index], strict=True))
            for index in (turn, other)
        )
        self._gather(self._rows_of_state, inputs, outputs, rows, n_rows)
        return other

    def kept(self, sources: dict[str, HostOrDeviceArray], kept: Rows) -> dict[str, HostOrDeviceArray]:
        inputs = {name: array for name, array in sources.items() if name not in self._host}
        outputs = {
            name: self.device.empty(array.dtype, (len(kept), *array.shape[1:])) for name, array in inputs.items()
        }
        batch = len(sources[self._spec.source_mask.name])
        self._gather(self._rows_of_sources, inputs, outputs, kept, batch)
        return {**outputs, **{name: sources[name][kept] for name in self._host}}

    def clear(self, buffers: Buffers, rows: int) -> None:
        if not rows or not self._spec.state:
            return
        for arrays in buffers.sets:
            binding = self._zero.io_binding()
            for tensor, array in zip(self._spec.past, arrays, strict=True):
                shape = np.array([rows, *array.shape[1:]], np.int64)
                self.device.feed(binding, shape_name(tensor.name), shape)
                bind_output(self.device, binding, tensor.name, array, rows)
            self._zero.run_with_iobinding(binding)

    def _array(self, tensor: TensorSpec, value: Any) -> HostOrDeviceArray:
        if tensor.name in self._host:
            return value.numpy()
        return DeviceArray(value, tensor.dtype, tuple(value.shape()))

    def _gather(
        self,
        session: Any,
        inputs: Mapping[str, DeviceArray],
        outputs: Mapping[str, DeviceArray],
        rows: Rows,
        n_rows: int,
    ) -> None:
        """Copy the chosen ones of the first ``n_rows`` rows of the inputs to the beginning of the outputs."""
        binding = session.io_binding()
        self.device.feed(binding, ROWS, rows)
        for name, array in inputs.items():
            bind_input(self.device, binding, name, array, n_rows)
            bind_output(self.device, binding, gathered_name(name), outputs[name], len(rows))
        session.run_with_iobinding(binding)


class DeviceBinder(Binder):
    """Binds state on a device, by address, because a step uses only the first rows of a buffer."""

    def __init__(self, ort: Any, spec: ModelSpec, device: OrtDevice, *, branches: bool, alternates: bool) -> None:
        super().__init__(ort, spec, branches=branches)
        self._device, self._alternates = device, alternates
        self._result = device.fetched
        # The hidden state costs nothing on a host; here it would cross the bus, so only who wants it gets it.
        for want in (Want.LOGITS, Want.TOPK):
            self._results[want] = tuple(tensor for tensor in self._results[want] if tensor not in spec.hidden)

    def values(self, arrays: dict[str, HostOrDeviceArray]) -> dict[str, Any]:
        return {name: array.value for name, array in arrays.items() if name in self._read}

    def _new_bound(self, decoder: Any, buffers: Buffers, rows: int, steps: int, want: Want) -> BoundCall:
        tokens = np.empty((rows, steps), np.int64)
        fed = {self._tokens: tokens, self._position: buffers.first_positions(rows)}
        bindings = []
        for index, past in enumerate(buffers.sets):
            present = buffers.sets[1 - index] if self._alternates else past
            binding = decoder.io_binding()
            if self.branches:
                self._device.feed(binding, self._want, np.array(int(want)))
            for name, array in zip(self._past, past, strict=True):
                bind_input(self._device, binding, name, array, rows)
            for name, array in zip(self._present, present, strict=True):
                bind_output(self._device, binding, name, array, rows)
            bindings.append(binding)
        return BoundCall(tokens, StepOut(), bindings, fed={name: fed[name] for name in fed if name in self._read})


def bind_input(device: OrtDevice, binding: Any, name: str, array: DeviceArray, rows: int) -> None:
    """Make a graph read the first rows of an array."""
    binding.bind_input(name, device.kind, device.index, ELEMENT_TYPES[array.dtype].onnx, *_first(array, rows))


def bind_output(device: OrtDevice, binding: Any, name: str, array: DeviceArray, rows: int) -> None:
    """Make a graph write the first rows of an array."""
    binding.bind_output(name, device.kind, device.index, ELEMENT_TYPES[array.dtype].onnx, *_first(array, rows))


def _first(array: DeviceArray, rows: int) -> tuple[list[int], int]:
    return [rows, *array.shape[1:]], array.value.data_ptr()
