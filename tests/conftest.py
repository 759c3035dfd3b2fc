"""Settings for all tests: the same search and costs on every run, and a folder for bundles that all processes share."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from fatdeploy.measured import VARIABLE as CACHE
from tests.support.bundles import SHARED
from tests.support.costs import steady_cost

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


@pytest.fixture(autouse=True, scope="session")
def _steady_costs() -> Iterator[None]:
    """Plan with costs that do not depend on a clock; tests/export/quantize/test_costs.py measures real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fatdeploy.export.quantize.planning.form_search.cost_of", steady_cost)
        yield
