"""The factor of dot-product scores, moved into the matrices that make queries while a graph is traced."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fatdeploy.export.reference.attention import Scores


@contextmanager
def scaled_queries(model: nn.Module) -> Iterator[None]:
    """Let queries carry the factor of their scores; afterwards every number of the model is what it was.

    The same scores up to rounding, without an op for the factor. onnxruntime multiplies one query with all keys as they
    stand only if there is no factor: with one an int8 step of transformer-base took 1.1 to 1.4 times as long.
    """
    found = [(module, scores) for module in model.modules() if (scores := _scaling(module)) is not None]
    factors = [scores.scale for _, scores in found]
    kept = [[tensor.detach().clone() for tensor in _making_queries(module)] for module, _ in found]
    try:
        for module, scores in found:
            for tensor in _making_queries(module):
                tensor.mul_(scores.scale)
            scores.scale = 1.0
        yield
    finally:
        for (module, scores), factor, tensors in zip(found, factors, kept, strict=True):
            scores.scale = factor
            for tensor, before in zip(_making_queries(module), tensors, strict=True):
                tensor.copy_(before)


def _scaling(module: nn.Module) -> Scores | None:
    scores = getattr(module, "scores", None)
    scales = isinstance(scores, Scores) and scores.vectors is None and scores.scale != 1.0
    return scores if scales else None


def _making_queries(module: nn.Module) -> list[torch.Tensor]:
    """Return the part of weight and bias that queries come from: the first third where keys and values follow."""
    packed = getattr(module, "qkv", None)
    linear = module.q if packed is None else packed
    assert isinstance(linear, nn.Linear)  # noqa: S101 - every attention with scores has one of the two
    width = linear.in_features
    return [tensor.detach()[:width] for tensor in (linear.weight, linear.bias)]
