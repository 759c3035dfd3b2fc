"""Bundles that have default options."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.manifest import GenerationRecord
from tests.support.bundles import bundle_of

TINY = "transformer-tiny"


def bundle_with_defaults(folder: Path, options: dict[str, Any], ignored: dict[str, Any] | None = None) -> Bundle:
    """Return a copy of a tiny bundle that decodes with these options by default."""
    shutil.copytree(bundle_of(TINY).path, folder)
    return write_manifest(
        folder, replace(bundle_of(TINY).manifest, generation=GenerationRecord(options, ignored or {}))
    )
