"""Languages of a model: codes from a caller, around the tokens of a source, and as options of a decode."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.prompts import PrefixIds
from fatdeploy.runtimes.text.tokenizer import Encoded, Tokenizer
from fatdeploy.text import Languages

# A code for all rows, or one per row.
LanguageCodes = str | Sequence[str] | None


@dataclass(frozen=True)
class LanguagePair:
    """The languages of one source and its target; None is the model's default."""

    source: str | None = None
    target: str | None = None


DEFAULT_PAIR = LanguagePair()


class LanguageTokenizer:
    """A tokenizer of a model with languages; a source has tokens, or a marker, that name them."""

    def __init__(self, tokenizer: Tokenizer, languages: Languages) -> None:
        self._tokenizer = tokenizer
        self._languages = languages

    @property
    def n_tokens(self) -> int:
        """How many tokens it knows."""
        return self._tokenizer.n_tokens

    def encoded(self, text: str, pair: LanguagePair = DEFAULT_PAIR) -> Encoded:
        """Return a text's tokens, with the tokens around it that the model was trained with."""
        languages = self._languages
        if languages.target == "marker" and pair.target is not None:
            text = f">>{pair.target}<< {text}"
        code = pair.source or languages.default_source
        if languages.source == "none" or code is None:
            return self._tokenizer.encoded(text)
        ids, language = self._tokenizer.plain_ids(text), languages.ids[code]
        if languages.source == "prefix":
            return Encoded(np.array([language, *ids, languages.end_id], np.int64), 1)
        return Encoded(np.array([*ids, languages.end_id, language], np.int64), 2)

    def text(self, tokens: ArrayLike) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.text(tokens)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target, without special tokens around it."""
        return self._tokenizer.plain_ids(text)

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first, have a text that no later token changes."""
        return self._tokenizer.n_certain(tokens)


def encoded_in(tokenizer: Tokenizer, text: str, pair: LanguagePair) -> Encoded:
    """Return the tokens of a text in a language; ``checked_pairs`` has refused languages that a model does not have."""
    return tokenizer.encoded(text, pair) if isinstance(tokenizer, LanguageTokenizer) else tokenizer.encoded(text)


def checked_pairs(
    languages: Languages | None, n_rows: int, source_language: LanguageCodes, target_language: LanguageCodes
) -> list[LanguagePair]:
    """Return the languages of each row; one ConfigError has every reason why some cannot be used."""
    codes = {"source_language": source_language, "target_language": target_language}
    reasons = [
        reason
        for name, value in codes.items()
        if value is not None
        for reason in _wrong(languages, name, value, n_rows)
    ]
    if reasons:
        raise ConfigError(in_one_line("languages refused", reasons))
    columns = [[value] * n_rows if value is None or isinstance(value, str) else list(value) for value in codes.values()]
    return [LanguagePair(source, target) for source, target in zip(*columns, strict=True)]


def wrong_target(languages: Languages | None, text: str, pair: LanguagePair) -> str:
    """Return why a text cannot be read in the language of its target, or without one; empty if it can."""
    if languages is None:
        return ""
    if languages.target == "marker" and text.startswith(">>") and "<<" in text:
        code = text[2 : text.find("<<")]
        if pair.target is not None:
            return f"the text already begins with >>{code}<<: leave out the marker or target_language = {pair.target!r}"
        # Its token would be that of unknown pieces, and the target in any language.
        return "" if code in languages.ids else f"the text's marker {_unknown(languages, code)}"
    if not languages.needs_target or pair.target is not None:
        return ""
    return (
        "this model needs the language of the target: target_language=CODE, --target-language CODE; "
        f"it has {listed(languages)}"
    )


def grouped_rows(
    languages: Languages | None, pairs: Sequence[LanguagePair], options: DecodeOptions
) -> list[tuple[DecodeOptions, list[int]]]:
    """Return the rows that decode together, with options that choose the language of their targets."""
    groups: dict[str | None, list[int]] = {}
    for row, pair in enumerate(pairs):
        groups.setdefault(pair.target, []).append(row)
    return [(_in_language(languages, code, options), rows) for code, rows in groups.items()]


def _in_language(languages: Languages | None, code: str | None, options: DecodeOptions) -> DecodeOptions:
    if languages is None or languages.target == "marker":
        return options
    name = "forced_bos_id" if languages.target == "forced_bos" else "start_id"
    if code is None and getattr(options, name) is None:
        code = languages.default_target
    changes: Any = {} if code is None else {name: languages.ids[code]}
    return replace(options, **changes)


def named_prefix(
    languages: Languages | None, pair: LanguagePair, prefix: PrefixIds | None, options: DecodeOptions
) -> PrefixIds | None:
    """Return a row's prefix after the token of its language, which ``forced_bos_id`` cannot choose before a prefix."""
    ids = options.prefix_ids if prefix is None else prefix
    if languages is None or languages.target != "forced_bos" or len(ids) == 0:
        return prefix
    forced = options.forced_bos_id
    code = pair.target or (languages.default_target if forced is None else None)
    first = forced if code is None else languages.ids[code]
    return prefix if first is None else [first, *map(int, ids)]


def listed(languages: Languages, most: int = 8) -> str:
    """Return some codes of a model for a message."""
    codes = sorted(languages.ids)
    more = f" and {len(codes) - most} more (fatdeploy inspect)" if len(codes) > most else ""
    return ", ".join(codes[:most]) + more


def _wrong(languages: Languages | None, name: str, value: object, n_rows: int) -> list[str]:
    if languages is None:
        return [f"{name} has no meaning: this model has no languages, found {value!r}"]
    if name == "source_language" and languages.source == "none":
        return [f"{name} has no meaning: this model reads its source languages without a name, found {value!r}"]
    if not isinstance(value, str | list | tuple) or not all(isinstance(code, str) for code in value):
        return [f"{name} must be a code, or a list of codes, found {value!r}"]
    codes = [value] if isinstance(value, str) else list(value)
    if not isinstance(value, str) and len(codes) != n_rows:
        return [f"{name} must be a code, or one per source ({n_rows}), found {len(codes)}"]
    return [f"{name} {_unknown(languages, code)}" for code in dict.fromkeys(codes) if code not in languages.ids]


def _unknown(languages: Languages, code: object) -> str:
    near = get_close_matches(str(code), languages.ids, cutoff=0.5)
    return f"{code!r} is unknown; " + (f"near: {', '.join(near)}" if near else f"it has {listed(languages)}")
