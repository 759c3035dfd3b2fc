"""The named systems and their sizes, as configurations. Imports no torch."""

from typing import Any

from fatdeploy.errors import ConfigError
from fatdeploy.export.reference.config import ModelConfig

PRESETS: dict[str, dict[str, Any]] = {
    "transformer": {"norm": "post", "activation": "relu"},
    "transformer-nat": {"norm": "post", "decoder_attention": "full", "decoding": "parallel", "length": "head"},
    "fast": {"positions": "learned", "relative": "table", "positional_mlp": 8},
    "fast-published": {
        "ffn_width": "width",
        "positions": "learned",
        "relative": "matrix",
        "positional_mlp": 8,
        "attention_relu": True,
        "ffn_skip": True,
    },
    "at": {
        "encoder_attention": "lstm",
        "encoder_direction": "left_to_right",
        "encoder_layers": 1,
        "decoder_attention": "fully_connected",
        "decoder_layers": 1,
        "cross_attention": "none",
        "positions": "none",
    },
    "at-linear": {
        "encoder_direction": "left_to_right",
        "decoder_attention": "linear",
        "features": "elu",
        "head": "mlp",
    },
    "rnn": {"encoder_attention": "lstm", "decoder_attention": "lstm", "positions": "none"},
    "fat": {
        "encoder_attention": "slow",
        "decoder_attention": "linear",
        "features": "elu",
        "cross_attention": "fast_fc",
        "fc_softmax": "tanh_bounded",
        "hybrid": True,
    },
    "fat-published": {
        "encoder_attention": "slow",
        "decoder_attention": "none",
        "cross_attention": "fast_fc",
        "fc_softmax": "tanh",
        "fc_keys": "embedded",
        "fc_table": "vocabulary",
        "fc_scale": False,
        "hybrid": True,
        "hybrid_skips": "layer",
    },
}

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "width": 32, "heads": 2, "ffn_width": 64, "vocab_size": 64, "maximum": 256},
    "small": {"layers": 3, "width": 256, "heads": 4, "ffn_width": 1024, "vocab_size": 1000, "maximum": 256},
    "base": {"layers": 6, "width": 512, "heads": 8, "ffn_width": 2048, "vocab_size": 32000, "maximum": 512},
}


def preset_names() -> list[str]:
    """Return every name that ``config_from_preset`` accepts, such as ``fat-small``."""
    return [f"{preset}-{size}" for preset in PRESETS for size in SIZES]


def config_from_preset(name: str, **changes: Any) -> ModelConfig:
    """Return the configuration of a preset, with ``changes`` to single values."""
    preset, _, size = name.rpartition("-")
    if preset not in PRESETS or size not in SIZES:
        raise ConfigError(f"no preset {name!r}; available: {', '.join(preset_names())}. See: fatdeploy presets")
    sizes = dict(SIZES[size])
    layers, maximum = sizes.pop("layers"), sizes.pop("maximum")
    # A preset may set one size to another, by name.
    same = {size: {**sizes, **changes}[PRESETS[preset][size]] for size in sizes if size in PRESETS[preset]}
    values = {
        **sizes,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "max_source": maximum,
        "max_target": maximum,
        **PRESETS[preset],
        **same,
        **changes,
    }
    return ModelConfig.from_dict(values)
