"""Where benchmarks write, and what every result says about its origin: machine, versions, commit."""

import hashlib
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fatdeploy.machine import this_machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / "build" / "benchmarks"  # prepared models, and partial results of unfinished runs
# Folders whose code a time depends on.
MEASURED = ("fatdeploy", "export", "runtimes", "benchmarks")


def provenance(packages: Sequence[str]) -> dict[str, Any]:
    """Return where, when and with which versions a result was measured."""
    return {
        "machine": this_machine().as_dict(),
        "versions": {name: version(name) for name in packages},
        "commit": _git("rev-parse", "HEAD"),
        # A commit alone would name code that was not measured.
        "modified": bool(_git("status", "--porcelain", "--", *(f"{folder}/**.py" for folder in MEASURED))),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT)
    return run.stdout.strip()


def code_digest(*folders: str) -> str:
    """Return a hash of the code in some folders, so that products of older code are not reused."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
