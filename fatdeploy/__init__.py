"""PyTorch encoder-decoder transformers on edge devices: fast, and provably the same as the original."""

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
