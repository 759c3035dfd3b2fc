"""Where tensors stand in one piece of memory, on the device and on the host alike."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.trt.device import ALIGNMENT, Bytes, Device
from fatdeploy.spec import TensorSpec

# Of bfloat16 numpy knows no size.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int8": 1, "bool": 1}


def n_bytes(tensor: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Return how much memory a tensor takes."""
    return math.prod(tensor.sized(sizes)) * ITEM_BYTES[tensor.dtype]


def laid_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return where each part of so many bytes begins, one behind the other, and how long they are together."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-max(1, size) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class Slab:
    """Device memory of several tensors, allocated at once: it is there as a whole or not at all."""

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        self._device = device
        self.offsets, self.n_bytes = laid_out(sizes)
        self.address = device.allocate(self.n_bytes)
        self._open = True

    def place(self, name: str) -> int:
        """Return the address of a tensor."""
        return self.address + self.offsets[name]

    def close(self) -> None:
        """Give the memory back."""
        if self._open:
            self._open = False
            self._device.free(self.address)


class HostArrays:
    """Arrays in one pinned buffer, each where ``Slab`` would put its tensor."""

    def __init__(self, device: Device, tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> None:
        self._sizes = {one.name: n_bytes(one, sizes) for one in tensors}
        self._offsets, size = laid_out(self._sizes)
        self.buffer: Bytes = device.pinned(size) if size else np.empty(0, np.uint8)
        self.arrays: dict[str, NDArray[Any]] = {
            one.name: self.bytes_of(one.name).view(one.dtype).reshape(one.sized(sizes)) for one in tensors
        }

    def bytes_of(self, name: str) -> Bytes:
        """Return the bytes of one array."""
        start = self._offsets[name]
        return self.buffer[start : start + self._sizes[name]]
