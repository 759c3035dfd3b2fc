"""Exported bundles for tests: each configuration is exported once per run, by whichever process needs it first."""

import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import PRESETS
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.manifest import GenerationRecord
from fatdeploy.targets import Dialect, HalfPrecision, Target

# Bundles of these targets differ only in the dialect of their graphs.
TARGETS: dict[Dialect, Target] = {"ort": "ort-cpu", "standard": "onnx"}
# Exports take seconds. Those of the other presets are in tests of their own, most of them slow.
EXPORTED = [preset for preset in PRESETS if not preset.endswith("-published")]
# The loop of `at` has no half precision.
HALF_PRESETS = [preset for preset in EXPORTED if preset != "at"]
# The environment variable with the folder that all test processes of a run share.
SHARED = "FATDEPLOY_TEST_BUNDLES"


@cache
def model_of(preset: str) -> ReferenceModel:
    """Return a preset with its seeded weights."""
    return model_from_preset(preset)


@cache
def bundle_of(preset: str, dialect: Dialect = "ort") -> Bundle:
    """Return the exported preset."""
    return shared_bundle(
        f"{preset}-{dialect}",
        lambda folder: write_bundle(model_of(preset), folder, origin=Origin(name=preset), target=TARGETS[dialect]),
    )


@cache
def half_of(preset: str, precision: HalfPrecision = "fp16") -> Bundle:
    """Return the exported preset in half precision."""
    return shared_bundle(
        f"{preset}-{precision}",
        lambda folder: write_bundle(
            model_of(preset), folder, origin=Origin(name=preset, random=True), target="onnx", precision=precision
        ),
    )


def bundle_with_defaults(folder: Path, options: dict[str, Any], ignored: dict[str, Any] | None = None) -> Bundle:
    """Return a copy of a tiny bundle that decodes with these options by default."""
    plain = bundle_of("transformer-tiny")
    shutil.copytree(plain.path, folder)
    return write_manifest(folder, replace(plain.manifest, generation=GenerationRecord(options, ignored or {})))


def shared_bundle(name: str, write: Callable[[Path], object]) -> Bundle:
    """Return the bundle with this name; ``write`` makes it unless a process of this run already has."""
    folder = Path(os.environ[SHARED]) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            write(folder)
        return read_bundle(folder)
