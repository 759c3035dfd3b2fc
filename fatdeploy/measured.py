"""What was measured on this machine, kept in the user's cache folder so that it is measured once."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fatdeploy.machine import this_machine

log = logging.getLogger("fatdeploy")

# Names another folder; an empty value keeps nothing.
VARIABLE = "FATDEPLOY_CACHE"


def cache_folder() -> Path | None:
    """Return the folder that keeps measurements; None if nothing is to be kept."""
    if (named := os.environ.get(VARIABLE)) is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fatdeploy"


def machine_key() -> str:
    """Return what a time depends on: the processor and the cores that this process may use."""
    machine = this_machine()
    return f"{machine.cpu}|{machine.architecture}|{','.join(machine.features or ())}|{machine.cores}"


def kept(kind: str, key: str, measure: Callable[[], Any]) -> Any:
    """Return a JSON value that was measured before on this machine for the same key, or measure it and keep it.

    A cache that cannot be read or written costs another measurement and is no error.
    """
    path = _path(kind, f"{machine_key()}|{key}")
    if path is not None and (stored := _read(path, key)) is not None:
        return stored
    value = measure()
    if path is not None:
        _write(path, {"key": key, "value": value})
    return value


def _path(kind: str, key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path, key: str) -> Any:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored.get("value") if isinstance(stored, dict) and stored.get("key") == key else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file as a whole: another process may read it meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        Path(name).replace(path)
    except OSError as error:
        log.info("a measurement was not kept in %s: %s", path.parent, error)
