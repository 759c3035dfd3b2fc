"""How to decode: every option, its range, and what of it a model can do. All that is wrong is said before any work."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import ModelSpec, Tokens

EarlyStopping = bool | Literal["never"]
Ids = Sequence[int]


class LogitsProcessor(Protocol):
    """Changes scores before a token is chosen. Rows are independent: what it does to one must not look at another."""

    def __call__(self, tokens: Tokens, scores: Floats) -> Floats:
        """Return scores [R, V] for rows that have said ``tokens`` [R, n], BOS included; may change them in place."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How to decode. Defaults are greedy; names and meanings are those of Hugging Face's ``generate``.

    ``max_new_tokens`` counts EOS and is what the model has room for unless said. A ``prefix`` begins every target: ids
    in the order of generation, or text where there is a tokenizer. ``stop`` sequences, ids or text, end a target and
    are not part of it. A ``shortlist`` is the only tokens that may be said, beside EOS. ``forced_tokens`` are pairs:
    how many new tokens were said before, and the token that follows. ``scores`` asks for log-probabilities where
    choosing tokens needs none (beams always have them). ``seed`` makes samples repeatable: each source has generators
    of its own, whatever else is in its batch. ``timeout_s`` ends a call: what is not finished then is ``cancelled``.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    prefix: Ids | str = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: Ids = ()
    forced_tokens: Sequence[tuple[int, int]] = ()
    bad_words: Sequence[Ids] = ()
    stop: Sequence[Ids | str] = ()
    shortlist: Ids | None = None
    processors: Sequence[LogitsProcessor] = ()
    scores: bool = False
    length_candidates: int = 1  # of parallel models with a length head
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ID_OPTIONS:
            # As lists: an array has no truth and no equality of its own.
            object.__setattr__(self, name, _without_arrays(getattr(self, name)))
        reasons = [reason for name, range_ in RANGES.items() if (reason := range_.wrong(name, getattr(self, name)))]
        reasons += [] if reasons else self._wrong_together()
        if reasons:
            raise ConfigError(in_one_line("decode options refused", reasons))

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The prefix as tokens; a text must have been replaced by them."""
        if not self.prefix:
            return ()
        if isinstance(self.prefix, str):
            raise ConfigError("prefix refused: text needs a tokenizer, and here is none; pass token ids")
        return tuple(int(token) for token in self.prefix)

    def rows_per_source(self, spec: ModelSpec) -> int:
        """Return how many targets of a source are decoded side by side."""
        if spec.decoding == "parallel":
            return self.length_candidates
        return max(self.num_beams, self.num_return_sequences)

    def limit(self, spec: ModelSpec) -> int:
        """Return the most new tokens for a model; everything that it cannot do is one ConfigError."""
        room = spec.max_target - len(self.prefix_ids)
        reasons = [*self._wrong_ids(spec), *self._wrong_lengths(spec, room), *self._wrong_choice(spec)]
        if spec.decoding == "parallel":
            reasons += self._wrong_in_parallel()
        if reasons:
            raise ConfigError(in_one_line("decode options refused", reasons))
        return room if self.max_new_tokens is None else self.max_new_tokens

    def _wrong_lengths(self, spec: ModelSpec, room: int) -> list[str]:
        if room < 1:
            return [f"prefix must have 0…{spec.max_target - 1} tokens (below max_target), found {len(self.prefix_ids)}"]
        what = "the model's max_target" + (" without the prefix" if self.prefix else "")
        return [
            f"{name} must lie in {low}…{room} ({what}), found {value}"
            for name, low, value in (
                ("max_new_tokens", 1, self.max_new_tokens),
                ("min_new_tokens", 0, self.min_new_tokens),
            )
            if value is not None and value > room
        ]

    def _wrong_choice(self, spec: ModelSpec) -> list[str]:
        reasons = []
        if self.length_candidates > 1 and not spec.length_log_probs:
            reasons.append(
                f"length_candidates must be 1: this model has no length head, found {self.length_candidates}"
            )
        if self.num_beams > 1:
            known = spec.vocab_size if self.shortlist is None else len({*self.shortlist, spec.eos_id})
            what = "vocabulary" if self.shortlist is None else "shortlist with EOS"
            if 2 * self.num_beams > known:
                most = max(1, known // 2)
                reasons.append(f"num_beams must lie in 1…{most} (half the {what}), found {self.num_beams}")
        return reasons

    def _wrong_together(self) -> list[str]:
        reasons = []
        if self.num_return_sequences > self.num_beams and not self.sample:
            reasons.append(
                f"num_return_sequences must lie in 1…{self.num_beams} (num_beams), found {self.num_return_sequences}"
            )
        if self.sample and self.num_beams > 1:
            reasons.append(f"num_beams must be 1 with sample, found {self.num_beams}")
        if not self.sample:
            reasons += [
                f"{name} must be {plain} without sample (--sample), found {value}"
                for name, plain in SAMPLING.items()
                if (value := getattr(self, name)) != plain
            ]
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            reasons.append(
                f"min_new_tokens must lie in 0…{self.max_new_tokens} (max_new_tokens), found {self.min_new_tokens}"
            )
        return reasons

    def _wrong_ids(self, spec: ModelSpec) -> list[str]:
        stops = [token for one in self.stop if not isinstance(one, str) for token in one]
        named = {
            "prefix": self.prefix_ids,
            "suppress_tokens": self.suppress_tokens,
            "forced_tokens": [token for _, token in self.forced_tokens],
            "bad_words": [token for word in self.bad_words for token in word],
            "stop": stops,
            "shortlist": () if self.shortlist is None else self.shortlist,
        }
        return [
            f"{name} must be ids in 0…{spec.vocab_size - 1}, found {wrong[0]}"
            for name, ids in named.items()
            if (wrong := [token for token in ids if not 0 <= token < spec.vocab_size])
        ]

    def _wrong_in_parallel(self) -> list[str]:
        allowed = ("max_new_tokens", "length_candidates", "timeout_s", "scores")
        given = {one.name: (getattr(self, one.name), one.default) for one in fields(self) if one.name not in allowed}
        return [
            f"{name} has no meaning for a parallel model, which says all tokens at once"
            for name, (value, plain) in given.items()
            # An empty list asks for as little as the empty tuple that is the default.
            if value != plain and (value or plain)
        ]


@dataclass(frozen=True)
class Range:
    """What an option must be, as a test and in words."""

    fits: Callable[[Any], bool]
    said: str

    def wrong(self, name: str, value: object) -> str:
        """Return what is wrong with a value; empty if nothing is."""
        return "" if self.fits(value) else f"{name} must be {self.said}, found {value!r}"


def _is_whole(value: object, low: int = 0) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= low)


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def _without_arrays(value: Any) -> Any:
    """Return ids with lists in the place of arrays, also inside of a list."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple) and any(isinstance(one, np.ndarray) for one in value):
        return [_without_arrays(one) for one in value]
    return value


