"""Exported bundles for tests: each configuration is exported once a run, by whichever process asks first."""

import fcntl
import os
from functools import cache
from pathlib import Path

from fatdeploy.bundle import Bundle, Dialect, read_bundle
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.weights import model_from_preset

# The variable that names the folder which all test processes of a run share.
SHARED = "FATDEPLOY_TEST_BUNDLES"


@cache
def model_of(preset: str) -> ReferenceModel:
    """Return a preset with its seeded weights."""
    return model_from_preset(preset)


@cache
def bundle_of(preset: str, dialect: Dialect = "ort") -> Bundle:
    """Return the exported preset."""
    folder = Path(os.environ[SHARED]) / f"{preset}-{dialect}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return read_bundle(folder)
        return write_bundle(model_of(preset), folder, origin=Origin(name=preset), dialect=dialect)
