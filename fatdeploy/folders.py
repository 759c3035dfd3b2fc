"""Folders that are replaced as a whole: written next to the old one, then exchanged with it."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fatdeploy.errors import ConfigError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced_folder(folder: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``folder`` when the block ends without an error.

    Until then, and after a crash, an existing folder is untouched. Without ``force`` an existing one is refused.
    """
    if folder.exists() and not force:
        raise ConfigError(f"{folder} exists; choose another folder or pass --force (force=True) to replace it")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; move it away first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        share(new)
        yield new
        _settle(new)
        _exchange(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


# Device and inode of a folder, and the same with size and time of change of files in it; empty for what is missing.
Identity = tuple[tuple[int, ...], ...]


def identity_of(folder: Path, names: Iterable[str]) -> Identity:
    """Return what changes when a folder or a file in it is replaced by another."""
    return (_stamp(folder)[:2], *(_stamp(folder / name) for name in names))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def share(path: Path) -> None:
    """Give a file or folder the usual mode: libraries that write to temporary names make these private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _settle(folder: Path) -> None:
    """Flush the files to disk before they get their name: a power cut must not leave a name without content."""
    for path in (*sorted(folder.rglob("*")), folder):
        if os.name == "posix" or path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _exchange(new: Path, folder: Path) -> None:
    """Put ``new`` in place of ``folder``, and the old folder, if any, in place of ``new``."""
    if not folder.exists():
        new.rename(folder)
        return
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    paths = os.fsencode(new), os.fsencode(folder)
    if renameat2 and renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    # This system has no atomic exchange: the old folder keeps another name until the new one is in place.
    aside = new.with_name(f"{new.name}.old")
    folder.rename(aside)
    new.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
