"""Compares the onnxruntime here with those that a bundle was verified with."""

import logging
import re

from fatdeploy.bundle import Bundle

log = logging.getLogger("fatdeploy")


def warn_of_version(bundle: Bundle, version: str) -> None:
    """Log a warning if a bundle was verified with other versions of onnxruntime than this one."""
    if bundle.manifest.onnxruntime is None:
        return
    oldest, newest = bundle.manifest.onnxruntime
    if not _release(oldest) <= _release(version) <= _release(newest):
        log.warning(
            "%s was verified with onnxruntime %s to %s, this is %s: fatdeploy verify %s",
            *(bundle.path, oldest, newest, version, bundle.path),
        )


def _release(version: str) -> list[int]:
    """Return the numbers at the start of a version."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in numbers[0].split(".")] if numbers else []
