"""Memory of a device for onnxruntime: state and sources stay there, tokens go in, what is wanted comes out.

Rows are moved by a graph of our own, one Gather a tensor, from one set of state buffers to another, and the sets change
places: onnxruntime's kernels do it in its own stream, no other CUDA package is needed, and what is read is never what
is written. It costs a second set of buffers, and copies whole rows; a decode of one row has no second set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from fatdeploy.errors import BackendUnavailable
from fatdeploy.runtimes.engines.ort.bindings import Binder, Bound
from fatdeploy.runtimes.engines.ort.buffers import Array, Buffers
from fatdeploy.runtimes.engines.ort.host_memory import Held, Shape
from fatdeploy.runtimes.engines.ort.row_graphs import (
    ELEMENTS,
    ROWS,
    WIDTHS,
    gathered_name,
    row_graph,
    shape_name,
    zero_graph,
)
from fatdeploy.runtimes.engines.protocol import Rows, StepOut, Want
from fatdeploy.spec import ModelSpec, TensorSpec


@dataclass(frozen=True)
class DeviceArray:
    """An array that Python cannot look into: onnxruntime's value on a device."""

    value: Any
    dtype: str
    shape: Shape

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


class OrtDevice(Protocol):
    """What is asked of a device; on a GPU onnxruntime does it, in tests something that counts."""

    provider: str  # of onnxruntime
    kind: str  # as onnxruntime calls its memory
    index: int

    def empty(self, dtype: str, shape: Shape) -> DeviceArray:
        """Return memory of the device, whatever stands in it."""
        ...

    def copied_in(self, array: Array) -> DeviceArray:
        """Return a copy of the host's array on the device."""
        ...

    def feed(self, binding: Any, name: str, array: Array) -> None:
        """Let the next run read what the host's array holds now."""
        ...

    def fetched(self, array: Array) -> Any:
        """Return what to bind so that every run leaves a result in the host's array."""
        ...


class OrtCudaDevice:
    """A GPU through onnxruntime; which one is the first, CUDA_VISIBLE_DEVICES chooses."""

    provider, kind, index = "CUDAExecutionProvider", "cuda", 0

    def __init__(self, ort: Any) -> None:
        self._value = ort.OrtValue

    def empty(self, dtype: str, shape: Shape) -> DeviceArray:
        try:
            value = self._value.ortvalue_from_shape_and_type(shape, ELEMENTS[dtype], self.kind, self.index)
        except Exception as error:  # onnxruntime's have no base of their own
            raise BackendUnavailable(
                f"the GPU gives no {prod(shape) * WIDTHS[dtype]:,} bytes for an array {list(shape)} "
                f"({' '.join(str(error).split())}): decode fewer sources at once (batch_tokens), with fewer beams"
            ) from error
        return DeviceArray(value, dtype, shape)

    def copied_in(self, array: Array) -> DeviceArray:
        value = self._value.ortvalue_from_numpy(np.ascontiguousarray(array), self.kind, self.index)
        return DeviceArray(value, str(array.dtype), array.shape)

    def feed(self, binding: Any, name: str, array: Array) -> None:
        # Bound anew each time: onnxruntime copies when a value is bound, to where the graph reads it. That may be the
        # host, as of positions, which attention kernels are launched with.
        binding.bind_ortvalue_input(name, self._value.ortvalue_from_numpy(array))

    def fetched(self, array: Array) -> Any:
        # A value on the host: onnxruntime copies to it when the graph has run.
        return self._value.ortvalue_from_numpy(array)


