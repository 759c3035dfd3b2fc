"""What commands show on standard error while they work: stages and progress bars, silenced by --quiet."""

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    # click has no public name for the type of its progress bars.
    from click._termui_impl import ProgressBar

Item = TypeVar("Item")


def is_quiet() -> bool:
    """Return whether --quiet was given."""
    return not logging.getLogger("fatdeploy").isEnabledFor(logging.WARNING)


def show_stage(text: str) -> None:
    """Say which stage begins."""
    if not is_quiet():
        click.echo(f"{text} …", err=True)


def progress_bar(
    items: Iterable[Item], label: str, *, show_pos: bool = False, hidden: bool = False
) -> "ProgressBar[Item]":
    """Return a bar for a ``with`` statement; it is hidden if nobody watches.

    Iterate over it to get the items, or advance it with ``update``.
    """
    hidden = hidden or is_quiet() or not sys.stderr.isatty()
    return click.progressbar(items, label=label, file=sys.stderr, show_pos=show_pos, hidden=hidden)
