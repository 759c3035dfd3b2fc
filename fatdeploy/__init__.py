"""PyTorch encoder-decoder transformers on edge devices: fast, and provably the same as the original."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from fatdeploy._version import VERSION as __version__
from fatdeploy.errors import (
    BackendUnavailable,
    BundleError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceFailed,
    ExportFailed,
    FatdeployError,
    ParityFailed,
    SpecMismatch,
)

# Importing onnxruntime writes a device id for telemetry into the user's cache folder unless this is set before. Other
# packages import it too (onnxsim does), so it is set here, before any part of fatdeploy; another choice is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Public names that need numpy or a runtime are imported on first use: the help and the doctor need neither.
_ON_USE = {
    "Bundle": "fatdeploy.bundle",
    "DecodeOptions": "fatdeploy.runtimes.decoding.options",
    "Event": "fatdeploy.runtimes.decoding.streaming",
    "Hypothesis": "fatdeploy.runtimes.decoding.hypothesis",
    "Inspection": "fatdeploy.runtimes.inspection",
    "Model": "fatdeploy.runtimes.model",
    "Stream": "fatdeploy.runtimes.decoding.streaming",
    "Verification": "fatdeploy.runtimes.proof.verify",
    "build_shortlist": "fatdeploy.runtimes.shortlist.build",
    "export_model": "fatdeploy.export.api",
    "inspect": "fatdeploy.runtimes.inspection",
    "load": "fatdeploy.runtimes.loading",
    "verify": "fatdeploy.runtimes.proof.verify",
}

if TYPE_CHECKING:
    from fatdeploy.bundle import Bundle
    from fatdeploy.export.api import export_model
    from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
    from fatdeploy.runtimes.decoding.options import DecodeOptions
    from fatdeploy.runtimes.decoding.streaming import Event, Stream
    from fatdeploy.runtimes.inspection import Inspection, inspect
    from fatdeploy.runtimes.loading import load
    from fatdeploy.runtimes.model import Model
    from fatdeploy.runtimes.proof.verify import Verification, verify
    from fatdeploy.runtimes.shortlist.build import build_shortlist
else:

    def __getattr__(name: str) -> Any:
        if name not in _ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_ON_USE[name]), name)


__all__ = [
    "BackendUnavailable",
    "Bundle",
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DecodeOptions",
    "DeviceFailed",
    "Event",
    "ExportFailed",
    "FatdeployError",
    "Hypothesis",
    "Inspection",
    "Model",
    "ParityFailed",
    "SpecMismatch",
    "Stream",
    "Verification",
    "__version__",
    "build_shortlist",
    "export_model",
    "inspect",
    "load",
    "verify",
]
