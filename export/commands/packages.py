"""The packages that every command of the exporter needs."""

import importlib.util

from fatdeploy.errors import BackendUnavailable

NEEDED = ("torch", "onnx", "onnxscript", "onnxsim", "safetensors")


def need_export_packages() -> None:
    """Raise, with what to type, unless the packages of ``fatdeploy[export]`` are installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(f"needs {' and '.join(missing)}, not installed here: pip install 'fatdeploy[export]'")
