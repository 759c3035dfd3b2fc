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
_listeners_lock = Lock()


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
    """Return the logger for all objects of a flavour: TensorRT keeps the first logger that it gets."""
    module = tensorrt_module(flavour)

    class Logger(module.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            module.ILogger.__init__(self)  # pybind11 needs the call by this name

        def log(self, severity: Any, message: str) -> None:
            forward(LEVELS[severity.name], message)

    return Logger()


def forward(level: int, message: str) -> None:
    """Pass a message to the listeners; without any, to fatdeploy's log."""
    with _listeners_lock:
        listeners = tuple(_listeners)
    for listen in listeners or (log.log,):
        listen(level, message)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Pass TensorRT's messages to a listener meanwhile, from any thread."""
    with _listeners_lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _listeners_lock:
            _listeners.remove(listener)
