"""The weights that training starts from."""

import math

import torch
from torch import nn

from fatdeploy.export.reference.attention import FeatureMap
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.mixing.aft import DecayingMixing
from fatdeploy.export.reference.mixing.gmlp import SpatialMixing
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.recurrent.cells import ConnectedCell
from fatdeploy.export.reference.weights import drawn_projection, last_norm

# Added to scores: an untrained model prefers no position, distance or head.
_ZERO = ("position_scores", "head_bias", "relative.weights", "relative.keys", "relative.values")
# The slowest and the fastest decay of heads without attention, before softplus: memories of about 50 and 1 tokens.
_DECAYS = (-4.0, 0.5)
# Of the matrix over positions that spatial mixing begins with.
_MIXING = 0.1
# Gain of the last norm with a tied output matrix: larger logits start with a loss far above that of guessing.
_LAST_GAIN = 0.25


def untrained_model(config: ModelConfig, seed: int = 0) -> ReferenceModel:
    """Return a model with seeded weights that learn well."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ReferenceModel(config)
        _draw(model)
    return model


@torch.no_grad()
def _draw(model: ReferenceModel) -> None:
    inside = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0, 1 / math.sqrt(model.config.width))
        elif isinstance(module, FeatureMap) and module.has_projection:
            module.projection.copy_(drawn_projection(module, torch.Generator().manual_seed(torch.initial_seed())))
        # Cells keep PyTorch's own start.
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding | nn.LayerNorm | nn.LSTM | nn.GRU):
            inside |= {id(parameter) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            parameter.normal_(0, 0.0 if name.endswith(_ZERO) else 1 / math.sqrt(parameter.shape[-1]))
    _scale(model)


def _scale(model: ReferenceModel) -> None:
    """Give hidden states and logits the size that they should have before training."""
    for module in model.modules():
        if isinstance(module, ConnectedCell):
            # Its input is multiplied with weights whose mean is 1/M; twice as much would start with a higher loss.
            module.out.weight.mul_(model.config.width / 2)
        elif isinstance(module, SpatialMixing):
            # As published: it begins by passing on what each position has.
            module.matrix.mul_(_MIXING)
            module.bias.fill_(1)
        elif isinstance(module, DecayingMixing):
            module.decay.copy_(torch.linspace(*_DECAYS, len(module.decay)))
    norm = last_norm(model)
    if norm is not None and model.config.tie_embeddings and model.config.scale_embeddings:
        norm.weight.fill_(_LAST_GAIN)
