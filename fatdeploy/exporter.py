"""The one door from device-side code to the exporter: opened by name when somebody asks for the live model."""

import importlib
import importlib.util
from typing import Any

from fatdeploy.errors import BackendUnavailable

PACKAGES = ("torch", "onnx", "onnxscript", "onnxsim", "safetensors")


def need_export_packages() -> None:
    """Raise, with what to type, unless the packages of ``fatdeploy[export]`` are installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(f"needs {' and '.join(missing)}, not installed here: pip install 'fatdeploy[export]'")


def exporter(module: str) -> Any:
    """Return a module of ``fatdeploy.export``, imported now."""
    need_export_packages()
    return importlib.import_module(f"fatdeploy.export.{module}")
