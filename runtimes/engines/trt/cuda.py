"""A real GPU behind the device interface: CUDA through cuda.bindings, plans through TensorRT or TensorRT-RTX."""

import importlib
import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fatdeploy.errors import BackendUnavailable, DeviceFailed, OutOfDeviceMemory, in_one_line
from fatdeploy.plans import PlanRecord
from fatdeploy.runtimes.doctor.cuda_driver import cuda_here
from fatdeploy.runtimes.doctor.packages import CUDA_PYTHON, install_command, installed_versions
from fatdeploy.runtimes.engines.row_moves import Strips
from fatdeploy.runtimes.engines.trt.cuda_plans import CudaPlan, ErrorMessages
from fatdeploy.runtimes.engines.trt.device import Bytes, GpuIdentity
from fatdeploy.runtimes.engines.trt.modules import listening, logger_of, tensorrt_module
from fatdeploy.targets import Flavour

log = logging.getLogger("fatdeploy")

# CUDA_VISIBLE_DEVICES chooses another one: CUDA remembers the device per thread, and threads come and go.
DEVICE = 0


def opened_device(flavour: Flavour) -> "TrtCudaDevice":
    """Return the GPU of this machine; raise with everything that plans of a flavour lack, and what to type."""
    reasons: list[str] = []
    cuda = tensorrt = None
    try:
        cuda = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        advice = install_command(CUDA_PYTHON, installed_versions())
        reasons.append(f"{CUDA_PYTHON.name} cannot be imported ({error}): {advice}")
    # Checked before TensorRT is imported: without a device it may end the process.
    no_device = cuda_here().reason if cuda is None else _no_device(cuda)
    if no_device:
        reasons.append(no_device)
    else:
        try:
            tensorrt = tensorrt_module(flavour)
        except BackendUnavailable as error:
            reasons.append(str(error))
    if cuda is None or tensorrt is None:
        raise BackendUnavailable(
            in_one_line(f"plans of {flavour} cannot run here", reasons)
            + ". See what this machine can do: fatdeploy doctor; for its CPU: fatdeploy export SOURCE --out DIR"
        )
    return TrtCudaDevice(cuda, tensorrt, flavour)


def _no_device(cuda: Any) -> str | None:
    code, count = cuda.cudaGetDeviceCount()
    if code != cuda.cudaError_t.cudaSuccess:
        return f"CUDA finds no GPU: {described(cuda, code)}"
    return None if count else "CUDA finds no GPU"


def described(cuda: Any, code: Any) -> str:
    """Return CUDA's name and description of a result code."""
    _, text = cuda.cudaGetErrorString(code)
    return f"{code.name}, {text.decode() if isinstance(text, bytes) else text}"


class Pinned:
    """Host memory that the device reads and writes; numpy keeps this object alive as long as a view of it exists."""

    def __init__(self, address: int, n_bytes: int, on_free: Callable[[int], None]) -> None:
        self._address, self._on_free = address, on_free
        self.__array_interface__ = {"data": (address, False), "shape": (n_bytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._on_free(self._address)


class TrtCudaDevice:
    """One GPU and one of its streams."""

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
        self.here = GpuIdentity(name, flavour, tensorrt.__version__, f"{major}.{minor}")
        self.stream = self.called("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._errors = ErrorMessages()
        self._listening = ExitStack()
        self._listening.enter_context(listening(self._errors.hear))
        self._runtime = tensorrt.Runtime(logger_of(flavour))
        self._unpinned: deque[int] = deque()
        self._closed = False

    def called(self, function: str, *arguments: Any) -> Any:
        """Return what a CUDA function returns beside its code; raise DeviceFailed unless the code is success."""
        code, *results = getattr(self._cuda, function)(*arguments)
        if code == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            raise OutOfDeviceMemory(f"{function} {list(arguments)}: {described(self._cuda, code)}; pass less at once")
        if code != self._cuda.cudaError_t.cudaSuccess:
            raise DeviceFailed(f"{function}: {described(self._cuda, code)}")
        return results[0] if results else None

    def tidied(self, function: str, *arguments: Any) -> None:
        """Call a function that frees something; after a failure of the device it fails too, and that is only logged."""
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
        return np.asarray(Pinned(address, n_bytes, self._free_later))

    def _free_later(self, address: int) -> None:
        """Free at the next allocation: the last view may be dropped during a recording, which forbids freeing."""
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

    def timed_event(self) -> "CudaTimedEvent":
        return CudaTimedEvent(self, self.called("cudaEventCreate"))

    def load(self, path: Path, record: PlanRecord) -> CudaPlan:
        return CudaPlan(self, self._tensorrt, self._runtime, self._errors, path, record)

    def captured(self, work: Callable[[], None]) -> "CudaGraph":
        # Only this thread: others may wait for their events meanwhile.
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.called("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        except BaseException:
            # The stream must not keep recording.
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
        self._listening.close()
        self.tidied("cudaStreamDestroy", self.stream)


class CudaEvent:
    """A CUDA event that measures no time."""

    def __init__(self, device: TrtCudaDevice, event: Any) -> None:
        self._device, self._event = device, event

    def record(self) -> None:
        self._device.called("cudaEventRecord", self._event, self._device.stream)

    def wait(self) -> None:
        self._device.called("cudaEventSynchronize", self._event)

    def close(self) -> None:
        self._device.tidied("cudaEventDestroy", self._event)


class CudaTimedEvent(CudaEvent):
    """A CUDA event that measures time."""

    def seconds_since(self, earlier: "CudaTimedEvent") -> float:
        return float(self._device.called("cudaEventElapsedTime", earlier._event, self._event)) / 1e3


class CudaGraph:
    """A CUDA graph that can be launched."""

    def __init__(self, device: TrtCudaDevice, graph: Any) -> None:
        self._device, self._graph = device, graph

    def launch(self) -> None:
        self._device.called("cudaGraphLaunch", self._graph, self._device.stream)

    def close(self) -> None:
        self._device.tidied("cudaGraphExecDestroy", self._graph)
