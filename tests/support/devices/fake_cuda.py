"""Fakes of the CUDA and TensorRT modules on the test device: only the functions our code calls.

They run without a GPU. A test fails if they have a name that TensorRT does not have.
"""

# ruff: noqa: N801, N802, N815
# The names are CUDA's.

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from fatdeploy.errors import DeviceFailed, OutOfDeviceMemory
from fatdeploy.runtimes.engines.row_moves import Strips
from fatdeploy.runtimes.engines.trt.device import Bytes
from tests.support.devices.cpu import MAGIC, CpuContext, CpuDevice, CpuPlan, Opened, Timed


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700


OK = (cudaError_t.cudaSuccess,)
Kinds = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)


class FakeCuda:
    """The functions of ``cuda.bindings.runtime``: each returns a code and its result."""

    cudaError_t = cudaError_t
    cudaMemcpyKind = Kinds
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2

    def __init__(self, device: CpuDevice, count: int = 1, code: cudaError_t = cudaError_t.cudaSuccess) -> None:
        self.device, self.count, self.code = device, count, code
        self.pinned: dict[int, Any] = {}
        self.lost = False  # every call fails from now on, as after an illegal access

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return (self.code, self.count)

    def cudaGetErrorString(self, code: cudaError_t) -> tuple[Any, ...]:
        return (*OK, b"what CUDA says of it")

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return (*OK, {75: 8, 76: 9}[attribute])

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        return (*OK, SimpleNamespace(name=b"test GPU\0\0"))

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return (*OK, 4242)

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        return OK

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return OK

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        try:
            return (*OK, self.device.allocate(size))
        except OutOfDeviceMemory:
            return (cudaError_t.cudaErrorMemoryAllocation, None)

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        self.device.free(address)
        return OK

    def cudaMallocHost(self, size: int) -> tuple[Any, ...]:
        buffer = ctypes.create_string_buffer(size)
        self.pinned[ctypes.addressof(buffer)] = buffer
        return (*OK, ctypes.addressof(buffer))

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        del self.pinned[address]
        return OK

    def _host(self, address: int, size: int) -> Bytes:
        """Return host memory, which must be pinned."""
        for start, buffer in self.pinned.items():
            if start <= address and address + size <= start + len(buffer):
                return np.frombuffer(buffer, np.uint8)[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} are not pinned")

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[Any, ...]:
        assert stream == 4242
        if kind == Kinds.cudaMemcpyHostToDevice:
            self.device.upload(to, self._host(source, size))
        elif kind == Kinds.cudaMemcpyDeviceToHost:
            self.device.download(self._host(to, size), source)
        else:
            self.device.move(to, source, Strips(size, size, 1))
        return OK

    def cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int
    ) -> tuple[Any, ...]:
        assert (stream, kind, to_pitch) == (4242, Kinds.cudaMemcpyDeviceToDevice, pitch)
        self.device.move(to, source, Strips(width, pitch, height))
        return OK

    def cudaMemsetAsync(self, address: int, value: int, count: int, stream: int) -> tuple[Any, ...]:
        assert (stream, value) == (4242, 0)
        self.device.zero(address, count)
        return OK

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return (*OK, Opened(self.device))

    def cudaEventCreate(self) -> tuple[Any, ...]:
        return (*OK, Timed(self.device))

    def cudaEventElapsedTime(self, start: Timed, end: Timed) -> tuple[Any, ...]:
        return (*OK, 1e3 * end.seconds_since(start))

    def cudaEventRecord(self, event: Opened, stream: int) -> tuple[Any, ...]:
        event.record()
        return OK

    def cudaEventSynchronize(self, event: Opened) -> tuple[Any, ...]:
        event.wait()
        return (cudaError_t.cudaErrorIllegalAddress,) if self.lost else OK

    def cudaEventDestroy(self, event: Opened) -> tuple[Any, ...]:
        event.close()
        return OK

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        assert self.device.recording is None
        self.device.recording = []
        return OK

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        recording, self.device.recording = self.device.recording, None
        return (*OK, recording)

    def cudaGraphInstantiate(self, graph: list[Callable[[], None]], flags: int) -> tuple[Any, ...]:
        return (*OK, self.device.captured(lambda: [self.device.do(work) for work in graph] and None))

    def cudaGraphDestroy(self, graph: list[Callable[[], None]]) -> tuple[Any, ...]:
        return OK

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[Any, ...]:
        graph.launch()
        return OK

    def cudaGraphExecDestroy(self, graph: Any) -> tuple[Any, ...]:
        graph.close()
        return OK


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class TensorIOMode(IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(IntEnum):
    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(IntEnum):
    USER_MANAGED = 2


class DataType(IntEnum):
    FLOAT = 0
    INT64 = 1
    BOOL = 2


DTYPES = {"float32": DataType.FLOAT, "int64": DataType.INT64, "bool": DataType.BOOL}


class ILogger:
    Severity = Severity

    def log(self, severity: Severity, msg: str) -> None: ...


class IExecutionContext:
    def __init__(self, plan: CpuPlan, logger: ILogger) -> None:
        self._plan, self._logger = plan, logger
        self._context: CpuContext | None = None
        self._memory = (0, 0)
        self.active_optimization_profile = -1

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._context, self.active_optimization_profile = self._plan.context(profile_index), profile_index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._plan.device.view(memory, size)
        self._memory = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self._succeeds(lambda: self._context.bind(name, shape, 0))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        # TensorRT infers the shapes of outputs from those of inputs.
        sizes: dict[str, int] = {}
        for spec in self._plan.inputs.values():
            if spec.name in self._context.bound:
                shape, _ = self._context.bound[spec.name]
                sizes |= dict(zip(spec.shape, shape, strict=True))  # type: ignore[arg-type]
        tensor = next(spec for spec in (*self._plan.inputs.values(), *self._plan.outputs) if spec.name == name)
        return self._succeeds(lambda: self._context.bind(name, tensor.sized(sizes), memory))

    def infer_shapes(self) -> list[str]:
        return [tensor.name for tensor in self._plan.tensors if tensor.name not in self._context.bound]

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == 4242
        self._plan.device.view(*self._memory)
        return self._succeeds(self._context.execute)

    def _succeeds(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except DeviceFailed as error:
            self._logger.log(Severity.ERROR, str(error))
            return False
        return True

    def __del__(self) -> None:
        if self._context is not None:
            self._context.close()


class ICudaEngine:
    def __init__(self, plan: CpuPlan, logger: ILogger) -> None:
        self._plan, self._logger = plan, logger
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self.num_io_tensors = len(plan.tensors)
        self.num_optimization_profiles = plan.n_profiles
        self.device_memory_size_v2 = 4096

    def get_tensor_name(self, index: int) -> str:
        return self._plan.tensors[index].name

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self._tensors[name].kind == "input" else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DTYPES[self._tensors[name].dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return list(self._plan.profile_shapes(name, profile_index))

    def get_aliased_input_tensor(self, name: str) -> str:
        return self._plan.aliased(name) or ""

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext:
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self._plan, self._logger)

    def __del__(self) -> None:
        self._plan.close()


class Runtime:
    _device: CpuDevice

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        plans = self._device.bundle.manifest.plans
        records = [record for record in plans if serialized_engine == MAGIC + record.part.encode()]
        if not records:
            self._logger.log(Severity.ERROR, "Error Code 1:\n  magic tag does not match")
            return None
        return ICudaEngine(CpuPlan(self._device, records[-1]), self._logger)


def fake_tensorrt(device: CpuDevice, version: str) -> SimpleNamespace:
    """Return a module whose plans are those of a device."""
    return SimpleNamespace(
        __version__=version,
        ILogger=ILogger,
        Runtime=type("Runtime", (Runtime,), {"_device": device}),
        ICudaEngine=ICudaEngine,
        IExecutionContext=IExecutionContext,
        TensorIOMode=TensorIOMode,
        TensorLocation=TensorLocation,
        ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
        DataType=DataType,
    )