class DeviceMemory:
    """State and sources on a device; with ``alternates`` a step writes another set than it reads."""

    def __init__(
        self, device: OrtDevice, spec: ModelSpec, open_session: Callable[[bytes], Any], *, alternates: bool
    ) -> None:
        self.device, self._spec, self._alternates = device, spec, alternates
        self._read = (spec.source, spec.source_mask, *spec.memory)
        self._host = frozenset(one.name for one in spec.length_log_probs)
        self._rows_of_sources = open_session(row_graph(self._read))
        if spec.state:
            self._rows_of_state, self._zero = open_session(row_graph(spec.past)), open_session(zero_graph(spec.past))

    def encoded(self, encoder: Any, feeds: dict[str, Array]) -> dict[str, Held]:
        given = {name: self.device.copied_in(array) for name, array in feeds.items()}
        binding = encoder.io_binding()
        for name, one in given.items():
            bind_input(self.device, binding, name, one, len(one))
        for made in self._spec.encoder_outputs():
            if made.name in self._host:
                binding.bind_output(made.name, "cpu")
            else:
                binding.bind_output(made.name, self.device.kind, self.device.index)
        encoder.run_with_iobinding(binding)
        found = zip(self._spec.encoder_outputs(), binding.get_outputs(), strict=True)
        return {**given, **{made.name: self._held(made, value) for made, value in found}}

    def zeros(self, shapes: Sequence[Shape]) -> Buffers:
        # One row goes nowhere, unless a graph cannot write where it reads.
        n_sets = 2 if self._alternates or any(shape[0] > 1 for shape in shapes) else 1
        sets = [
            [self.device.empty(one.dtype, shape) for one, shape in zip(self._spec.state, shapes, strict=True)]
            for _ in range(n_sets)
        ]
        buffers = Buffers(sets)
        self.clear(buffers, shapes[0][0] if shapes else 0)
        return buffers

    def moved(self, buffers: Buffers, turn: int, rows: Rows, before: int) -> int:
        if rows.tolist() == list(range(before)) or not self._spec.state:
            return turn
        other = 1 - turn
        inputs, outputs = (
            dict(zip((one.name for one in self._spec.past), buffers.sets[index], strict=True))
            for index in (turn, other)
        )
        self._gather(self._rows_of_state, inputs, outputs, rows, before)
        return other

    def kept(self, sources: dict[str, Held], kept: Rows) -> dict[str, Held]:
        there = {name: one for name, one in sources.items() if name not in self._host}
        made = {name: self.device.empty(one.dtype, (len(kept), *one.shape[1:])) for name, one in there.items()}
        batch = len(sources[self._spec.source_mask.name])
        self._gather(self._rows_of_sources, there, made, kept, batch)
        return {**made, **{name: sources[name][kept] for name in self._host}}

    def clear(self, buffers: Buffers, rows: int) -> None:
        if not rows or not self._spec.state:
            return
        for arrays in buffers.sets:
            binding = self._zero.io_binding()
            for one, array in zip(self._spec.past, arrays, strict=True):
                shape = np.array([rows, *array.shape[1:]], np.int64)
                self.device.feed(binding, shape_name(one.name), shape)
                bind_output(self.device, binding, one.name, array, rows)
            self._zero.run_with_iobinding(binding)

    def _held(self, made: TensorSpec, value: Any) -> Held:
        if made.name in self._host:
            return value.numpy()
        return DeviceArray(value, made.dtype, tuple(value.shape()))

    def _gather(
        self,
        session: Any,
        inputs: Mapping[str, DeviceArray],
        outputs: Mapping[str, DeviceArray],
        rows: Rows,
        before: int,
    ) -> None:
        """Write rows of arrays, of which the first ``before`` are used, to the beginning of others."""
        binding = session.io_binding()
        self.device.feed(binding, ROWS, rows)
        for name, array in inputs.items():
            bind_input(self.device, binding, name, array, before)
            bind_output(self.device, binding, gathered_name(name), outputs[name], len(rows))
        session.run_with_iobinding(binding)


class DeviceBinder(Binder):
    """Binds state on a device: by address, because a step is given the first rows of a buffer."""

    def __init__(self, ort: Any, spec: ModelSpec, device: OrtDevice, *, branches: bool, alternates: bool) -> None:
        super().__init__(ort, spec, branches=branches)
        self._device, self._alternates = device, alternates
        self._result = device.fetched
        # What crosses the bus is what is wanted, and nothing that comes for free on a host.
        for want in (Want.LOGITS, Want.TOPK):
            self._results[want] = tuple(one for one in self._results[want] if one not in spec.hidden)

    def values(self, arrays: dict[str, Held]) -> dict[str, Any]:
        return {name: one.value for name, one in arrays.items() if name in self._read}

    def _made(self, decoder: Any, buffers: Buffers, rows: int, steps: int, want: Want) -> Bound:
        tokens = np.empty((rows, steps), np.int64)
        fed = {self._tokens: tokens, self._position: buffers.position}
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
        return Bound(tokens, StepOut(), bindings, fed={name: fed[name] for name in fed if name in self._read})


def bind_input(device: OrtDevice, binding: Any, name: str, array: DeviceArray, rows: int) -> None:
    """Let a graph read the first rows of an array."""
    binding.bind_input(name, device.kind, device.index, ELEMENTS[array.dtype], *_first(array, rows))


def bind_output(device: OrtDevice, binding: Any, name: str, array: DeviceArray, rows: int) -> None:
    """Let a graph write the first rows of an array."""
    binding.bind_output(name, device.kind, device.index, ELEMENTS[array.dtype], *_first(array, rows))


def _first(array: DeviceArray, rows: int) -> tuple[list[int], int]:
    return [rows, *array.shape[1:]], array.value.data_ptr()