def _are_ids(value: object, fewest: int = 0) -> bool:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return False
    return len(value) >= fewest and all(_is_whole(one) for one in value)


def _are(value: object, fits: Callable[[Any], bool]) -> bool:
    """Whether each of several values fits."""
    return isinstance(value, list | tuple) and all(fits(one) for one in value)


def _is_forced(value: object) -> bool:
    return _are_ids(value) and len(value) == 2  # type: ignore[arg-type]


def _whole(low: int) -> Range:
    return Range(lambda value: _is_whole(value, low), f"a whole number from {low} up")


def _number(said: str, fits: Callable[[float], bool]) -> Range:
    return Range(lambda value: _is_number(value) and fits(value), said)


# Those that hold token ids; and what the options of samples say when nothing is asked of them.
ID_OPTIONS = ("prefix", "suppress_tokens", "forced_tokens", "bad_words", "stop", "shortlist")
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

_IDS = Range(_are_ids, "token ids")
_FLAG = Range(lambda value: isinstance(value, bool), "True or False")

RANGES: dict[str, Range] = {
    "max_new_tokens": Range(lambda value: value is None or _is_whole(value, 1), "a whole number from 1 up"),
    "min_new_tokens": _whole(0),
    "num_beams": _whole(1),
    "length_penalty": Range(_is_number, "a number"),
    "early_stopping": Range(
        lambda value: isinstance(value, bool) or (isinstance(value, str) and value == "never"), "True, False or 'never'"
    ),
    "num_return_sequences": _whole(1),
    "sample": _FLAG,
    "temperature": _number("a number above 0", lambda value: value > 0),
    "top_k": _whole(0),
    "top_p": _number("a number above 0, at most 1", lambda value: 0 < value <= 1),
    "min_p": _number("a number from 0, below 1", lambda value: 0 <= value < 1),
    "seed": _whole(0),
    "prefix": Range(lambda value: isinstance(value, str) or _are_ids(value), "token ids or text"),
    "repetition_penalty": _number("a number above 0", lambda value: value > 0),
    "no_repeat_ngram_size": _whole(0),
    "suppress_tokens": _IDS,
    "forced_tokens": Range(lambda value: _are(value, _is_forced), "pairs: tokens said before, token id"),
    "bad_words": Range(lambda value: _are(value, lambda one: _are_ids(one, 1)), "lists of token ids, none empty"),
    "stop": Range(
        lambda value: _are(value, lambda one: one != "" if isinstance(one, str) else _are_ids(one, 1)),
        "texts or lists of token ids, none empty",
    ),
    "shortlist": Range(lambda value: value is None or _are_ids(value, 1), "token ids, at least one"),
    "processors": Range(lambda value: _are(value, callable), "callables in a list"),
    "scores": _FLAG,
    "length_candidates": _whole(1),
    "timeout_s": Range(lambda value: value is None or (_is_number(value) and value > 0), "seconds above 0"),
}
