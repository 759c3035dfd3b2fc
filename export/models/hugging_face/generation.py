"""How a Hugging Face folder decodes, as default options of a bundle; what has no counterpart is kept by name.

The meaning of every key is that of transformers 5: ``generation_config.json`` alone counts if it exists, and the keys
of ``config.json`` count otherwise. A key that is null is not set. One key means what it meant in transformers 4:
``forced_decoder_ids``, which version 5 no longer reads.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fatdeploy.errors import CheckpointError, ConfigError, in_one_line
from fatdeploy.export.models.hugging_face.generation_keys import (
    KNOWN,
    Options,
    Settings,
    SpokenModel,
    converted_setting,
)
from fatdeploy.manifest import GenerationRecord
from fatdeploy.runtimes.decoding.options import DecodeOptions

log = logging.getLogger("fatdeploy")

GENERATION_CONFIG, CONFIG = "generation_config.json", "config.json"


def generation_from_config(config: Settings, generation: Settings | None, model: SpokenModel) -> GenerationRecord:
    """Return the default options of a folder, and log one warning that names what has no counterpart.

    ``generation`` is the content of ``generation_config.json``, empty or None if the folder has none. An impossible
    value, or a token that the model does not have, is an error with every reason.
    """
    settings = {name: value for name, value in _source(config, generation).items() if value is not None}
    options: Options = {}
    ignored: Options = {}
    reasons: list[str] = []
    for name, value in settings.items():
        try:
            converted = converted_setting(name, value, settings, model)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        if converted is None:
            ignored[name] = value
        else:
            options |= converted
    reasons += _wrong_options(options, model) + _not_json(ignored)
    if reasons:
        file = GENERATION_CONFIG if generation else CONFIG
        raise CheckpointError(
            f"{in_one_line(f'{file} refused', dict.fromkeys(reasons))}. Correct these keys or remove them"
        )
    if ignored:
        named = ", ".join(f"{name} = {json.dumps(value)}" for name, value in sorted(ignored.items()))
        log.warning("settings of the model without a counterpart, recorded in the bundle and ignored: %s", named)
    return GenerationRecord(options, ignored)


def _source(config: Settings, generation: Settings | None) -> Settings:
    """Return the settings that count."""
    if generation:
        return generation
    # Models made of two say how they decode in the part that does it, unless the whole says it.
    decoder = config.get("decoder")
    parts = [decoder if isinstance(decoder, Mapping) else {}, config]
    legacy = {name: part[name] for part in parts for name in KNOWN if part.get(name) is not None}
    return legacy | {"_from_model_config": True}


def _wrong_options(options: Options, model: SpokenModel) -> list[str]:
    """Return why a model cannot decode with options."""
    try:
        DecodeOptions(**options)
    except ConfigError as error:
        return [str(error)]
    wrong = {
        name: [token for token in _tokens(name, value) if token >= model.vocab_size] for name, value in options.items()
    }
    return [
        f"{name} must be ids in 0…{model.vocab_size - 1}, found {tokens[0]}" for name, tokens in wrong.items() if tokens
    ]


def _tokens(name: str, value: Any) -> Iterator[int]:
    """Yield the tokens in the value of an option, which is known to be possible."""
    match name:
        case "forced_bos_id" | "forced_eos_id" | "start_id":
            yield value
        case "eos_ids" | "suppress_tokens" | "begin_suppress_tokens":
            yield from value
        case "forced_tokens":
            yield from (token for _, token in value)
        case "bad_words":
            yield from (token for word in value for token in word)
        case "sequence_bias":
            yield from (token for ids, _ in value for token in ids)


def _not_json(ignored: Options) -> list[str]:
    """Return the keys that no manifest can contain: Python reads NaN and infinity, which are not JSON."""
    reasons = []
    for name, value in ignored.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            reasons.append(f"{name} cannot be written as JSON: {error}")
    return reasons
