"""The options of the command line that say how to decode, made from the fields of ``DecodeOptions``.

None has a default of its own: what is not typed comes from the bundle.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.bounds import Bound, Flag, Number, Whole
from fatdeploy.runtimes.decoding.options import OPTIONS, DecodeOptions
from fatdeploy.runtimes.text.token_ids import ids_from_text

Command = TypeVar("Command", bound=Callable[..., Any])

EARLY_STOPPING: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}

# Fields that are not typed: processors are functions, and ``run`` has a --scores of its own, which also prints them.
NOT_TYPED = ("processors", "scores")

# Names on the command line that are not the name of the field.
SPELLINGS = {
    "num_beams": ("--beams", "--num-beams"),
    "num_return_sequences": ("--n-best", "--num-return-sequences"),
    "no_repeat_ngram_size": ("--no-repeat-ngram",),
    "encoder_no_repeat_ngram_size": ("--encoder-no-repeat-ngram",),
    "suppress_tokens": ("--suppress",),
    "begin_suppress_tokens": ("--begin-suppress",),
    "forced_bos_id": ("--forced-bos",),
    "forced_eos_id": ("--forced-eos",),
    "forced_tokens": ("--force",),
    "bad_words": ("--bad-word",),
    "exponential_decay_length_penalty": ("--exponential-decay",),
    "eos_ids": ("--eos",),
    "timeout_s": ("--timeout",),
}

SEVERAL_IDS = {"type": click.IntRange(0), "multiple": True, "metavar": "ID"}
ABOVE_ZERO = click.FloatRange(0, min_open=True)

# Values that are typed as something else than what the field contains; ``popped_changes`` converts them.
TYPED: dict[str, dict[str, Any]] = {
    "early_stopping": {"type": click.Choice(list(EARLY_STOPPING)), "show_default": "bundle's or no"},
    "prefix": {"metavar": "TEXT"},
    "no_repeat_ngram_size": {"metavar": "N"},
    "encoder_no_repeat_ngram_size": {"metavar": "N"},
    "suppress_tokens": SEVERAL_IDS,
    "begin_suppress_tokens": SEVERAL_IDS,
    "forced_bos_id": {"metavar": "ID"},
    "forced_eos_id": {"metavar": "ID"},
    "forced_tokens": {"type": (click.IntRange(0), click.IntRange(0)), "multiple": True, "metavar": "N ID"},
    "bad_words": {"multiple": True, "metavar": "IDS"},
    "sequence_bias": {"type": (str, float), "multiple": True, "metavar": "IDS NUMBER"},
    "exponential_decay_length_penalty": {"type": (click.IntRange(0), ABOVE_ZERO), "metavar": "N FACTOR"},
    "eos_ids": SEVERAL_IDS,
    "stop": {"multiple": True, "metavar": "TEXT"},
    "shortlist": {"type": click.Path(path_type=Path), "metavar": "FILE|auto"},
    "timeout_s": {"metavar": "SECONDS"},
}

DEFAULTS = {field.name: field.default for field in fields(DecodeOptions)}


no_defaults_option = click.option(
    "--no-defaults", is_flag=True, help="Begin with greedy decoding instead of the bundle's default options."
)


def decode_options(*names: str) -> Callable[[Command], Command]:
    """Add the options of these fields of ``DecodeOptions`` to a command; without names, all that can be typed."""
    chosen = names or [name for name in OPTIONS if name not in NOT_TYPED]

    def add(command: Command) -> Command:
        command = no_defaults_option(command)
        for name in reversed(chosen):
            command = _option(name)(command)
        return command

    return add


def _option(name: str) -> Callable[[Command], Command]:
    record = OPTIONS[name]
    plain = f"--{name.replace('_', '-')}"
    # A flag has two spellings: it must also be possible to turn off what the bundle turns on.
    switch = (f"{plain}/--no-{plain.removeprefix('--')}",) if isinstance(record.bound, Flag) else (plain,)
    spellings = SPELLINGS.get(name, switch)
    settings = {"default": None} | _settings(record.bound, DEFAULTS[name]) | TYPED.get(name, {})
    return click.option(*spellings, name, help=record.help, **settings)


def _settings(bound: Bound, default: object) -> dict[str, Any]:
    """Return what click must know about a value within a bound."""
    shown = {} if default is None else {"show_default": f"bundle's or {default}"}
    match bound:
        case Whole():
            return {"type": click.IntRange(bound.least), **shown}
        case Number(low=None, high=None):
            return {"type": float, **shown}
        case Number():
            limits = {"min_open": bound.low_open, "max_open": bound.high_open}
            return {"type": click.FloatRange(bound.low, bound.high, **limits), **shown}
    return {}


def popped_changes(arguments: dict[str, Any], *, as_ids: bool = False) -> tuple[DecodeOptions | None, dict[str, Any]]:
    """Return the options to begin with, None for the bundle's, and the fields that were typed.

    Both are removed from all arguments of a command.
    """
    options = DecodeOptions() if arguments.pop("no_defaults") else None
    typed = {name: arguments.pop(name) for name in [*arguments] if name in OPTIONS}
    # An option that may be repeated is empty if it was not typed.
    return options, {name: _converted(name, value, as_ids) for name, value in typed.items() if value not in (None, ())}


def _converted(name: str, value: Any, as_ids: bool) -> Any:
    """Return what the field of DecodeOptions contains."""
    match name:
        case "early_stopping":
            return EARLY_STOPPING[value]
        case "bad_words":
            return [ids_from_text("--bad-word", word) for word in value]
        case "sequence_bias":
            return [(ids_from_text("--sequence-bias", ids), bias) for ids, bias in value]
        case "stop":
            return [ids_from_text("--stop", stop) if as_ids else stop for stop in value]
        case "prefix":
            # An empty text is no prefix and needs no tokenizer.
            return ids_from_text("--prefix", value) if as_ids or not value else value
        case "shortlist":
            return _listed_ids(value)
    return list(value) if isinstance(value, tuple) else value


def _listed_ids(path: Path) -> list[int] | str:
    """Return the ids in a file, or the word that stands for the bundle's own list."""
    if str(path) == "auto":
        return "auto"
    try:
        return ids_from_text(f"--shortlist {path}", path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --shortlist {path}: {error}") from error
