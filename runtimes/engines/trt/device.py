"""What an engine needs from a GPU, and nothing more: memory, copies, plans and recorded work, all on one stream."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fatdeploy.plans import PlanRecord
from fatdeploy.runtimes.engines.contract import GraphTensor
from fatdeploy.runtimes.engines.row_moves import Strips
from fatdeploy.targets import Flavour

Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]

# TensorRT wants every tensor to begin at a multiple of this address.
ALIGNMENT = 256


@dataclass(frozen=True)
class GpuIdentity:
    """The GPU and TensorRT that plans must have been built for to run here."""

    name: str  # of the GPU
    flavour: Flavour
    version: str  # of the package
    compute_capability: str


class DeviceEvent(Protocol):
    """A place in the stream that a thread can wait for."""

    def record(self) -> None:
        """Put it after all work enqueued so far."""
        ...

    def wait(self) -> None:
        """Return when all work before it is done; raise DeviceFailed if any of it failed."""
        ...

    def close(self) -> None: ...


class TimedEvent(DeviceEvent, Protocol):
    """An event that knows when the stream passed it."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the time between two events that the stream has passed."""
        ...


class DeviceGraph(Protocol):
    """Recorded work, at the addresses that it had when it was recorded."""

    def launch(self) -> None:
        """Replay the work."""
        ...

    def close(self) -> None: ...


class Context(Protocol):
    """One way to run a plan: a profile, a shape per input, an address per tensor."""

    def bind(self, name: str, shape: Shape, address: int) -> None:
        """Set the shape and address of a tensor; raise DeviceFailed if the profile does not take the shape."""
        ...

    def execute(self) -> None:
        """Enqueue one run."""
        ...

    def close(self) -> None: ...


class DevicePlan(Protocol):
    """A loaded plan."""

    @property
    def tensors(self) -> tuple[GraphTensor, ...]:
        """All inputs and outputs."""
        ...

    @property
    def n_profiles(self) -> int: ...

    def profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        """Return the least, the usual and the largest shape of an input."""
        ...

    def aliased(self, name: str) -> str | None:
        """Return the input whose memory an output must be written to; None if the plan does not require one."""
        ...

    def context(self, profile: int) -> Context:
        """Return a new context. Contexts share working memory: one stream runs them one after another."""
        ...

    def close(self) -> None: ...


class Device(Protocol):
    """One GPU and one stream. Only one thread may call it at a time, except to wait for events.

    Work is enqueued and done later, in the same order; a ``DeviceEvent`` tells when.
    """

    @property
    def here(self) -> GpuIdentity: ...

    def allocate(self, n_bytes: int) -> int:
        """Return the address of new memory, a multiple of ALIGNMENT; raise OutOfDeviceMemory if none is left."""
        ...

    def free(self, address: int) -> None:
        """Free memory once all enqueued work is done."""
        ...

    def pinned(self, n_bytes: int) -> Bytes:
        """Return host memory that the device can read and write; it is freed after its last view is gone."""
        ...

    def upload(self, address: int, host: Bytes) -> None: ...

    def download(self, host: Bytes, address: int) -> None: ...

    def move(self, address: int, source: int, strips: Strips) -> None:
        """Copy strips from one address of the device to another; they do not overlap."""
        ...

    def zero(self, address: int, n_bytes: int) -> None: ...

    def event(self) -> DeviceEvent: ...

    def timed_event(self) -> TimedEvent: ...

    def load(self, path: Path, record: PlanRecord) -> DevicePlan:
        """Return the plan in a file; raise BundleError if it is damaged."""
        ...

    def captured(self, work: Callable[[], None]) -> DeviceGraph:
        """Record what ``work`` enqueues, without doing it."""
        ...

    def synchronise(self) -> None:
        """Return when all enqueued work is done."""
        ...

    def close(self) -> None: ...
