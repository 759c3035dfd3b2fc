"""What attentions with a decided mask share: the mask, and how clearly the decisions are made."""

from dataclasses import replace

import torch
from torch import Tensor

from fatdeploy.export.reference.attention import Visible

# The logarithm of what is never chosen: far below any score, and finite, because an infinite one minus itself is NaN.
NEVER = -1e30


def narrowed(visible: Visible, pattern: Tensor, valid: Tensor) -> Visible:
    """Return what is visible through a pattern [B, S, S] as well, for a source with these real tokens [B, S]."""
    # A padded query sees everything, as in other masks: a softmax over nothing would be NaN.
    return replace(visible, allowed=(visible.allowed & pattern[:, None]) | ~valid[:, None, :, None])


def preferring(visible: Visible, scores: Tensor) -> Visible:
    """Return the same keys with more scores [B, S, S] added, for all heads."""
    added = scores[:, None]
    return replace(visible, relative=added if visible.relative is None else visible.relative + added)


def clearness(scores: Tensor, decides: Tensor) -> Tensor:
    """Return the margin of the closest decision of each row [B], relative to its largest score or to 1.

    A decision is the arg-max of scores [B, n, C] where ``decides`` [B, n] is true. Two correct computations in float32
    may decide differently if the margin is as small as their noise.
    """
    best, second = scores.topk(2).values.unbind(-1)
    margins = (best - second).masked_fill(~decides, torch.inf)
    sizes = scores.abs().masked_fill((scores < NEVER / 2) | ~decides[..., None], 0.0)
    closest: Tensor = margins.amin(1) / sizes.amax((1, 2)).clamp(min=1)
    return closest
