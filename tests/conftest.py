"""Settings for all tests: a search that is the same on every run, and a folder for bundles that all processes share."""

import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from fatdeploy.measured import VARIABLE as CACHE
from tests.support.bundles import SHARED

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Make the shared folder once, before test processes are started: they inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="fatdeploy-bundles-")
        # Tests neither read nor leave measurements in the user's folder.
        os.environ[CACHE] = f"{os.environ[SHARED]}/cache"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the shared folder when the last test is over."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED), ignore_errors=True)
