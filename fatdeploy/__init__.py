"""PyTorch encoder-decoder transformers on edge devices: fast, and provably the same as the original."""

import os

from fatdeploy._version import VERSION as __version__
from fatdeploy.errors import (
    BackendUnavailable,
    BundleError,
    CheckpointError,
    ConfigError,
    ExportFailed,
    FatdeployError,
    ParityFailed,
    SpecMismatch,
)

# Importing onnxruntime writes a device id for telemetry into the user's cache folder unless this is set before. Other
# packages import it too (onnxsim does), so it is set here, before any part of fatdeploy; another choice is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "BackendUnavailable",
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "ExportFailed",
    "FatdeployError",
    "ParityFailed",
    "SpecMismatch",
    "__version__",
]
