"""What TensorRT says during a build: all of it to a file of the bundle, what matters to the log too."""

import logging
import re
from pathlib import Path
from typing import TextIO

log = logging.getLogger("fatdeploy")

# Said of every input and output of whole numbers, which the contract has as int64, and the network was compared with.
KNOWN = re.compile(r"Make sure (input|output) \S+ has Int64 binding")
# Folders of this machine in front of a file's name. Names of nodes have slashes too, but none in front.
FOLDERS = re.compile(r"(?:(?<=[\s'\"(=])|^)/(?:[^\s/'\"]+/)+")


class BuildLog:
    """Writes what it hears, without paths of this machine: a bundle goes elsewhere."""

    def __init__(self, file: TextIO, name: str, folder: Path) -> None:
        self.errors: list[str] = []
        self._file, self._name, self._folder = file, name, folder

    def hear(self, level: int, message: str) -> None:
        """Take in a message."""
        message = FOLDERS.sub("", message.replace(f"{self._folder}/", ""))
        self._file.write(f"{logging.getLevelName(level)} {message}\n")
        if level >= logging.ERROR:
            self.errors.append(" ".join(message.split()))
        if level >= logging.WARNING and not KNOWN.search(message):
            log.log(level, "%s: %s", self._name, message)
