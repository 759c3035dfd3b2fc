"""The values that an option may have: each bound is written once, beside its field, for the checker and the help.

Free of numpy at import: the command line makes its options from these.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Protocol, get_args, get_type_hints


class Bound(Protocol):
    """A test of a value, and the same in words."""

    @property
    def expected(self) -> str:
        """What a value must be."""
        ...

    def fits(self, value: Any) -> bool:
        """Whether a value is within the bound."""
        ...


@dataclass(frozen=True)
class Whole:
    """A whole number from ``least`` up."""

    least: int

    @property
    def expected(self) -> str:
        return f"a whole number from {self.least} up"

    def fits(self, value: Any) -> bool:
        return is_whole(value, self.least)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A finite number, from ``low`` to ``high``; an open end is not part of the range."""

    expected: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def fits(self, value: Any) -> bool:
        if not _is_number(value):
            return False
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        return bool(above and (self.high is None or value < self.high or (value == self.high and not self.high_open)))


@dataclass(frozen=True)
class Flag:
    """True or False."""

    expected: str = "True or False"

    def fits(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Rule:
    """Anything else: a test, and its words."""

    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class OptionRecord:
    """What the annotation of a field says: its bound, its help, and whether it may be None."""

    bound: Bound
    help: str
    optional: bool

    def wrong(self, name: str, value: object) -> str:
        """Return what is wrong with a value; empty if nothing is."""
        if (value is None and self.optional) or self.bound.fits(value):
            return ""
        return f"{name} must be {self.bound.expected}, found {value!r}"


def records_of(options: type) -> dict[str, OptionRecord]:
    """Return the record of every field of a dataclass whose fields are ``Annotated[type, bound, help]``."""
    records = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, bound, text = get_args(hint)
        records[name] = OptionRecord(bound, text, NoneType in get_args(kind))
    return records


def is_whole(value: object, least: int = 0) -> bool:
    """Whether a value is a whole number, Python's or numpy's, from ``least`` up."""
    import numpy as np

    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def are_ids(value: object, fewest: int = 0) -> bool:
    """Whether a value is a list of at least so many token ids."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return False
    return len(value) >= fewest and all(is_whole(token) for token in value)


def all_fit(value: object, fits: Callable[[Any], bool]) -> bool:
    """Whether a value is a list or tuple in which each entry fits."""
    return isinstance(value, list | tuple) and all(fits(entry) for entry in value)


def are_biased_ids(value: object) -> bool:
    """Whether a value is a pair: token ids, at least one, and a number; -inf is one."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    ids, bias = value
    return are_ids(ids, 1) and (_is_number(bias) or (isinstance(bias, float) and bias == -math.inf))


def are_start_and_factor(value: object) -> bool:
    """Whether a value is a pair: a whole number from 0 up, and a number above 0."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    start, factor = value
    return is_whole(start) and _is_number(factor) and factor > 0


def _is_number(value: object) -> bool:
    import numpy as np

    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False
