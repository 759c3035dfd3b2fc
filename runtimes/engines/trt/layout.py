"""Where tensors are in one block of memory, in the same layout on the device and on the host."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES
from fatdeploy.runtimes.engines.trt.device import ALIGNMENT, Bytes, Device
from fatdeploy.spec import TensorSpec


def n_bytes(tensor: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Return how much memory a tensor takes."""
    return math.prod(tensor.sized(sizes)) * ELEMENT_TYPES[tensor.dtype].n_bytes


def laid_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return where each part of these sizes in bytes begins, one after another, and their total size."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-max(1, size) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class Slab:
    """Device memory of several tensors, allocated as one block: all of it or nothing."""

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        self._device = device
        self.offsets, self.n_bytes = laid_out(sizes)
        self.address = device.allocate(self.n_bytes)
        self._open = True

    def place(self, name: str) -> int:
        """Return the address of a tensor."""
        return self.address + self.offsets[name]

    def close(self) -> None:
        """Free the memory."""
        if self._open:
            self._open = False
            self._device.free(self.address)


class HostArrays:
    """Arrays in one pinned buffer, in the layout that a ``Slab`` of the same tensors has."""

    def __init__(self, device: Device, tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> None:
        self._sizes = {tensor.name: n_bytes(tensor, sizes) for tensor in tensors}
        self._offsets, size = laid_out(self._sizes)
        self.buffer: Bytes = device.pinned(size) if size else np.empty(0, np.uint8)
        self.arrays: dict[str, NDArray[Any]] = {
            tensor.name: self.bytes_of(tensor.name).view(tensor.dtype).reshape(tensor.sized(sizes))
            for tensor in tensors
        }

    def bytes_of(self, name: str) -> Bytes:
        """Return the bytes of an array."""
        start = self._offsets[name]
        return self.buffer[start : start + self._sizes[name]]
