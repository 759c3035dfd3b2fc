"""Every key of a Hugging Face generation config: its option here, or that it has no effect or no counterpart."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.bounds import is_whole

Settings = Mapping[str, Any]
Options = dict[str, Any]


class SpokenModel(Protocol):
    """What settings must fit: a ModelSpec or a ModelConfig."""

    @property
    def vocab_size(self) -> int:
        """How many tokens targets are made of."""
        ...

    @property
    def max_target(self) -> int:
        """The most tokens of a target."""
        ...

    @property
    def bos_id(self) -> int:
        """The first input of the decoder."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends a target."""
        ...


# Their key: our option, and the value that has no effect.
SAME_MEANING: dict[str, tuple[str, object]] = {
    "num_beams": ("num_beams", 1),
    "length_penalty": ("length_penalty", 1.0),
    "early_stopping": ("early_stopping", False),
    "num_return_sequences": ("num_return_sequences", 1),
    "do_sample": ("sample", False),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", 0),
    "encoder_repetition_penalty": ("encoder_repetition_penalty", 1.0),
    "encoder_no_repeat_ngram_size": ("encoder_no_repeat_ngram_size", 0),
    "suppress_tokens": ("suppress_tokens", []),
    "begin_suppress_tokens": ("begin_suppress_tokens", []),
    "forced_bos_token_id": ("forced_bos_id", None),
    "renormalize_logits": ("renormalize", False),
    "exponential_decay_length_penalty": ("exponential_decay_length_penalty", None),
    "num_beam_groups": ("num_beam_groups", 1),
    "max_time": ("timeout_s", None),
}

# Options of sampling, and the values that have no effect. 50 is what ``generate`` takes without top_k.
SAMPLED: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

