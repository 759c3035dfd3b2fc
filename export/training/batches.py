"""Pairs as padded batches of like length, in an order that the seed and the epoch alone decide."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fatdeploy.export.reference.config import ModelConfig

# Batches that are sorted by length together: enough for little padding, few enough that neighbours stay random.
POOL = 64


@dataclass(frozen=True)
class IdPair:
    """Tokens of a source and of its target in reading order, BOS and EOS not among them."""

    source: Sequence[int]
    target: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """What one step of training reads."""

    source: Tensor  # [B, S]
    source_mask: Tensor  # [B, S], True = a real token
    target_in: Tensor  # [B, T]
    target_out: Tensor  # [B, T], padding where nothing is to be learned
    lengths: Tensor  # [B] tokens of each target, EOS not among them

    @property
    def n_tokens(self) -> int:
        """How many target tokens there are to learn."""
        return int(self.learned.sum())

    @property
    def learned(self) -> Tensor:
        """Where there is something to learn, [B, T]."""
        return self.target_out >= 0


# The value of ``target_out`` where nothing is to be learned; torch's own choice, so that no id is taken from a model.
NOTHING = -100


def batch_of(pairs: Sequence[IdPair], config: ModelConfig) -> Batch:
    """Return pairs as the tensors that a model with this configuration is trained on."""
    source = _padded([pair.source for pair in pairs], config.pad_id)
    mask = torch.arange(source.shape[1]) < torch.tensor([len(pair.source) for pair in pairs])[:, None]
    backwards = config.target_order == "right_to_left"
    targets = [list(pair.target)[::-1] if backwards else list(pair.target) for pair in pairs]
    lengths = torch.tensor([len(target) for target in targets])
    if not config.parallel:
        read = _padded([[config.bos_id, *target] for target in targets], config.pad_id)
        said = _padded([[*target, config.eos_id] for target in targets], NOTHING)
        return Batch(source, mask, read, said, lengths)
    if config.length == "head":
        said = _padded(targets, NOTHING)
        return Batch(
            source, mask, said.new_full(said.shape, config.pad_id).where(said < 0, config.bos_id), said, lengths
        )
    said = _padded([[*target, config.eos_id] for target in targets], NOTHING, config.max_target)
    return Batch(source, mask, torch.full_like(said, config.bos_id), said, lengths)


def _padded(rows: Sequence[Sequence[int]], value: int, length: int | None = None) -> Tensor:
    padded = torch.full((len(rows), length or max(map(len, rows))), value)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return padded


def epoch_order(pairs: Sequence[IdPair], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the pairs of each batch of an epoch: random, but a batch holds pairs of like length."""
    draw = np.random.default_rng([seed, epoch])
    order = draw.permutation(len(pairs))
    batches = []
    for start in range(0, len(order), POOL * batch_size):
        pool = sorted(
            order[start : start + POOL * batch_size].tolist(),
            key=lambda index: (len(pairs[index].source), len(pairs[index].target)),
        )
        batches += [pool[place : place + batch_size] for place in range(0, len(pool), batch_size)]
    return [batches[index] for index in draw.permutation(len(batches))]
