"""How clearly steps make the hard choices inside a model, which are not seen in its scores of tokens.

Two correct computations of such a choice may differ if what decides it is as small as their rounding. Who compares
computations records the margins, and leaves out inputs on which one is small.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

# As with the seams, one for the process: models are compared in one thread.
_margins: list[Tensor] | None = None


def report_margin(margin: Callable[[], Tensor]) -> None:
    """Add the margins of choices, one per row, to those that are recorded; computed only if somebody records."""
    if _margins is not None:
        _margins.append(margin())


@contextmanager
def recorded_margins() -> Iterator[list[Tensor]]:
    """Yield a list of the margins of hard choices, [rows] each, relative to the size of what decides them."""
    global _margins  # noqa: PLW0603
    before, _margins = _margins, []
    try:
        yield _margins
    finally:
        _margins = before
