"""What an engine asks of a GPU, and nothing more: memory, copies, plans and recorded work, all on one stream."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fatdeploy.plans import PlanRecord
from fatdeploy.targets import Flavour

Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]

# Where TensorRT wants a tensor to begin.
ALIGNMENT = 256


@dataclass(frozen=True)
class GpuIdentity:
    """What plans must have been built for, to run here."""

    name: str  # of the GPU
    flavour: Flavour
    version: str  # of the package
    compute_capability: str


@dataclass(frozen=True)
class Strips:
    """Equally long runs of bytes at equal distances: the written part of a row of a cache; one run is a whole row."""

    width: int
    pitch: int
    count: int


@dataclass(frozen=True)
class PlanTensor:
    """An input or output of a plan as the plan itself says it; -1 is an axis whose size a call chooses."""

    name: str
    kind: Literal["input", "output"]
    dtype: str
    shape: Shape


class DeviceEvent(Protocol):
    """A place in the stream that a thread can wait for."""

    def record(self) -> None:
        """Put it behind everything that was asked for so far."""
        ...

    def wait(self) -> None:
        """Return when all before it is done; what went wrong until then is DeviceFailed."""
        ...

    def close(self) -> None: ...


class TimedEvent(DeviceEvent, Protocol):
    """An event that knows when it was passed."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the time between two that were passed."""
        ...


class DeviceGraph(Protocol):
    """Work that was recorded, at the addresses that it had then."""

    def launch(self) -> None:
        """Do it once more."""
        ...

    def close(self) -> None: ...


class Context(Protocol):
    """One way to run a plan: a profile, a shape of every input, an address of every tensor."""

    def bind(self, name: str, shape: Shape, address: int) -> None:
        """Say where a tensor stands and how large it is; a shape that the profile does not take is DeviceFailed."""
        ...

    def execute(self) -> None:
        """Ask for one run."""
        ...

    def close(self) -> None: ...


class DevicePlan(Protocol):
    """A plan that was loaded."""

    @property
    def tensors(self) -> tuple[PlanTensor, ...]:
        """All inputs and outputs."""
        ...

    @property
    def n_profiles(self) -> int: ...

    def profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        """Return the least, the usual and the largest shape of an input."""
        ...

    def aliased(self, name: str) -> str | None:
        """Return the input whose memory an output must be written to, where the plan asks for it."""
        ...

    def context(self, profile: int) -> Context:
        """Return a new way to run it. Contexts share working memory: one stream runs them one after another."""
        ...

    def close(self) -> None: ...


class Device(Protocol):
    """One GPU and one stream. Whoever calls takes care that no two threads do so at once, but to wait for events.

    Everything that is asked for happens in that order, and later; ``DeviceEvent`` tells when.
    """

    @property
    def here(self) -> GpuIdentity: ...

    def allocate(self, n_bytes: int) -> int:
        """Return the address of new memory, a multiple of ALIGNMENT; OutOfDeviceMemory if none is left."""
        ...

    def free(self, address: int) -> None:
        """Give memory back once all that was asked for is done."""
        ...

    def pinned(self, n_bytes: int) -> Bytes:
        """Return host memory that the device reads and writes by itself; it is freed after its last view is gone."""
        ...

    def upload(self, address: int, host: Bytes) -> None: ...

    def download(self, host: Bytes, address: int) -> None: ...

    def move(self, address: int, source: int, strips: Strips) -> None:
        """Copy strips of one place on the device to another; they do not overlap."""
        ...

    def zero(self, address: int, n_bytes: int) -> None: ...

    def event(self) -> DeviceEvent: ...

    def timed_event(self) -> TimedEvent: ...

    def load(self, path: Path, record: PlanRecord) -> DevicePlan:
        """Return a plan of a file; one that is damaged is a BundleError."""
        ...

    def captured(self, work: Callable[[], None]) -> DeviceGraph:
        """Return what ``work`` asks for as a recording; nothing of it is done yet."""
        ...

    def synchronise(self) -> None:
        """Return when all that was asked for is done."""
        ...

    def close(self) -> None: ...
