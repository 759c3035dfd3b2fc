"""Lines that are decoded: a source, and a prefix of its own. It needs no numpy: a command's help imports it."""

import json
from dataclasses import dataclass
from typing import Any

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.text.token_ids import PlainSource, ids_from_text

KEYS = ("source", "prefix")


@dataclass(frozen=True)
class InputLine:
    """What a line says; without a prefix of its own, a target gets that of the options."""

    source: PlainSource
    prefix: PlainSource | None = None

    def values(self) -> dict[str, PlainSource]:
        """Return what the line said, for its result."""
        return {"source": self.source} if self.prefix is None else {"source": self.source, "prefix": self.prefix}


def line_from_json(place: str, text: str, *, as_ids: bool = False) -> InputLine:
    """Return a line that is a JSON object with a source and maybe a prefix, texts or lists of token ids.

    With ``as_ids`` texts contain token ids as well.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: expected a JSON object, found {text[:40]!r}") from error
    if reasons := _wrong_values(values):
        raise ConfigError(in_one_line(place, reasons))
    if as_ids:
        values = {
            key: ids_from_text(f"{place}, {key}", value) if isinstance(value, str) else value
            for key, value in values.items()
        }
    return InputLine(values["source"], values.get("prefix"))


def _wrong_values(values: Any) -> list[str]:
    if not isinstance(values, dict):
        return [f"expected a JSON object with source and prefix, found {values!r}"]
    reasons = [f"unknown key {key!r}, expected {' and '.join(KEYS)}" for key in values if key not in KEYS]
    if "source" not in values:
        reasons.append("source is missing")
    return reasons + [
        f"{key} must be a text or a list of token ids, found {value!r}"
        for key, value in values.items()
        if key in KEYS and not _is_plain(value) and not (key == "prefix" and value is None)
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    return isinstance(value, str)
