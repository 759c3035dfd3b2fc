"""A real GPU behind the device interface: CUDA through cuda.bindings, plans through TensorRT or TensorRT-RTX."""

import importlib
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fatdeploy.errors import BackendUnavailable, DeviceFailed, OutOfDeviceMemory, in_one_line
from fatdeploy.plans import Flavour, PlanRecord
from fatdeploy.runtimes.cuda_devices import cuda_here
from fatdeploy.runtimes.cuda_plans import CudaPlan, logger_of
from fatdeploy.runtimes.device import Bytes, Here, Strips
from fatdeploy.runtimes.packages import (
    CUDA_PYTHON,
    TENSORRT,
    TENSORRT_RTX,
    Package,
    install_command,
    installed_versions,
)

log = logging.getLogger("fatdeploy")

PACKAGES: dict[Flavour, Package] = {"tensorrt": TENSORRT, "tensorrt-rtx": TENSORRT_RTX}
# Another one is chosen by CUDA_VISIBLE_DEVICES: CUDA remembers a device for each thread, and threads come and go.
DEVICE = 0


def opened_device(flavour: Flavour) -> "CudaDevice":
    """Return the GPU of this machine; whatever is missing for plans of a flavour is said at once, with what to type."""
    package = PACKAGES[flavour]
    reasons: list[str] = []
    cuda = _imported("cuda.bindings.runtime", CUDA_PYTHON, reasons)
    # Asked before TensorRT is: without a device it may end the process.
    no_device = cuda_here().reason if cuda is None else _no_device(cuda)
    if no_device:
        reasons.append(no_device)
    # Of a machine without a GPU its absence is what counts, not that of a package.
    tensorrt = _imported(package.module, package, reasons) if not no_device else None
    if cuda is None or tensorrt is None:
        raise BackendUnavailable(
            in_one_line(f"{flavour} plans cannot run here", reasons)
            + ". See what this machine can do: fatdeploy doctor; for its CPU: fatdeploy export SOURCE --out DIR"
        )
    return CudaDevice(cuda, tensorrt, flavour)


def _imported(name: str, package: Package, reasons: list[str]) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # a library of the system that is not there, or not for it
        advice = install_command(package, installed_versions())
        reasons.append(f"{package.name} cannot be imported ({error}): {advice}")
        return None


def _no_device(cuda: Any) -> str | None:
    code, count = cuda.cudaGetDeviceCount()
    if code != cuda.cudaError_t.cudaSuccess:
        return f"CUDA finds no GPU: {described(cuda, code)}"
    return None if count else "CUDA finds no GPU"


def described(cuda: Any, code: Any) -> str:
    """Return what CUDA calls a result of its own, and says of it."""
    _, said = cuda.cudaGetErrorString(code)
    return f"{code.name}, {said.decode() if isinstance(said, bytes) else said}"


