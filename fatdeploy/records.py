"""Frozen dataclasses as JSON and back: strict, generic over their fields, every reason collected."""

import reprlib
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

_SCALARS = (str, int, float, bool, NoneType)


def json_from_record(value: object) -> Any:
    """Return a dataclass as the values that ``json.loads`` would return: all fields, including defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: json_from_record(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {key: json_from_record(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_from_record(entry) for entry in value]
    return value


def shown(value: object) -> str:
    """Return a value in a form for messages: short and printable, whatever JSON it comes from."""
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 80 else reprlib.repr(value)


@dataclass
class RecordReader:
    """Turns JSON values into dataclasses and collects in ``reasons`` what does not fit.

    The two permissions are for a format that grows: a later version adds keys at the top level, an earlier one did not
    write the fields that have a default today. A field of type ``object`` takes any JSON value. Fields that a record
    computes itself (``init=False``) are written for other readers and are not read.
    """

    allow_unknown: bool = False
    allow_missing: bool = False
    reasons: list[str] = field(default_factory=list)

    def read(self, kind: type[Record], values: object) -> Record | None:
        """Return the dataclass ``kind``, or None when there are reasons against it."""
        record: Record | None = self._record(kind, values, "")
        return record

    def _refuse(self, place: str, reason: str) -> None:
        self.reasons.append(f"{place}: {reason}" if place else reason)

    def _record(self, kind: Any, values: object, place: str) -> Any:
        if not isinstance(values, dict):
            return self._refuse(place, f"expected an object, found {reprlib.repr(values)}")
        before, hints = len(self.reasons), get_type_hints(kind)
        entries = {entry.name: entry for entry in fields(kind) if entry.init}
        computed = {entry.name for entry in fields(kind) if not entry.init}
        if place or not self.allow_unknown:
            for name in values:
                if name not in entries and name not in computed:
                    self._refuse(_inside(place, name), "unknown")
        for name, entry in entries.items():
            if name not in values and not (self.allow_missing and _has_default(entry)):
                self._refuse(_inside(place, name), "missing")
        arguments = {
            name: self._value(hints[name], values[name], _inside(place, name)) for name in entries if name in values
        }
        if len(self.reasons) > before:
            return None
        try:
            return kind(**arguments)
        except ValueError as error:  # a __post_init__ that refuses values which contradict each other
            return self._refuse(place, str(error))

    def _value(self, kind: Any, value: object, place: str) -> Any:
        origin = get_origin(kind)
        if is_dataclass(kind):
            return self._record(kind, value, place)
        if origin in (Union, UnionType):
            return self._one_of(get_args(kind), value, place)
        if origin is tuple and isinstance(value, list | tuple):
            return self._tuple(get_args(kind), value, place)
        if origin is dict and isinstance(value, dict):
            return {key: self._value(get_args(kind)[1], entry, _inside(place, key)) for key, entry in value.items()}
        if not _fits(kind, value):
            return self._refuse(place, f"expected {_expected(kind)}, found {reprlib.repr(value)}")
        return value

    def _one_of(self, kinds: tuple[Any, ...], value: object, place: str) -> Any:
        for kind in kinds:
            trial = RecordReader(allow_missing=self.allow_missing)
            result = trial._value(kind, value, place)
            if not trial.reasons:
                return result
        others = [kind for kind in kinds if kind is not NoneType]
        if len(others) == 1 and value is not None:
            return self._value(others[0], value, place)
        expected = " or ".join(_expected(kind) for kind in kinds)
        return self._refuse(place, f"expected {expected}, found {reprlib.repr(value)}")

    def _tuple(self, kinds: tuple[Any, ...], values: Sequence[object], place: str) -> Any:
        expected = [kinds[0]] * len(values) if kinds[1:] == (...,) else kinds
        if len(values) != len(expected):
            return self._refuse(place, f"expected a list of {len(expected)}, found {reprlib.repr(values)}")
        return tuple(
            self._value(kind, value, _inside(place, index))
            for index, (kind, value) in enumerate(zip(expected, values, strict=True))
        )


def _inside(place: str, name: object) -> str:
    return f"{place}.{shown(name)}" if place else shown(name)


def _has_default(entry: Field[Any]) -> bool:
    return entry.default is not MISSING or entry.default_factory is not MISSING


def _fits(kind: Any, value: object) -> bool:
    if kind is object:
        return True
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    # type() and not isinstance(): JSON's true is not 1.
    return type(value) is kind or (kind is float and type(value) is int)


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {list(get_args(kind))}"
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) is dict or is_dataclass(kind):
        return "an object"
    if kind in _SCALARS:
        return "null" if kind is NoneType else str(kind.__name__)
    raise TypeError(f"a field of type {kind} has no JSON form")
