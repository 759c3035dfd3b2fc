"""TensorRT and TensorRT-RTX behind one name: the module of each, and the one logger that its objects share."""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

from fatdeploy.errors import BackendUnavailable
from fatdeploy.runtimes.doctor.packages import TENSORRT, TENSORRT_RTX, Package
from fatdeploy.targets import Flavour

Listener = Callable[[int, str], None]

BUILDERS: dict[Flavour, Package] = {"tensorrt": TENSORRT, "tensorrt-rtx": TENSORRT_RTX}
LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}

log = logging.getLogger("fatdeploy")

_listeners: list[Listener] = []
_changing = Lock()


def tensorrt_module(flavour: Flavour) -> Any:
    """Return the Python module of TensorRT or TensorRT-RTX."""
    package = BUILDERS[flavour]
    try:
        return importlib.import_module(package.module)
    except ImportError as error:
        raise BackendUnavailable(
            f"needs {flavour}, which cannot be imported here ({error}): pip install 'fatdeploy[{package.extra}]'"
        ) from error


@cache
def logger_of(flavour: Flavour) -> Any:
    """Return the logger for all objects of a flavour: TensorRT keeps the first that it is given, whatever comes."""
    module = tensorrt_module(flavour)

    class Logger(module.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            module.ILogger.__init__(self)  # pybind11 asks for it by this name

        def log(self, severity: Any, message: str) -> None:
            heard(LEVELS[severity.name], message)

    return Logger()


def heard(level: int, message: str) -> None:
    """Give a message to whoever listens; nobody does: to the log of fatdeploy."""
    with _changing:
        listeners = tuple(_listeners)
    for listen in listeners or (log.log,):
        listen(level, message)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a listener hear what TensorRT says meanwhile, on any thread."""
    with _changing:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _changing:
            _listeners.remove(listener)
