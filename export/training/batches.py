"""Pairs as padded batches of similar length, in an order that depends only on seed and epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from fatdeploy.export.reference.config import ModelConfig

# Batches sorted by length together: enough for little padding, few enough that neighbours stay random.
POOL = 64


@dataclass(frozen=True)
class IdPair:
    """Tokens of a source and of its target in reading order, without BOS and EOS."""

    source: Sequence[int]
    target: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """The tensors of one training step."""

    source: Tensor  # [B, S]
    source_mask: Tensor  # [B, S], True = a real token
    target_in: Tensor  # [B, T]
    target_out: Tensor  # [B, T], NOTHING where there is nothing to learn
    lengths: Tensor  # [B] tokens of each target, without EOS

    @property
    def n_tokens(self) -> int:
        """How many target tokens there are to learn."""
        return int(self.learned.sum())

    @property
    def learned(self) -> Tensor:
        """Where there is something to learn, [B, T]."""
        return self.target_out >= 0

    def on(self, device: str) -> "Batch":
        """Return the batch in the memory of a device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def positions(self) -> Iterator["Batch"]:
        """Yield a batch for each position of the targets, which learns it alone and reads what is before it."""
        for t in range(self.target_in.shape[1]):
            earlier = torch.full_like(self.target_out[:, :t], NOTHING)
            target_out = torch.cat([earlier, self.target_out[:, t : t + 1]], 1)
            yield replace(self, target_in=self.target_in[:, : t + 1], target_out=target_out)


# The value of ``target_out`` where there is nothing to learn. It is torch's default and no token's id.
NOTHING = -100


def batch_of(pairs: Sequence[IdPair], config: ModelConfig) -> Batch:
    """Return pairs as the tensors that a model with this configuration is trained on."""
    source = _padded([pair.source for pair in pairs], config.pad_id)
    mask = torch.arange(source.shape[1]) < torch.tensor([len(pair.source) for pair in pairs])[:, None]
    backwards = config.target_order == "right_to_left"
    targets = [list(pair.target)[::-1] if backwards else list(pair.target) for pair in pairs]
    lengths = torch.tensor([len(target) for target in targets])
    return Batch(source, mask, *_decoder_pair(targets, config), lengths)


def _decoder_pair(targets: Sequence[list[int]], config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return what the decoder reads and what it learns to return (teacher forcing), [B, T] each."""
    if not config.parallel:
        target_in = _padded([[config.bos_id, *target] for target in targets], config.pad_id)
        return target_in, _padded([[*target, config.eos_id] for target in targets], NOTHING)
    if config.length == "head":
        target_out = _padded(targets, NOTHING)
        padding = torch.full_like(target_out, config.pad_id)
        return padding.where(target_out < 0, config.bos_id), target_out
    target_out = _padded([[*target, config.eos_id] for target in targets], NOTHING, config.max_target)
    return torch.full_like(target_out, config.bos_id), target_out


def _padded(rows: Sequence[Sequence[int]], value: int, length: int | None = None) -> Tensor:
    padded = torch.full((len(rows), length or max(map(len, rows))), value)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return padded


def epoch_order(pairs: Sequence[IdPair], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the pairs of each batch of an epoch: random, but with pairs of similar length in a batch."""
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
