"""Commands run on a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """Return standard output, which is a pipe, and what a terminal got on standard error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fatdeploy", *arguments], stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT, text=True
    )
    os.close(theirs)
    out, _ = process.communicate()
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # on Linux: the terminal has no writer any more
        pass
    os.close(ours)
    return out, shown.decode()
