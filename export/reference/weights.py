"""Seeded random weights with lively outputs: plain ones repeat one token for ever, and parity would prove nothing."""

import math
import zlib

import torch
from torch import Tensor, nn

from fatdeploy.export.reference.attention import FeatureMap
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.cross.following import MonotonicAttention
from fatdeploy.export.reference.decoder import Decoder
from fatdeploy.export.reference.layers import Norm
from fatdeploy.export.reference.model import DenseNormHead, MlpHead, ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.recurrent.cells import ConnectedCell
from fatdeploy.export.reference.recurrent.decoder import RecurrentDecoder

# Standard deviation of every weight, times √M. On its own it leaves the tiny presets and every `fat` dull (measured: 7
# to 23 different outputs of 32), so there is more: cross-attention sharp and strong enough that the source matters,
# gains of both signs in the last norm so that the last input token does not win for ever, and a centred hidden state,
# because a component that all positions share would choose the same token everywhere.
SPREAD = 0.57
CROSS_SHARPNESS, CROSS_STRENGTH = 4.0, 1.5  # of queries and keys; of values and output
# `fast_fc` has smaller weights, and scores that are too sharp amplify the noise of fp32: with 4.0 the logits of
# fat-base differed in PyTorch from those in float64 by up to twice their bound, with 2.0 by a tenth of it.
FAST_FC_SHARPNESS, FAST_FC_STRENGTH = 2.0, 2.0
# Recurrent layers would have almost the same states for all sources without these. With more, a recurrence amplifies
# the noise of fp32 from step to step: at 2.5, 3.0, 32.0, logits in fp32 and float64 differed by up to 7e-2 of the
# largest after 64 steps of a model with positions, whose inputs are larger; now by up to 7e-6.
CELL_STRENGTH, MIX_STRENGTH = 3.0, 16.0
CONNECTED_STRENGTH, CONNECTED_SHARPNESS = 2.8, 2.2
CONNECTED_OUTPUT, CONNECTED_OUTPUT_WITH_POSITIONS = 28.0, 14.0
# Monotonic heads would be at the end of the source after a few steps, and stay there.
STAYING = 2.0
MIXTURE_STRENGTH = 10.0  # of encoder layers: plain weights would make every mixture the mean of all
CENTRE_GRID = 1 / 16  # coarse, so that sums that round differently on another processor give the same model


def model_from_preset(name: str, seed: int = 0) -> ReferenceModel:
    """Return a preset such as ``fat-small`` with seeded lively weights, ready for inference."""
    return random_model(config_from_preset(name), seed)


def random_model(config: ModelConfig, seed: int = 0) -> ReferenceModel:
    """Return a model with seeded lively weights; each tensor depends only on the seed and its name."""
    with torch.random.fork_rng(devices=[]):  # torch's own initialisation must not change the caller's random state
        model = ReferenceModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, SPREAD / math.sqrt(config.width), generator=_generator(seed, name))
        for name, module in model.named_modules():
            if isinstance(module, Norm):
                module.weight.add_(1)
            if isinstance(module, FeatureMap) and module.has_projection:
                module.projection.copy_(drawn_projection(module, _generator(seed, name)))
        _strengthen_cross_attention(model)
        _strengthen_recurrence(model)
        if isinstance(model.decoder, Decoder) and model.decoder.mixture is not None:
            model.decoder.mixture.mul_(MIXTURE_STRENGTH)
        if (norm := last_norm(model)) is not None:
            signs = torch.randint(0, 2, norm.weight.shape, generator=_generator(seed, "last norm"))
            norm.weight.copy_(signs * 2 - 1)
        _centre(model, _generator(seed, "centre"))
    return model


def _strengthen_cross_attention(model: ReferenceModel) -> None:
    fast = model.config.cross_attention == "fast_fc"
    sharpness = FAST_FC_SHARPNESS if fast else CROSS_SHARPNESS
    strength = FAST_FC_STRENGTH if fast else CROSS_STRENGTH
    for cross in model.decoder.crosses():
        keys, values = cross.memory_matrices()
        for matrix in (cross.q.weight, keys):
            matrix.mul_(sharpness)
        for matrix in (values, cross.out.weight):
            matrix.mul_(strength)
        if isinstance(cross, MonotonicAttention):
            cross.head_bias.add_(STAYING)


def _strengthen_recurrence(model: ReferenceModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.LSTM | nn.GRU):
            for matrix in module.parameters():
                matrix.mul_(CELL_STRENGTH)
        elif isinstance(module, ConnectedCell):
            for layer in (module.from_state, module.from_mix, module.mix, module.context):
                layer.weight.mul_(CONNECTED_STRENGTH)
            module.weigh.weight.mul_(CONNECTED_SHARPNESS)
            plain = model.config.positions == "none"
            module.out.weight.mul_(CONNECTED_OUTPUT if plain else CONNECTED_OUTPUT_WITH_POSITIONS)
    if isinstance(model.decoder, RecurrentDecoder):
        for layer in (*model.decoder.starts(), *model.decoder.mixes()):
            layer.weight.mul_(MIX_STRENGTH)


def _centre(model: ReferenceModel, generator: torch.Generator) -> None:
    """Subtract from the hidden state and the length head their mean over random sources and targets."""
    config = model.config
    source, target = (
        torch.randint(0, n_ids, (32, min(length, longest)), generator=generator)
        for n_ids, length, longest in (
            (model.spec.n_source_ids, 16, config.max_source),
            (config.vocab_size, 24, config.max_target),
        )
    )
    if config.parallel:
        target = torch.full_like(target, config.bos_id)
    memory = model.encode(source, torch.ones_like(source, dtype=torch.bool))
    decoded, _ = model.decode(target, model.stateless(), memory)
    last = model.head.out if isinstance(model.head, MlpHead) else last_norm(model)
    if last is not None and not isinstance(last, nn.RMSNorm):  # it has no bias
        last.bias.sub_(_on_grid(decoded.hidden.mean((0, 1))))
    if model.length is not None and memory.length_logits is not None:
        model.length.bias.sub_(_on_grid(memory.length_logits.mean(0)))


def _on_grid(values: Tensor) -> Tensor:
    return (values / CENTRE_GRID).round() * CENTRE_GRID


def _generator(seed: int, name: str) -> torch.Generator:
    # torch's generator uses 32 bits of its seed, so seed and name must be hashed into these.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def last_norm(model: ReferenceModel) -> Norm | None:
    """Return the norm whose output an MLP head or the output matrix reads; recurrent decoders have none."""
    if isinstance(model.head, DenseNormHead):
        return model.head.norm
    if isinstance(model.decoder, RecurrentDecoder):
        return None
    if model.decoder.norm is not None:
        return model.decoder.norm
    return model.decoder.stack()[-1].ffn.residual.norm


def drawn_projection(features: FeatureMap, generator: torch.Generator) -> Tensor:
    """Return W [H, m, D]: normal; for a performer, with orthogonal rows that have the lengths of normal ones."""
    drawn = torch.randn(features.projection.shape, generator=generator)
    if features.kind != "performer":
        return drawn
    heads, count, width = drawn.shape
    squares = torch.randn(heads, -(-count // width), width, width, generator=generator)
    rows: Tensor = torch.linalg.qr(squares).Q.flatten(1, 2)[:, :count]
    lengths: Tensor = torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)
    return rows * lengths
