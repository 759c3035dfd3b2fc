"""TensorRT's messages during a build: all of them go to a file in the bundle, those that matter to the log too."""

import logging
import re
from pathlib import Path
from typing import TextIO

log = logging.getLogger("fatdeploy")

# TensorRT warns of every int64 input and output; they are int64 in the contract, which the network was compared with.
KNOWN = re.compile(r"Make sure (input|output) \S+ has Int64 binding")
# Folders of this machine before a file name. Names of nodes contain slashes too, but do not begin with one.
FOLDERS = re.compile(r"(?:(?<=[\s'\"(=])|^)/(?:[^\s/'\"]+/)+")


class BuildLog:
    """Writes messages without paths of this machine, because a bundle is copied to others."""

    def __init__(self, file: TextIO, name: str, folder: Path) -> None:
        self.errors: list[str] = []
        self._file, self._name, self._folder = file, name, folder

    def hear(self, level: int, message: str) -> None:
        """Write a message."""
        message = FOLDERS.sub("", message.replace(f"{self._folder}/", ""))
        self._file.write(f"{logging.getLevelName(level)} {message}\n")
        if level >= logging.ERROR:
            self.errors.append(" ".join(message.split()))
        if level >= logging.WARNING and not KNOWN.search(message):
            log.log(level, "%s: %s", self._name, message)
