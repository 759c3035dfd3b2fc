"""The folder of a training: files that are replaced as a whole, and one training at a time."""

import logging
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from fatdeploy.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

log = logging.getLogger(__name__)


def replaced_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside the one of that name, then put it in its place: a crash leaves the old one or the new one."""
    new = path.with_name(f".{path.name}.new")
    try:
        write(new)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            new.unlink()
        raise CheckpointError(
            f"cannot write {path}: {error}; what was saved before is untouched: make room and go on with --resume, or "
            "choose another folder"
        ) from error


class FolderLock:
    """Keeps other trainings out of a folder until it is closed, or its process ends in whatever way.

    The folder itself is locked: nothing is left in it. Windows cannot lock one; there nobody is kept out.
    """

    def __init__(self, folder: Path) -> None:
        self.close: Callable[[], object] = lambda: None
        if sys.platform == "win32":
            return
        descriptor = os.open(folder, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise CheckpointError(
                f"another training is at work in {folder}: wait for it, stop it, or choose another folder"
            ) from error
        except OSError as error:
            # Some file systems of clusters know no locks; that is no reason not to train.
            log.warning("%s cannot be locked (%s): let no other training write there", folder, error)
