"""Benchmarks, run small and in processes of their own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.settings import ModelCache
from tests.support.bundles import bundle_of

ROOT = Path(__file__).parents[2]


def run_of(module: str, arguments: str, presets: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Return the result of a tiny run over bundles of other tests: exporting is the slow part."""
    for preset in presets:
        shutil.copytree(bundle_of(preset).path, ModelCache(folder, preset).bundle)
    command = [sys.executable, "-m", module, *arguments.split()]
    run = subprocess.run(
        [*command, "--cache", folder, "--out", folder / "result.json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not list(folder.glob("*.partial.json"))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result
