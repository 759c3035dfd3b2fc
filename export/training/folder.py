"""The folder of a training: files are replaced atomically, and only one training runs in it."""

import logging
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from fatdeploy.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

log = logging.getLogger(__name__)

NEW = ".new"
# What to do when a file cannot be written: after the first state, and before.
GO_ON = "what was saved before is untouched: free some space and continue with --resume, or choose another folder"
AGAIN = "what was there before is untouched: free some space and run the same command again, or choose another folder"


def replaced_file(path: Path, write: Callable[[Path], object], *, advice: str = GO_ON) -> None:
    """Write a new file, then move it over the old one: a crash leaves one or the other.

    The new file is in a folder beside the old one. Whatever a killed process left there, including temporary files of
    libraries, is removed with that folder.
    """
    beside = path.parent / NEW
    new = beside / path.name
    try:
        beside.mkdir(exist_ok=True)
        write(new)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}; {advice}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class FolderLock:
    """Keeps other trainings out of a folder until it is closed or its process ends.

    The folder itself is locked, so no file is left behind. Windows cannot lock folders; there it does nothing.
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
                f"another training is running in {folder}: wait for it, stop it, or choose another folder"
            ) from error
        except OSError as error:
            # Some cluster file systems have no locks; that is no reason not to train.
            log.warning("%s cannot be locked (%s): make sure that no other training writes there", folder, error)
