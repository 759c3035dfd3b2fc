"""TensorRT's side of a plan: only what its Python packages 10.16, 11.4 and TensorRT-RTX 1.7 have in common."""

import logging
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fatdeploy.errors import BundleError, DeviceFailed, in_one_line
from fatdeploy.plans import PlanRecord
from fatdeploy.runtimes.device import PlanTensor, Shape

if TYPE_CHECKING:
    from fatdeploy.runtimes.cuda_device import CudaDevice

log = logging.getLogger("fatdeploy")

# TensorRT's names of element types; one that is not here is in no contract of ours.
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT8": "int8", "BOOL": "bool"}
MOST_KEPT = 20


def logger_of(tensorrt: Any) -> Any:
    """Return a logger that keeps TensorRT's errors for ours, and gives the rest to the logger of fatdeploy."""
    levels = {
        tensorrt.ILogger.Severity.INTERNAL_ERROR: logging.DEBUG,
        tensorrt.ILogger.Severity.ERROR: logging.DEBUG,  # said by the error that it causes
        tensorrt.ILogger.Severity.WARNING: logging.INFO,
        tensorrt.ILogger.Severity.INFO: logging.DEBUG,
    }
    errors = (tensorrt.ILogger.Severity.INTERNAL_ERROR, tensorrt.ILogger.Severity.ERROR)

    class Logger(tensorrt.ILogger):  # type: ignore[misc]
        """What TensorRT says."""

        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=MOST_KEPT)

        def log(self, severity: Any, said: str) -> None:
            if severity in errors:
                self.errors.append(" ".join(said.split()))
            if severity in levels:
                log.log(levels[severity], "TensorRT: %s", said)

        def taken(self) -> str:
            """Return the errors since this was asked last."""
            said = "; ".join(self.errors) or "it gives no reason"
            self.errors.clear()
            return said

    return Logger()


class CudaPlan:
    """A plan in the memory of a GPU. Its contexts share the memory that they work in: they never run at once."""

    def __init__(
        self, device: "CudaDevice", tensorrt: Any, runtime: Any, logger: Any, path: Path, record: PlanRecord
    ) -> None:
        self._device, self._tensorrt, self._logger = device, tensorrt, logger
        self._name = record.file
        logger.errors.clear()
        self._engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise BundleError(
                f"{path} cannot be loaded by {record.flavour} {device.here.version}: {logger.taken()}. "
                f"Build it again on this machine: fatdeploy build {path.parent.parent}"
            )
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        self.tensors = tuple(self._tensor(name) for name in names)
        on_host = [name for name in names if self._engine.get_tensor_location(name) != tensorrt.TensorLocation.DEVICE]
        if on_host:
            raise BundleError(in_one_line(f"{path} refused", [f"{name} is read on the host" for name in on_host]))
        self._scratch_bytes = max(1, int(self._engine.device_memory_size_v2))
        self._scratch = device.allocate(self._scratch_bytes)

    def _tensor(self, name: str) -> PlanTensor:
        engine, modes = self._engine, self._tensorrt.TensorIOMode
        kind: Literal["input", "output"] = "input" if engine.get_tensor_mode(name) == modes.INPUT else "output"
        dtype = engine.get_tensor_dtype(name).name
        return PlanTensor(name, kind, DTYPES.get(dtype, dtype), tuple(engine.get_tensor_shape(name)))

    @property
    def n_profiles(self) -> int:
        return int(self._engine.num_optimization_profiles)

    def profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        least, usual, most = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, profile))
        return least, usual, most

    def aliased(self, name: str) -> str | None:
        return self._engine.get_aliased_input_tensor(name) or None

    def context(self, profile: int) -> "CudaContext":
        self._logger.errors.clear()
        context = self._engine.create_execution_context(self._tensorrt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise DeviceFailed(f"{self._name} cannot be made ready to run: {self._logger.taken()}")
        stream = int(self._device.stream)
        if not context.set_optimization_profile_async(profile, stream):
            raise DeviceFailed(f"{self._name} has no profile {profile} to run in: {self._logger.taken()}")
        # The profile is there when the stream has come to it.
        self._device.synchronise()
        context.set_device_memory(self._scratch, self._scratch_bytes)
        return CudaContext(context, self._logger, {one.name for one in self.tensors if one.kind == "input"}, stream)

    def close(self) -> None:
        self._engine = None
        self._device.free(self._scratch)


class CudaContext:
    """An execution context of TensorRT."""

    def __init__(self, context: Any, logger: Any, inputs: set[str], stream: int) -> None:
        self._context, self._logger, self._inputs, self._stream = context, logger, inputs, stream
        self._checked = False

    def bind(self, name: str, shape: Shape, address: int) -> None:
        if name in self._inputs and not self._context.set_input_shape(name, shape):
            profile = self._context.active_optimization_profile
            raise DeviceFailed(f"profile {profile} does not take {name} {list(shape)}: {self._logger.taken()}")
        if not self._context.set_tensor_address(name, address):
            raise DeviceFailed(f"{name} cannot stand at {address:#x}: {self._logger.taken()}")

    def execute(self) -> None:
        if not self._checked:
            missing = self._context.infer_shapes()
            if missing:
                raise DeviceFailed(f"shapes do not follow from {', '.join(missing)}: {self._logger.taken()}")
            self._checked = True
        if not self._context.execute_async_v3(self._stream):
            raise DeviceFailed(f"TensorRT does not run it: {self._logger.taken()}")

    def close(self) -> None:
        self._context = None
