"""The packages that fatdeploy can use: which extra installs each, what to type for it, which ones conflict."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A package that fatdeploy can use: how it is imported, which extra installs it, what it is for."""

    name: str
    module: str
    extra: str
    purpose: str
    needs_device: bool = False


CPU_RUNTIME = Package("onnxruntime", "onnxruntime", "cpu", "run bundles on the CPU")
GPU_RUNTIME = Package("onnxruntime-gpu", "onnxruntime", "cuda", "run bundles on an NVIDIA GPU", needs_device=True)
TENSORRT = Package("tensorrt", "tensorrt", "tensorrt", "build and run TensorRT engines", needs_device=True)
TENSORRT_RTX = Package("tensorrt-rtx", "tensorrt_rtx", "rtx", "build (also without a GPU) and run TensorRT-RTX engines")
CUDA_PYTHON = Package(
    "cuda-python", "cuda.bindings", "tensorrt", "GPU memory and streams for engines", needs_device=True
)
PACKAGES = (
    CPU_RUNTIME,
    GPU_RUNTIME,
    TENSORRT,
    TENSORRT_RTX,
    CUDA_PYTHON,
    Package("tokenizers", "tokenizers", "text", "text in and out"),
    Package("sentencepiece", "sentencepiece", "sentencepiece", "text of Marian, M2M100 and their like"),
    Package("sacrebleu", "sacrebleu", "eval", "BLEU and chrF"),
    Package("torch", "torch", "export", "export: the original model"),
    Package("onnx", "onnx", "export", "export: write graphs"),
    Package("onnxscript", "onnxscript", "export", "export: trace graphs"),
    Package("onnxsim", "onnxsim", "export", "export: simplify graphs"),
    Package("safetensors", "safetensors", "export", "export: read checkpoints"),
)

# Alternatives, which pip cannot express: it unpacks one over the other.
ALTERNATIVES = frozenset({CPU_RUNTIME.name, GPU_RUNTIME.name})
CONFLICT = "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files"
CONFLICT_FIX = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'fatdeploy[cuda]'"


def version_of(package: Package) -> str | None:
    """Return the installed version without importing anything; empty if its metadata is damaged."""
    # Imported here: an application that decodes does not need it, and it costs 2 MB and much of our import time.
    from importlib import metadata

    try:
        return metadata.version(package.name) or ""
    except metadata.PackageNotFoundError:
        return None


def install_command(package: Package, versions: Mapping[str, str]) -> str | None:
    """Return what to type for a missing package without breaking what is installed."""
    if package is CPU_RUNTIME and GPU_RUNTIME.name in versions:
        return None
    if package is GPU_RUNTIME and CPU_RUNTIME.name in versions:
        return f"pip uninstall -y onnxruntime && pip install 'fatdeploy[{package.extra}]'"
    return f"pip install 'fatdeploy[{extra_of(package, versions)}]'"


def extra_of(package: Package, versions: Mapping[str, str]) -> str:
    """Return the smallest extra that installs a package: two extras install cuda-python."""
    return TENSORRT_RTX.extra if package is CUDA_PYTHON and TENSORRT_RTX.name in versions else package.extra


def installed_versions() -> dict[str, str]:
    """Return the version of every installed package."""
    return {package.name: version for package in PACKAGES if (version := version_of(package)) is not None}


def alternatives_overwritten() -> bool:
    """Return whether packages that exclude each other are both installed, by the names of their folders.

    Every load calls this, and reading all metadata would take tens of milliseconds.
    """
    folders = {
        path.name.partition("-")[0] for folder in sys.path for path in Path(folder).glob("onnxruntime*.dist-info")
    }
    return folders >= {name.replace("-", "_") for name in ALTERNATIVES}
