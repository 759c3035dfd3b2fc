"""One lexical table on both sides: in a copy of our bundle, and as CTranslate2's ``vmap.txt``."""

from pathlib import Path

from fatdeploy.cli import COMMANDS


def has_shortlists() -> bool:
    """Return whether this version makes shortlists."""
    return "shortlist" in COMMANDS


def add_shortlist(bundles: dict[str, str], cache: Path) -> tuple[dict[str, str], Path]:
    """Return our bundles and one more that has a shortlist, and CTranslate2's folder with the same table."""
    raise NotImplementedError
