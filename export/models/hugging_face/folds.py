"""What is computed once at import: position tables, distance tables, scales. The model itself stays plain."""

import math

import numpy as np
import torch
from torch import Tensor


def halves_table(length: int, width: int) -> Tensor:
    """Return the positions of Marian and Pegasus: all sines of a position, then all cosines, as [length, width]."""
    exponents = 2 * (np.arange(width) // 2) / width
    angles = np.arange(length)[:, None] / np.power(10000, exponents)
    return torch.from_numpy(np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], 1)).float()


def shifted_table(length: int, width: int, first: int) -> Tensor:
    """Return the positions of M2M100 from row ``first`` on: frequencies over half - 1, computed in float32 as there."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + length).float()[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], 1)
    return torch.nn.functional.pad(table, (0, width - 2 * half))


def learned_rows(table: Tensor, offset: int, length: int) -> Tensor:
    """Return the rows of the first ``length`` positions; rows before the offset belong to no position."""
    return table[offset : offset + length]


def positions_with_types(positions: Tensor, types: Tensor, length: int) -> Tensor:
    """Return BERT's positions plus its token type 0, the only one that a plain sequence has."""
    return positions[:length] + types[0]


def distance_table(weights: Tensor, furthest: int, *, both: bool) -> Tensor:
    """Return T5's buckets [buckets, H] as a score per distance key - query, [H, 2·furthest + 1].

    All distances from ``furthest`` on are in the last bucket, so a clamped distance finds its score.
    """
    distances = torch.arange(-furthest, furthest + 1)
    return weights[_buckets(distances, len(weights), furthest, both=both)].T.contiguous()


def _buckets(distances: Tensor, count: int, furthest: int, *, both: bool) -> Tensor:
    if both:
        count //= 2
        first, away = (distances > 0).long() * count, distances.abs()
    else:
        first, away = torch.zeros_like(distances), (-distances).clamp(min=0)
    exact = count // 2
    # In float32, as transformers computes it: another precision would put a distance at an edge into another bucket.
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(furthest / exact)
    far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(away < exact, away, far)