class Pinned:
    """Host memory that the device reads and writes; numpy keeps this object as long as there is a view of it."""

    def __init__(self, address: int, n_bytes: int, gone: Callable[[int], None]) -> None:
        self._address, self._gone = address, gone
        self.__array_interface__ = {"data": (address, False), "shape": (n_bytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._gone(self._address)


class CudaDevice:
    """One GPU and one stream of it."""

    def __init__(self, cuda: Any, tensorrt: Any, flavour: Flavour) -> None:
        self._cuda, self._tensorrt = cuda, tensorrt
        major, minor = (
            self.called("cudaDeviceGetAttribute", attribute, DEVICE)
            for attribute in (
                cuda.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor,
                cuda.cudaDeviceAttr.cudaDevAttrComputeCapabilityMinor,
            )
        )
        name = self.called("cudaGetDeviceProperties", DEVICE).name
        name = name.decode(errors="replace").rstrip("\0") if isinstance(name, bytes) else str(name)
        self.here = Here(name, flavour, tensorrt.__version__, f"{major}.{minor}")
        self.stream = self.called("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._logger = logger_of(tensorrt)
        self._runtime = tensorrt.Runtime(self._logger)
        self._unpinned: deque[int] = deque()
        self._closed = False

    def called(self, function: str, *arguments: Any) -> Any:
        """Return what a function of CUDA returns beside its code; a code that is no success is DeviceFailed."""
        code, *results = getattr(self._cuda, function)(*arguments)
        if code == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            raise OutOfDeviceMemory(
                f"{function} {list(arguments)}: {described(self._cuda, code)}; give it less at once"
            )
        if code != self._cuda.cudaError_t.cudaSuccess:
            raise DeviceFailed(f"{function}: {described(self._cuda, code)}")
        return results[0] if results else None

    def tidied(self, function: str, *arguments: Any) -> None:
        """Call a function that gives something back; after a failure of the device that fails too, and is no news."""
        try:
            self.called(function, *arguments)
        except DeviceFailed as error:
            log.debug("%s", error)

    def allocate(self, n_bytes: int) -> int:
        self._free_unpinned()
        return int(self.called("cudaMalloc", n_bytes))

    def free(self, address: int) -> None:
        self.tidied("cudaFree", address)

    def pinned(self, n_bytes: int) -> Bytes:
        self._free_unpinned()
        address = int(self.called("cudaMallocHost", n_bytes))
        return np.asarray(Pinned(address, n_bytes, self._gone))

    def _gone(self, address: int) -> None:
        """Remember to free: whoever drops the last view may be recording, where freeing is not allowed."""
        self._unpinned.append(address)
        if self._closed:
            self._free_unpinned()

    def _free_unpinned(self) -> None:
        while self._unpinned:
            self.tidied("cudaFreeHost", self._unpinned.popleft())

    def upload(self, address: int, host: Bytes) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.called("cudaMemcpyAsync", address, host.ctypes.data, host.size, kind, self.stream)

    def download(self, host: Bytes, address: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.called("cudaMemcpyAsync", host.ctypes.data, address, host.size, kind, self.stream)

    def move(self, address: int, source: int, strips: Strips) -> None:
        kind, pitch = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice, strips.pitch
        if strips.count == 1:
            self.called("cudaMemcpyAsync", address, source, strips.width, kind, self.stream)
            return
        sizes = (strips.width, strips.count)
        self.called("cudaMemcpy2DAsync", address, pitch, source, pitch, *sizes, kind, self.stream)

    def zero(self, address: int, n_bytes: int) -> None:
        self.called("cudaMemsetAsync", address, 0, n_bytes, self.stream)

    def event(self) -> "CudaEvent":
        return CudaEvent(self, self.called("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming))

    def load(self, path: Path, record: PlanRecord) -> CudaPlan:
        return CudaPlan(self, self._tensorrt, self._runtime, self._logger, path, record)

    def captured(self, work: Callable[[], None]) -> "CudaGraph":
        # Of this thread alone: others may wait for their events meanwhile.
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.called("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            # The stream must not stay in its recording.
            self.tidied("cudaStreamEndCapture", self.stream)
            raise
        graph = self.called("cudaStreamEndCapture", self.stream)
        try:
            return CudaGraph(self, self.called("cudaGraphInstantiate", graph, 0))
        finally:
            self.tidied("cudaGraphDestroy", graph)

    def synchronise(self) -> None:
        self.called("cudaStreamSynchronize", self.stream)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._free_unpinned()
        self._runtime = None
        self.tidied("cudaStreamDestroy", self.stream)


class CudaEvent:
    """An event of CUDA that measures no time."""

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device, self._event = device, event

    def record(self) -> None:
        self._device.called("cudaEventRecord", self._event, self._device.stream)

    def wait(self) -> None:
        self._device.called("cudaEventSynchronize", self._event)

    def close(self) -> None:
        self._device.tidied("cudaEventDestroy", self._event)


class CudaGraph:
    """A CUDA graph that can be launched."""

    def __init__(self, device: CudaDevice, graph: Any) -> None:
        self._device, self._graph = device, graph

    def launch(self) -> None:
        self._device.called("cudaGraphLaunch", self._graph, self._device.stream)

    def close(self) -> None:
        self._device.tidied("cudaGraphExecDestroy", self._graph)
