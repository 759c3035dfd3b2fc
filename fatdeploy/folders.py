"""Folders that are replaced as a whole: written next to the old one, then exchanged with it."""

import ctypes
import errno
import glob
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fatdeploy.errors import ConfigError

log = logging.getLogger("fatdeploy")

# From this age on, what a killed process left is removed.
LEFT_SECONDS = 24 * 3600
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
    remove_leftovers(folder)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        share(new)
        yield new
        _settle(new)
        _exchange(new, folder, force=force)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left beside a folder a day ago or earlier; name what may still be in use."""
    for left in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.*")):
        try:
            age = time.time() - left.stat().st_mtime
        except OSError:  # its process removed it meanwhile
            continue
        if age > LEFT_SECONDS:
            log.info("removing %s, which an interrupted process left", left)
            shutil.rmtree(left, ignore_errors=True)
        else:
            log.warning("%s belongs to a process that writes %s too, or was interrupted", left, folder)


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


def _exchange(new: Path, folder: Path, *, force: bool) -> None:
    """Put ``new`` in place of ``folder``, and the old folder, if any, in place of ``new``."""
    if not folder.exists():
        try:
            new.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    if not force:
        raise ConfigError(f"{folder} was written by another process meanwhile; pass --force (force=True) to replace it")
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    paths = os.fsencode(new), os.fsencode(folder)
    if renameat2 and renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    # This system has no atomic exchange: the old folder keeps another name until the new one is in place.
    aside = new.with_name(f"{new.name}.old")
    folder.rename(aside)
    new.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
