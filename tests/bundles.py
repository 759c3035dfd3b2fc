"""Exported bundles for tests: each configuration is exported once a run, whichever process asks first."""

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

from fatdeploy.bundle import Bundle, Dialect, read_bundle
from fatdeploy.export.pipeline import write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.weights import model_from_preset

# Test processes of one run have the same parent; a folder of theirs is shared and dies with the run's temporary files.
SHARED = (
    Path(tempfile.gettempdir())
    / f"fatdeploy-tests-{os.getuid()}-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
)


@cache
def model_of(preset: str) -> ReferenceModel:
    """Return a preset with its seeded weights."""
    return model_from_preset(preset)


@cache
def bundle_of(preset: str, dialect: Dialect = "ort") -> Bundle:
    """Return the exported preset."""
    SHARED.mkdir(exist_ok=True)
    folder = SHARED / f"{preset}-{dialect}"
    with (SHARED / f"{preset}-{dialect}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (
            read_bundle(folder)
            if folder.exists()
            else write_bundle(model_of(preset), folder, name=preset, dialect=dialect)
        )
