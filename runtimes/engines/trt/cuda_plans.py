"""TensorRT's side of a plan, with only what TensorRT 10.16, 11.4 and TensorRT-RTX 1.7 have in common."""

import logging
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatdeploy.errors import BundleError, DeviceFailed, in_one_line
from fatdeploy.plans import PlanRecord
from fatdeploy.runtimes.engines.contract import GraphTensor
from fatdeploy.runtimes.engines.element_types import dtype_from_tensorrt
from fatdeploy.runtimes.engines.trt.device import Shape

if TYPE_CHECKING:
    from fatdeploy.runtimes.engines.trt.cuda import TrtCudaDevice

log = logging.getLogger("fatdeploy")

MOST_KEPT = 20


class ErrorMessages:
    """TensorRT's error messages, kept for the exception that we raise; other messages go to the log."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=MOST_KEPT)

    def hear(self, level: int, message: str) -> None:
        """Receive a message from TensorRT's logger."""
        if level >= logging.ERROR:
            self._kept.append(" ".join(message.split()))
        log.log(logging.INFO if level == logging.WARNING else logging.DEBUG, "TensorRT: %s", message)

    def clear(self) -> None:
        """Forget earlier messages."""
        self._kept.clear()

    def text(self) -> str:
        """Return the messages since the last time, and forget them."""
        text = "; ".join(self._kept) or "TensorRT gives no reason"
        self._kept.clear()
        return text


class CudaPlan:
    """A plan in the memory of a GPU. Its contexts share their working memory, so they never run at once."""

    def __init__(
        self,
        device: "TrtCudaDevice",
        tensorrt: Any,
        runtime: Any,
        errors: ErrorMessages,
        path: Path,
        record: PlanRecord,
    ) -> None:
        self._device, self._tensorrt, self._errors = device, tensorrt, errors
        self._name = record.file
        errors.clear()
        self._engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise BundleError(
                f"{path} cannot be loaded by {record.flavour} {device.here.version}: {errors.text()}. "
                f"Build it again on this machine: fatdeploy build {path.parent.parent}"
            )
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        self.tensors = tuple(self._tensor(name) for name in names)
        on_host = [name for name in names if self._engine.get_tensor_location(name) != tensorrt.TensorLocation.DEVICE]
        if on_host:
            raise BundleError(in_one_line(f"{path} refused", [f"{name} is read on the host" for name in on_host]))
        self._scratch_bytes = max(1, int(self._engine.device_memory_size_v2))
        self._scratch = device.allocate(self._scratch_bytes)

    def _tensor(self, name: str) -> GraphTensor:
        engine, modes = self._engine, self._tensorrt.TensorIOMode
        return GraphTensor(
            name,
            "input" if engine.get_tensor_mode(name) == modes.INPUT else "output",
            dtype_from_tensorrt(engine.get_tensor_dtype(name).name),
            tuple(engine.get_tensor_shape(name)),
        )

    @property
    def n_profiles(self) -> int:
        return int(self._engine.num_optimization_profiles)

    def profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        least, usual, most = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, profile))
        return least, usual, most

    def aliased(self, name: str) -> str | None:
        return self._engine.get_aliased_input_tensor(name) or None

    def context(self, profile: int) -> "CudaContext":
        self._errors.clear()
        context = self._engine.create_execution_context(self._tensorrt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise DeviceFailed(f"TensorRT cannot prepare {self._name}: {self._errors.text()}")
        stream = int(self._device.stream)
        if not context.set_optimization_profile_async(profile, stream):
            raise DeviceFailed(f"{self._name} has no profile {profile} to run in: {self._errors.text()}")
        # The profile is active once the stream has reached it.
        self._device.synchronise()
        context.set_device_memory(self._scratch, self._scratch_bytes)
        inputs = {tensor.name for tensor in self.tensors if tensor.kind == "input"}
        return CudaContext(context, self._errors, inputs, stream)

    def close(self) -> None:
        self._engine = None
        self._device.free(self._scratch)


class CudaContext:
    """An execution context of TensorRT."""

    def __init__(self, context: Any, errors: ErrorMessages, inputs: set[str], stream: int) -> None:
        self._context, self._errors, self._inputs, self._stream = context, errors, inputs, stream
        self._checked = False

    def bind(self, name: str, shape: Shape, address: int) -> None:
        if name in self._inputs and not self._context.set_input_shape(name, shape):
            profile = self._context.active_optimization_profile
            raise DeviceFailed(f"profile {profile} does not take {name} {list(shape)}: {self._errors.text()}")
        if not self._context.set_tensor_address(name, address):
            raise DeviceFailed(f"TensorRT refuses {name} at address {address:#x}: {self._errors.text()}")

    def execute(self) -> None:
        if not self._checked:
            missing = self._context.infer_shapes()
            if missing:
                raise DeviceFailed(f"TensorRT cannot infer shapes from {', '.join(missing)}: {self._errors.text()}")
            self._checked = True
        if not self._context.execute_async_v3(self._stream):
            raise DeviceFailed(f"TensorRT does not run the plan: {self._errors.text()}")

    def close(self) -> None:
        self._context = None
