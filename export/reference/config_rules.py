"""Rules of a configuration: single values, and parts of a model that restrict others. Imports no torch."""

from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from fatdeploy.export.reference.config import ModelConfig

# The smallest legal value of every number; a largest one is checked together with what it depends on.
AT_LEAST = {
    "vocab_size": 4,
    "width": 1,
    "heads": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "ffn_width": 1,
    "max_source": 1,
    "max_target": 1,
    "pad_id": 0,
    "bos_id": 0,
    "eos_id": 0,
    "dropout": 0,
    "window": 0,
    "stride": 1,
    "n_global_tokens": 1,
    "linformer_rows": 1,
    "compression": 1,
    "random_features": 1,
    "positional_mlp": 0,
    "hybrid_threshold": 0,
    "norm_eps": 0,
    "inner_width": 0,
    "decoder_heads": 0,
    "decoder_ffn_width": 0,
    "source_vocab_size": 0,
    "relative_window": 1,
    "location_window": 0,
}


def wrong_value(value: object, kind: Any) -> str:
    """Return why a value is not of the kind that a field has; nothing if it is."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"expected one of {list(get_args(kind))}, found {value!r}"
    # An int is a valid float. A bool is an int in Python, but a model with True heads is a mistake.
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    return "" if fits else f"expected {kind.__name__}, found {value!r}"


def wrong_recurrence(config: "ModelConfig") -> list[str]:
    """Return why recurrent layers do not go together with other choices."""
    reasons = []
    if config.recurrent_encoder and config.encoder_direction == "both" and config.width % 2:
        reasons.append(f"width: a recurrent encoder in both directions needs an even width, found {config.width}")
    if config.cross_attention == "none" and not config.recurrent_decoder:
        reasons.append("cross_attention: none needs a decoder that starts from the source, a recurrent one")
    if config.decoder_attention == "fully_connected" and config.cross_attention != "none":
        reasons.append("cross_attention: fully_connected decoders read the context vector, use none")
    if config.cross_attention == "none" and config.copy:
        reasons.append("copy: needs the weights of a cross-attention, found cross_attention = none")
    if config.recurrent_decoder and config.hybrid:
        reasons.append("hybrid: skips the cross-attention of layers, which recurrent decoders do not have")
    return reasons


def wrong_fully_connected(config: "ModelConfig") -> list[str]:
    """Return why choices of Fast Fully Connected Softmax and of the hybrid pass do not go together with others."""
    reasons, cross, attention = [], config.cross_attention, config.decoder_attention
    if cross != "fast_fc":
        changed = {
            "fc_keys": config.fc_keys != "encoder",
            "fc_table": config.fc_table != "source",
            "fc_scale": not config.fc_scale,
            "decoder_attention": attention == "none",
        }
        reasons += [
            f"{name}: {getattr(config, name)} needs cross_attention = fast_fc, found {cross}"
            for name, is_changed in changed.items()
            if is_changed
        ]
    if config.hybrid_skips == "layer" and not config.hybrid:
        reasons.append("hybrid_skips: layer needs the hybrid forward pass, found hybrid = False")
    elif config.hybrid_skips == "layer" and attention not in ("linear", "none"):
        reasons.append(
            "hybrid_skips: a layer that does not run leaves no keys for later positions, and decoder_attention = "
            f"{attention} needs those of all; use linear or none"
        )
    return reasons


def wrong_fast_layers(config: "ModelConfig") -> list[str]:
    """Return why choices of FAST's layers do not go together with others."""
    reasons = []
    if config.relative == "matrix":
        attentions = {"encoder_attention": config.encoder_attention, "decoder_attention": config.decoder_attention}
        reasons += [
            f"relative: matrix adds vectors to keys, which {name} = {value} does not multiply with queries"
            for name, value in attentions.items()
            if value in ("additive", "slow")
        ]
    if not config.relative_self and config.relative == "none":
        reasons.append("relative_self: needs relative scores, found relative = none")
    if config.ffn_skip:
        widths = {"ffn_width": config.ffn_width, "decoder_ffn_width": config.decoder_ffn_width or config.ffn_width}
        reasons += [
            f"ffn_skip: FFN(h) + h needs {name} = width = {config.width}, found {value}"
            for name, value in widths.items()
            if value != config.width
        ]
    return reasons


def wrong_wiring(config: "ModelConfig") -> list[str]:
    """Return why the decoder's layers cannot read the encoder's layers in this way."""
    reasons = []
    if config.cross_wiring == "matched" and config.encoder_layers != config.decoder_layers:
        reasons.append(
            "cross_wiring: matched needs as many encoder as decoder layers, "
            f"found {config.encoder_layers} and {config.decoder_layers}"
        )
    if config.cross_wiring == "mixed" and config.encoder_layers == 1:
        reasons.append("cross_wiring: mixed needs several encoder layers, found 1; use last")
    if config.recurrent_decoder and config.cross_wiring != "last":
        reasons.append("cross_wiring: a recurrent decoder has one cross-attention, use last")
    return reasons


def wrong_following(config: "ModelConfig") -> list[str]:
    """Return why a cross-attention that depends on its earlier weights does not go together with other choices."""
    if not config.follows_source:
        return []
    kind, reasons = config.cross_attention, []
    if config.parallel:
        reasons.append(f"cross_attention: {kind} needs the weights of the step before, parallel decoding has one step")
    if config.hybrid:
        reasons.append(f"hybrid: skips steps of the cross-attention, and each step of {kind} needs the one before")
    if config.recurrent_decoder:
        reasons.append(f"cross_attention: {kind} has a state, and a recurrent decoder keeps only that of its cells")
    return reasons
