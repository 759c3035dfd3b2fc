"""Reads a family's configuration key by key; whatever cannot be used is collected and becomes one error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fatdeploy.errors import CheckpointError

JsonObject = dict[str, Any]


def read_json_object(path: Path) -> JsonObject:
    """Return the object that a JSON file holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not JSON: {error}; is the file complete?") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is a JSON {type(content).__name__}, expected an object")
    return content


class ConfigKeys:
    """The keys of one configuration, with the defaults of its family; ``reasons`` says what cannot be used."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, under: str = "") -> None:
        self.values = values
        self.defaults = defaults
        self.reasons: list[str] = []
        self._under = under

    def integer(self, name: str, *, also: str = "", least: int = 1) -> int:
        """Return a whole number; ``also`` is a second name of the key, which must not contradict it."""
        value = self._value(name, also)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.refuse(name, f"must be a whole number of at least {least}, found {value!r}")
        return least

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = self._value(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.refuse(name, f"must be a positive number, found {value!r}")
        return 1.0

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._value(name)
        if isinstance(value, bool):
            return value
        self.refuse(name, f"must be true or false, found {value!r}")
        return False

    def text(self, name: str) -> str:
        """Return a string."""
        value = self._value(name)
        if isinstance(value, str):
            return value
        self.refuse(name, f"must be a string, found {value!r}")
        return ""

    def inner(self, name: str, defaults: Mapping[str, Any]) -> "ConfigKeys":
        """Return the keys of a configuration inside of this one; what it refuses is refused here."""
        values = self.values.get(name)
        if not isinstance(values, dict):
            self.refuse(name, f"must be an object, found {values!r}")
            values = {}
        keys = ConfigKeys(values, defaults, under=f"{self._under}{name}.")
        keys.reasons = self.reasons
        return keys

    def expect(self, name: str, value: object) -> None:
        """Refuse any other value; a key that is missing or null means this one."""
        actual = self.values.get(name)
        if actual is not None and actual != value:
            self.refuse(name, f"only {value!r} is supported here, found {actual!r}")

    def refuse(self, name: str, reason: str) -> None:
        """Add a reason against a key."""
        self.reasons.append(f"{self._under}{name} {reason}")

    def _value(self, name: str, also: str = "") -> Any:
        value, other = self.values.get(name), self.values.get(also)
        if value is not None and other is not None and value != other:
            self.refuse(name, f"= {value!r} contradicts {also} = {other!r}")
        values = (value, other, self.defaults.get(name))
        return next((value for value in values if value is not None), None)


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "swish",
    "swish": "swish",
}


def activation_of(keys: ConfigKeys, name: str) -> str:
    """Return our name of the activation under a key."""
    return known_activation(keys, name, keys.text(name))


def known_activation(keys: ConfigKeys, name: str, value: str) -> str:
    """Return our name of an activation; one that the reference lacks is refused."""
    if value not in ACTIVATIONS:
        keys.refuse(name, f"= {value!r} is not available, only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(value, "relu")
