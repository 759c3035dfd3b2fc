"""The options that a bundle decodes with by default, and how a caller changes them."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleError, ConfigError, in_one_line
from fatdeploy.manifest import MANIFEST, GenerationRecord
from fatdeploy.records import shown
from fatdeploy.runtimes.decoding.options import OPTIONS, SAMPLING, DecodeOptions
from fatdeploy.spec import ModelSpec

PLAIN = {field.name: field.default for field in fields(DecodeOptions)}

# The options whose values decide whether another one has a meaning.
COMPARED = (
    *("max_new_tokens", "min_new_tokens", "num_beams", "num_return_sequences", "sample"),
    *("num_beam_groups", "diversity_penalty"),
)


def default_options(bundle: Bundle) -> DecodeOptions:
    """Return the options in a bundle's manifest; options that its model cannot decode with are a BundleError."""
    record = bundle.manifest.generation
    if record is None:
        return DecodeOptions()
    try:
        return options_from_record(record, bundle.spec)
    # RecursionError: lists that are nested too deeply to be named.
    except (ConfigError, RecursionError) as error:
        raise BundleError(
            f"bundle {bundle.path} refused: {MANIFEST}: generation: {error}. Export it again: fatdeploy export SOURCE "
            f"--out {bundle.path} --force"
        ) from error


def options_from_record(record: GenerationRecord, spec: ModelSpec) -> DecodeOptions:
    """Return a record's options, with lengths lowered to what the model has room for; raise with every wrong value."""
    reasons = [f"there is no option {shown(name)}" for name in record.options if name not in OPTIONS]
    reasons += _wrong_values({name: value for name, value in record.options.items() if name in OPTIONS})
    if reasons:
        raise ConfigError(in_one_line("default options refused", reasons))
    options = within_room(DecodeOptions(**record.options), spec.max_target)  # type: ignore[arg-type]
    # A text needs the tokenizer, which only a loaded model has.
    replace(options, prefix=() if isinstance(options.prefix, str) else options.prefix).limit(spec)
    return options


def changed_options(defaults: DecodeOptions, changes: Mapping[str, Any]) -> DecodeOptions:
    """Return a bundle's defaults with a caller's changes.

    What the caller says wins: a default that it leaves without meaning goes back to its plain value, such as a
    temperature if the caller turns sampling off. Changes that contradict each other are refused.
    """
    check_names(changes)
    values = {name: getattr(defaults, name) for name in PLAIN} | dict(changes)
    # Wrong values cannot be compared with others: the constructor refuses them with every reason.
    if not _wrong_values({name: values[name] for name in COMPARED}):
        values |= {name: PLAIN[name] for name in _meaningless(values) if name not in changes}
        values |= _possible_lengths(values, changes)
    return DecodeOptions(**values)


def stated_options(options: DecodeOptions) -> dict[str, Any]:
    """Return the options that differ from plain greedy decoding."""
    return {
        name: value for name, plain in PLAIN.items() if (value := getattr(options, name)) != plain and (value or plain)
    }


def within_room(options: DecodeOptions, room: int, stated: Iterable[str] = ()) -> DecodeOptions:
    """Return options whose lengths fit into a number of positions; what the caller stated stays, and may be refused."""
    lengths = {"max_new_tokens": options.max_new_tokens, "min_new_tokens": options.min_new_tokens}
    lowered = {
        name: room for name, value in lengths.items() if name not in stated and value is not None and value > room
    }
    return replace(options, **lowered) if lowered and room > 0 else options  # type: ignore[arg-type]


def check_names(names: Iterable[str]) -> None:
    """Raise, with near matches, if a name is not that of an option."""
    unknown = [name for name in names if name not in OPTIONS]
    if unknown:
        raise ConfigError(in_one_line("decode options refused", map(_unknown, unknown)))


def _unknown(name: str) -> str:
    near = get_close_matches(name, OPTIONS, n=3) or sorted(OPTIONS)
    return f"there is no option {shown(name)}; there is {', '.join(near)}"


def _wrong_values(values: Mapping[str, Any]) -> list[str]:
    return [reason for name, value in values.items() if (reason := OPTIONS[name].wrong(name, value))]


def _possible_lengths(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default length that a caller's length contradicts, corrected."""
    limit, least = values["max_new_tokens"], values["min_new_tokens"]
    if limit is None or least <= limit:
        return {}
    # As in Hugging Face's ``generate``: EOS stays forbidden up to the caller's limit.
    if "min_new_tokens" not in changes:
        return {"min_new_tokens": limit}
    return {} if "max_new_tokens" in changes else {"max_new_tokens": None}


def _meaningless(values: Mapping[str, Any]) -> set[str]:
    """Return the options that have no meaning beside the others."""
    names = set()
    beams, sample, groups = values["num_beams"], values["sample"], values["num_beam_groups"]
    if not sample:
        names |= {*SAMPLING}
    if values["num_return_sequences"] > beams and not (sample and beams == 1):
        names.add("num_return_sequences")
    if groups == 1 or sample or beams % groups or values["diversity_penalty"] == 0:
        names |= {"num_beam_groups", "diversity_penalty"}
    return names
