"""What a model cannot do: options beyond its vocabulary, its positions or its way of decoding."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Not at run time: options are made with the help of this file, and help must not need numpy.
    from fatdeploy.runtimes.decoding.options import DecodeOptions
    from fatdeploy.spec import ModelSpec

# The options that a parallel model understands; its reason against a prefix is that of ``wrong_prefix``.
PARALLEL = ("max_new_tokens", "length_candidates", "timeout_s", "scores", "prefix")


def wrong_for_model(options: "DecodeOptions", spec: "ModelSpec") -> list[str]:
    """Return all reasons why a model cannot decode like this."""
    reasons = [
        *wrong_prefix(options.prefix_ids, options, spec),
        *_wrong_ids(options, spec),
        *_wrong_choice(options, spec),
    ]
    reasons += _wrong_for_source(options) if spec.n_source_ids != spec.vocab_size else []
    return reasons + (_wrong_in_parallel(options) if spec.decoding == "parallel" else [])


def wrong_prefix(prefix: Sequence[int], options: "DecodeOptions", spec: "ModelSpec") -> list[str]:
    """Return why no target of a model can begin with a prefix under the options; empty if it can."""
    if prefix and spec.decoding == "parallel":
        return [_without_meaning("prefix")]
    return [*_wrong_tokens("prefix", prefix, spec), *_wrong_lengths(prefix, options, spec)]


def _wrong_lengths(prefix: Sequence[int], options: "DecodeOptions", spec: "ModelSpec") -> list[str]:
    room = spec.max_target - len(prefix)
    if room < 1:
        return [f"prefix must have 0…{spec.max_target - 1} tokens (below max_target), found {len(prefix)}"]
    what = "the model's max_target" + (" without the prefix" if prefix else "")
    return [
        f"{name} must lie in {low}…{room} ({what}), found {value}"
        for name, low, value in (
            ("max_new_tokens", 1, options.max_new_tokens),
            ("min_new_tokens", 0, options.min_new_tokens),
        )
        if value is not None and value > room
    ]


def _wrong_choice(options: "DecodeOptions", spec: "ModelSpec") -> list[str]:
    reasons = []
    if options.length_candidates > 1 and not spec.length_log_probs:
        reasons.append(f"length_candidates must be 1: this model has no length head, found {options.length_candidates}")
    if options.num_beams > 1:
        ends, shortlist = options.end_ids(spec), listed_ids(options)
        n_tokens = spec.vocab_size if shortlist is None else len({*shortlist, *ends})
        if options.n_candidates(spec) > n_tokens:
            most = max(1, n_tokens // (1 + len(ends)))
            part = "half" if len(ends) == 1 else f"1/{1 + len(ends)} of"
            what = "vocabulary" if shortlist is None else "shortlist with EOS"
            reasons.append(f"num_beams must lie in 1…{most} ({part} the {what}), found {options.num_beams}")
    return reasons


def listed_ids(options: "DecodeOptions") -> Sequence[int] | None:
    """Return the caller's own shortlist; None for the whole vocabulary and for lists that follow from sources."""
    return None if isinstance(options.shortlist, str) else options.shortlist


def _wrong_for_source(options: "DecodeOptions") -> list[str]:
    return [
        f"{name} must be {neutral}: the ids of source and target are those of two vocabularies, found {value}"
        for name, neutral in {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}.items()
        if (value := getattr(options, name)) != neutral
    ]


def _wrong_ids(options: "DecodeOptions", spec: "ModelSpec") -> list[str]:
    ids_of_options: dict[str, Sequence[int]] = {
        "start_id": () if options.start_id is None else (options.start_id,),
        "suppress_tokens": options.suppress_tokens,
        "begin_suppress_tokens": options.begin_suppress_tokens,
        "forced_bos_id": () if options.forced_bos_id is None else (options.forced_bos_id,),
        "forced_eos_id": () if options.forced_eos_id is None else (options.forced_eos_id,),
        "forced_tokens": [token for _, token in options.forced_tokens],
        "bad_words": [token for word in options.bad_words for token in word],
        "sequence_bias": [token for sequence, _ in options.sequence_bias for token in sequence],
        "eos_ids": options.eos_ids,
        "stop": [token for stop in options.stop if not isinstance(stop, str) for token in stop],
        "shortlist": listed_ids(options) or (),
    }
    return [reason for name, ids in ids_of_options.items() for reason in _wrong_tokens(name, ids, spec)]


def _wrong_tokens(name: str, ids: Sequence[int], spec: "ModelSpec") -> list[str]:
    wrong = [token for token in ids if not 0 <= token < spec.vocab_size]
    return [f"{name} must be ids in 0…{spec.vocab_size - 1}, found {wrong[0]}"] if wrong else []


def _wrong_in_parallel(options: "DecodeOptions") -> list[str]:
    values = {field.name: (getattr(options, field.name), field.default) for field in fields(options)}
    return [
        _without_meaning(name)
        for name, (value, default) in values.items()
        if name not in PARALLEL and value != default and not _is_empty(value)
    ]


def _without_meaning(name: str) -> str:
    return f"{name} has no meaning for a parallel model, which chooses all tokens at once"


def _is_empty(value: object) -> bool:
    """Whether a value is a list or text without entries: it means the same as the default, an empty tuple."""
    return isinstance(value, Sequence) and not value
