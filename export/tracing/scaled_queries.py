"""The factor of dot-product scores, moved into the matrices that make queries while a graph is traced."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fatdeploy.export.reference.attention import Scores


@contextmanager
def scaled_queries(model: nn.Module) -> Iterator[None]:
    """Let queries carry the factor of their scores; afterwards the model has its old weights again.

    The scores are the same up to rounding, without an op for the factor. onnxruntime multiplies a query directly with
    all stored keys only if there is no factor: with it an int8 step of transformer-base took 1.1 to 1.4 times as long.
    """
    scaled = [(module, scores) for module in model.modules() if (scores := _scaled_scores(module)) is not None]
    factors = [scores.scale for _, scores in scaled]
    originals = [[tensor.detach().clone() for tensor in _query_weights(module)] for module, _ in scaled]
    try:
        for module, scores in scaled:
            for tensor in _query_weights(module):
                tensor.mul_(scores.scale)
            scores.scale = 1.0
        yield
    finally:
        for (module, scores), factor, tensors in zip(scaled, factors, originals, strict=True):
            scores.scale = factor
            for tensor, original in zip(_query_weights(module), tensors, strict=True):
                tensor.copy_(original)


def _scaled_scores(module: nn.Module) -> Scores | None:
    scores = getattr(module, "scores", None)
    has_factor = isinstance(scores, Scores) and scores.vectors is None and scores.scale != 1.0
    return scores if has_factor else None


def _query_weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the part of weight and bias that queries come from: the first third where keys and values follow."""
    packed = getattr(module, "qkv", None)
    linear = module.q if packed is None else packed
    assert isinstance(linear, nn.Linear)  # noqa: S101 - every attention with scores has one of the two
    width = linear.out_features // (1 if packed is None else 3)
    return [parameter.detach()[:width] for parameter in linear.parameters()]
