"""A device for tests: memory that Python does not share, on an available provider, with every copy counted."""

from collections import Counter
from typing import Any

import numpy as np
import onnxruntime

from fatdeploy.bundle import Bundle
from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES
from fatdeploy.runtimes.engines.ort.device_memory import DeviceArray
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions

Value = onnxruntime.OrtValue


class CountingDevice:
    """Behaves like a GPU: its own memory, garbage at first; later changes on the host do not reach bound values."""

    provider, kind, index = "CPUExecutionProvider", "cpu", 0

    def __init__(self) -> None:
        self.allocated = 0  # arrays
        self.copies = Counter[str]()  # to the device, by input name
        self.bytes_in = 0
        self.results: list[np.ndarray] = []  # on the host, written by runs
        self._alive: list[Any] = []

    def empty(self, dtype: str, shape: tuple[int, ...]) -> DeviceArray:
        self.allocated += 1
        value = Value.ortvalue_from_shape_and_type(shape, ELEMENT_TYPES[dtype].onnx, self.kind, self.index)
        if dtype == "float32":
            value.update_inplace(np.full(shape, np.nan, np.float32))
        return DeviceArray(value, dtype, shape)

    def copied_in(self, array: np.ndarray) -> DeviceArray:
        self.bytes_in += array.nbytes
        copy = self.empty(str(array.dtype), array.shape)
        copy.value.update_inplace(np.ascontiguousarray(array))
        return copy

    def feed(self, binding: Any, name: str, array: np.ndarray) -> None:
        self.copies[name] += 1
        self.bytes_in += array.nbytes
        binding.bind_ortvalue_input(name, Value.ortvalue_from_numpy(np.array(array)))

    def fetched(self, array: np.ndarray) -> Any:
        self.results.append(array)
        return Value.ortvalue_from_numpy(array)


def on_device(bundle: Bundle, **keywords: Any) -> OrtEngine:
    """Return an engine whose arrays are on a counting device."""
    return OrtEngine(bundle, OrtOptions(threads=1, **keywords), device=CountingDevice())


def seen(array: DeviceArray) -> np.ndarray:
    """Return a copy of an array on the device."""
    return np.array(array.value.numpy())