# Keys that change no token: where the numbers are kept, what else is returned, and who wrote the file. The settings of
# an assistant have an effect only if a caller passes one.
NO_EFFECT = {
    *("transformers_version", "_from_model_config", "_commit_hash", "pad_token_id"),
    *("use_cache", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size", "continuous_batching_config"),
    *("compile_config", "disable_compile"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
}

# Keys without a counterpart, and the values that have no effect.
NO_COUNTERPART: dict[str, tuple[object, ...]] = {
    # Only a quantized cache changes tokens.
    "cache_implementation": ("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "paged"),
    "guidance_scale": (1,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "watermarking_config": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "top_h": (),
    "use_mtp": (False,),
    "is_assistant": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "assistant_ensemble_weight": (),
    "speculation_type": (),
    "generation_kwargs": ({},),
}


def converted_setting(name: str, value: Any, settings: Settings, model: SpokenModel) -> Options | None:
    """Return the options that a key becomes, none if it has no effect; None if it has no counterpart."""
    if name in NO_EFFECT:
        return {}
    if name in SAME_MEANING:
        option, neutral = SAME_MEANING[name]
        converted = {} if value == neutral else {option: value}
        if converted and name == "do_sample" and "top_k" not in settings:
            converted["top_k"] = SAMPLED["top_k"]
        return converted
    if name in SAMPLED:
        return _sampled(name, value, settings)
    if name in CONVERTERS:
        return CONVERTERS[name](value, settings, model)
    return {} if value in NO_COUNTERPART.get(name, ()) else None


def _sampled(name: str, value: Any, settings: Settings) -> Options | None:
    if settings.get("do_sample") is not True:
        return {} if value == SAMPLED[name] else None
    neutral = 0 if name == "top_k" else SAMPLED[name]
    return {} if value == neutral or _beyond(name, value) else {name: value}


def _beyond(name: str, value: Any) -> bool:
    """Whether a number is outside the range in which ``generate`` makes use of it."""
    if not isinstance(value, int | float):
        return False
    return (name == "typical_p" and value > 1) or (name in ("epsilon_cutoff", "eta_cutoff") and not 0 < value < 1)


def _most_tokens(value: Any, settings: Settings, model: SpokenModel) -> Options:
    """Return a limit of new tokens; ``max_length`` also counts the start token, and ``max_new_tokens`` wins."""
    if "max_new_tokens" in settings:
        return {"max_new_tokens": min(_whole("max_new_tokens", settings["max_new_tokens"], 1), model.max_target)}
    return {"max_new_tokens": min(_whole("max_length", value, 2) - 1, model.max_target)}


def _fewest_tokens(value: Any, settings: Settings, model: SpokenModel) -> Options:
    """Return how many new tokens come before EOS; ``min_length`` also counts the start token."""
    if "min_new_tokens" in settings:
        least = _whole("min_new_tokens", settings["min_new_tokens"], 0)
    else:
        least = max(0, _whole("min_length", value, 0) - 1)
    limits = [name for name in ("max_length", "max_new_tokens") if name in settings]
    most = _most_tokens(settings[limits[0]], settings, model)["max_new_tokens"] if limits else model.max_target
    # As there: EOS is forbidden up to the limit.
    return {"min_new_tokens": min(least, most)} if least else {}


def _ends(value: Any, _settings: Settings, model: SpokenModel) -> Options:
    ids = _listed(value)
    return {} if ids == [model.eos_id] else {"eos_ids": ids}


def _start_without_key(value: Any, settings: Settings, model: SpokenModel) -> Options | None:
    return {} if "decoder_start_token_id" in settings else _start(value, settings, model)


def _start(value: Any, _settings: Settings, model: SpokenModel) -> Options | None:
    """Return the first input of the decoder."""
    ids = _listed(value)
    if len(ids) > 1:  # one per source of a batch
        return None
    return {} if ids == [model.bos_id] else {"start_id": value if len(ids) != 1 else ids[0]}


def _forced_start(value: Any, settings: Settings, _model: SpokenModel) -> Options | None:
    """Return the first token as the oldest files say it, which only counts among the keys of ``config.json``."""
    if not settings.get("_from_model_config"):
        return None
    return {"forced_bos_id": settings["bos_token_id"]} if value and "bos_token_id" in settings else {}


def _forced_end(value: Any, _settings: Settings, _model: SpokenModel) -> Options | None:
    ids = _listed(value)
    return {"forced_eos_id": ids[0]} if len(ids) == 1 else None


def _forbidden_words(value: Any, settings: Settings, model: SpokenModel) -> Options:
    # As there: a word that is EOS alone does not count.
    ends = [[token] for token in _listed(settings.get("eos_token_id", model.eos_id))]
    words = [word for word in value if word not in ends] if isinstance(value, list) else value
    return {"bad_words": words} if words else {}


def _biased(value: Any, _settings: Settings, _model: SpokenModel) -> Options:
    """Return pairs of ids and a bias; their keys may be tuples written as text, such as ``(5, 6)``."""
    pairs = [*value.items()] if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"sequence_bias must be pairs of token ids and a number, found {value!r}")
    biases = [[_ids_from_key(ids) if isinstance(ids, str) else ids, bias] for ids, bias in pairs]
    return {"sequence_bias": biases} if biases else {}


def _ids_from_key(key: str) -> list[int]:
    if not re.fullmatch(r"\(?\s*\d{1,18}(\s*,\s*\d{1,18})*\s*,?\s*\)?", key):
        raise ConfigError(f"sequence_bias must have token ids as keys, such as (5, 6), found {key!r}")
    return [int(token) for token in re.findall(r"\d+", key)]


def _forced_tokens(value: Any, _settings: Settings, _model: SpokenModel) -> Options | None:
    """Return forced tokens by the number of tokens before them; there the start token counts."""
    pairs = value if isinstance(value, list) else []
    expressible = [
        [pair[0] - 1, pair[1]]
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and is_whole(pair[0], 1) and is_whole(pair[1])
    ]
    if len(expressible) < len(pairs) or pairs is not value:
        return None
    return {"forced_tokens": expressible} if expressible else {}


def _diverse(value: Any, settings: Settings, _model: SpokenModel) -> Options | None:
    if value == 0:
        return {}
    return {"diversity_penalty": value} if settings.get("num_beam_groups", 1) != 1 else None


def _stops(value: Any, _settings: Settings, _model: SpokenModel) -> Options:
    stops = [value] if isinstance(value, str) else value
    return {"stop": stops} if stops else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _whole(name: str, value: Any, least: int) -> int:
    if not is_whole(value, least):
        counted = " (it counts the start token)" if name == "max_length" else ""
        raise ConfigError(f"{name} must be a whole number from {least} up{counted}, found {value!r}")
    return int(value)


CONVERTERS: dict[str, Callable[[Any, Settings, SpokenModel], Options | None]] = {
    "max_length": _most_tokens,
    "max_new_tokens": _most_tokens,
    "min_length": _fewest_tokens,
    "min_new_tokens": _fewest_tokens,
    "eos_token_id": _ends,
    "bos_token_id": _start_without_key,
    "decoder_start_token_id": _start,
    "force_bos_token_to_be_generated": _forced_start,
    "forced_eos_token_id": _forced_end,
    "bad_words_ids": _forbidden_words,
    "sequence_bias": _biased,
    "forced_decoder_ids": _forced_tokens,
    "diversity_penalty": _diverse,
    "stop_strings": _stops,
}

KNOWN = SAME_MEANING.keys() | SAMPLED.keys() | CONVERTERS.keys() | NO_EFFECT | NO_COUNTERPART.keys()
