"""A reference ``transformer`` as a CTranslate2 model: the same weights through its own specification."""

from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2.specs import TransformerSpec, common_spec
from torch import Tensor, nn

from benchmarks.peers.ctranslate2_decoding import NO_END
from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.decoder import CachedAttention
from fatdeploy.export.reference.encoder import SoftmaxAttention
from fatdeploy.export.reference.layers import FeedForward, Residual
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.positions import Positions
from fatdeploy.folders import replaced_folder


def write_ctranslate2_model(
    model: ReferenceModel, folder: Path, *, compute_type: str = "float32", force: bool = False
) -> None:
    """Write a folder that ``ctranslate2.Translator`` reads, with weights of the type that it computes with.

    A model that CTranslate2's specification cannot express is refused.
    """
    _check_expressible(model.config)
    spec = _spec_from_model(model)
    spec.validate()
    spec.optimize(quantization=compute_type)
    with replaced_folder(folder, force=force) as new:
        spec.save(str(new))


def prepare_ctranslate2_model(model: ReferenceModel, folder: Path, *, compute_type: str = "float32") -> None:
    """Write the folder unless it exists."""
    if not folder.exists():
        write_ctranslate2_model(model, folder, compute_type=compute_type)


def _check_expressible(config: ModelConfig) -> None:
    expected = {
        "norm": "post",
        "activation": "relu",
        "positions": "sinusoidal",
        "encoder_attention": "scaled_dot",
        "encoder_direction": "both",
        "decoder_attention": "scaled_dot",
        "cross_attention": "scaled_dot",
        "cross_wiring": "last",
        "relative": "none",
        "positional_mlp": 0,
        "attention_relu": False,
        "ffn_skip": False,
        "head": "linear",
        "copy": False,
        "hybrid": False,
        "decoding": "autoregressive",
        "target_order": "left_to_right",
    }
    reasons = [
        f"{name} must be {value!r}, found {getattr(config, name)!r}"
        for name, value in expected.items()
        if getattr(config, name) != value
    ]
    if reasons:
        raise ConfigError(in_one_line("CTranslate2 cannot express this model", reasons))


def _spec_from_model(model: ReferenceModel) -> TransformerSpec:
    config = model.config
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=False,
        activation=common_spec.Activation.RELU,
    )
    _set_vocabulary(spec, config)
    _set_embedding(spec.encoder, spec.encoder.embeddings[0], model.source_embedding, model.source_positions, config)
    _set_embedding(spec.decoder, spec.decoder.embeddings, model.target_embedding, model.target_positions, config)
    spec.decoder.projection.weight = _array(model.output.weight)
    for layer_spec, layer in zip(spec.encoder.layer, model.encoder.layers, strict=True):
        _set_self_attention(layer_spec.self_attention, layer.attention, layer.residual)
        _set_ffn(layer_spec.ffn, layer.ffn)
    for layer_spec, layer in zip(spec.decoder.layer, model.decoder.stack(), strict=True):
        _set_self_attention(layer_spec.self_attention, layer.attention, layer.self_residual)
        _set_linears(layer_spec.attention.linear, (layer.cross.q, layer.cross.kv, layer.cross.out))
        _set_norm(layer_spec.attention.layer_norm, layer.cross_residual)
        _set_ffn(layer_spec.ffn, layer.ffn)
    return spec


def _set_vocabulary(spec: TransformerSpec, config: ModelConfig) -> None:
    """Name tokens by their ids, and add nothing to a source."""
    tokens = [str(token) for token in range(config.vocab_size)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.unk_token = NO_END
    spec.config.bos_token = spec.config.decoder_start_token = str(config.bos_id)
    spec.config.eos_token = str(config.eos_id)
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.config.layer_norm_epsilon = 1e-5


def _set_embedding(stack: Any, spec: Any, embedding: nn.Embedding, positions: Positions, config: ModelConfig) -> None:
    spec.weight = _array(embedding.weight)
    stack.scale_embeddings = config.scale_embeddings
    # CTranslate2's own formula puts all sines before all cosines; ours alternates them.
    stack.position_encodings.encodings = _array(positions.table)


def _set_self_attention(spec: Any, attention: SoftmaxAttention | CachedAttention, residual: Residual) -> None:
    _set_linears(spec.linear, (attention.qkv, attention.out))
    _set_norm(spec.layer_norm, residual)


def _set_ffn(spec: Any, ffn: FeedForward) -> None:
    _set_linears((spec.linear_0, spec.linear_1), (ffn.into, ffn.out))
    _set_norm(spec.layer_norm, ffn.residual)


def _set_linears(specs: Any, linears: tuple[nn.Linear, ...]) -> None:
    for spec, linear in zip(specs, linears, strict=True):
        spec.weight, spec.bias = _array(linear.weight), _array(linear.bias)


def _set_norm(spec: Any, residual: Residual) -> None:
    spec.gamma, spec.beta = _array(residual.norm.weight), _array(residual.norm.bias)


def _array(tensor: Tensor) -> np.ndarray:
    # A copy: CTranslate2 quantizes in place, which would overwrite the weights of the reference.
    return tensor.detach().contiguous().numpy().copy()
