"""Lines that are decoded: a source with its own prefix and languages. No numpy here: a command's help imports it."""

import json
from dataclasses import dataclass
from typing import Any

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.text.token_ids import PlainSource, ids_from_text

PLAIN_KEYS, CODE_KEYS = ("source", "prefix"), ("source_language", "target_language")
KEYS = (*PLAIN_KEYS, *CODE_KEYS)


@dataclass(frozen=True)
class InputLine:
    """What a line says; without a prefix or a language of its own, a target gets that of the options."""

    source: PlainSource
    prefix: PlainSource | None = None
    source_language: str | None = None
    target_language: str | None = None

    def values(self) -> dict[str, PlainSource]:
        """Return what the line said, for its result."""
        return {key: value for key in KEYS if (value := getattr(self, key)) is not None}

    def languages(self) -> dict[str, str]:
        """Return the languages that the line names."""
        return {key: value for key in CODE_KEYS if (value := getattr(self, key)) is not None}


def line_from_json(place: str, text: str, *, as_ids: bool = False) -> InputLine:
    """Return a line that is a JSON object: a source and maybe a prefix, texts or lists of token ids, and languages.

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
            key: ids_from_text(f"{place}, {key}", value) if key in PLAIN_KEYS and isinstance(value, str) else value
            for key, value in values.items()
        }
    return InputLine(**values)


def _wrong_values(values: Any) -> list[str]:
    if not isinstance(values, dict):
        return [f"expected a JSON object with source and prefix, found {values!r}"]
    reasons = [f"unknown key {key!r}, expected {', '.join(KEYS)}" for key in values if key not in KEYS]
    if "source" not in values:
        reasons.append("source is missing")
    reasons += [
        f"{key} must be a language code, found {values[key]!r}"
        for key in CODE_KEYS
        if not isinstance(values.get(key), str | None)
    ]
    return reasons + [
        f"{key} must be a text or a list of token ids, found {value!r}"
        for key, value in values.items()
        if key in PLAIN_KEYS and not _is_plain(value) and not (key == "prefix" and value is None)
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    return isinstance(value, str)
