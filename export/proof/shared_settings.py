"""The settings of a folder that both sides of a comparison have; the others are set back on both."""

from dataclasses import replace
from typing import Any

from fatdeploy.export.models.hugging_face.generation_keys import NO_COUNTERPART
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.defaults import PLAIN

# Keys of ``generate`` and our options for them. It returns one row per target, counts time in its own way, needs a
# tokenizer for texts, has lost forced positions, and downloads code for groups of beams.
UNSHARED = {
    "num_return_sequences": "num_return_sequences",
    "max_time": "timeout_s",
    "stop_strings": "stop",
    "forced_decoder_ids": "forced_tokens",
    "num_beam_groups": "num_beam_groups",
    "diversity_penalty": "diversity_penalty",
}


def shared_settings(options: DecodeOptions, settings: Any) -> tuple[DecodeOptions, list[str]]:
    """Return our options without what ``generate`` does not share, and the keys that had a value.

    In ``settings``, those of ``generate``, the same keys are set back, and those that have no counterpart here.
    """
    plain: Any = {name: PLAIN[name] for name in UNSHARED.values()}
    unshared = [key for key, name in UNSHARED.items() if getattr(options, name) != plain[name]]
    for key, neutral in NO_COUNTERPART.items():
        value = getattr(settings, key, None)
        if value is not None and value not in neutral:
            unshared.append(key)
    for key in (*UNSHARED, *NO_COUNTERPART):
        if hasattr(settings, key):
            setattr(settings, key, None)
    return replace(options, **plain), unshared


def reads_padding(options: DecodeOptions) -> bool:
    """Return whether ``generate`` takes padding for a part of the source, so that sources must be asked about alone."""
    return options.encoder_repetition_penalty != 1.0 or options.encoder_no_repeat_ngram_size > 0
