"""The CUDA devices of this machine, read from NVIDIA's driver directly, without any CUDA package."""

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# From cuda.h: the result for "no device", and the attributes that hold the two halves of the compute capability.
NO_DEVICE = 100
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True)
class CudaDevice:
    """One GPU as its driver describes it."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Cuda:
    """What the driver answered: the newest CUDA it runs and its devices, or why there are none."""

    version: str | None = None
    devices: tuple[CudaDevice, ...] = ()
    reason: str | None = None
    # True if a driver is installed and does not work; a machine without a driver or device is fine.
    broken: bool = False


class DriverError(Exception):
    """A function of the driver is missing, or did not return success."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """The driver's C functions, each with its result checked."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def call(self, function: str, *arguments: Any) -> None:
        if not hasattr(self.library, function):
            raise DriverError(f"the CUDA driver has no function {function}")
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            raise DriverError(f"{function} returned {code} ({self.error_name(code)})", code)

    def error_name(self, code: int) -> str:
        name = ctypes.c_char_p()
        if hasattr(self.library, "cuGetErrorName"):
            self.library.cuGetErrorName(code, ctypes.byref(name))
        return name.value.decode() if name.value else "no name"

    def number(self, function: str, *arguments: Any) -> int:
        """Return the int that a function writes to its first argument."""
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def version(self) -> str:
        number = self.number("cuDriverGetVersion")  # 12080 is CUDA 12.8
        return f"{number // 1000}.{number % 1000 // 10}"

    def device(self, index: int) -> CudaDevice:
        handle = self.number("cuDeviceGet", index)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), handle)
        memory = ctypes.c_size_t()
        # Without _v2 it is the old 32-bit function, which the library still has.
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        return CudaDevice(
            index=index,
            name=name.value.decode(errors="replace"),
            compute_capability=(
                self.number("cuDeviceGetAttribute", CAPABILITY_MAJOR, handle),
                self.number("cuDeviceGetAttribute", CAPABILITY_MINOR, handle),
            ),
            memory_bytes=memory.value,
        )


def cuda_here(library: str = DRIVER) -> Cuda:
    """Return what the CUDA driver of this machine reports; failures are part of the result."""
    try:
        driver = Driver(ctypes.CDLL(library))
    except OSError:
        return Cuda(reason=f"no CUDA driver ({library}) here")
    version = None
    try:
        # First, because the driver reports its version even if cuInit fails.
        version = driver.version()
        driver.call("cuInit", 0)
        devices = tuple(driver.device(index) for index in range(driver.number("cuDeviceGetCount")))
    except DriverError as error:
        return Cuda(version, reason=str(error), broken=error.code != NO_DEVICE)
    return Cuda(version, devices, None if devices else "the CUDA driver finds no device")
