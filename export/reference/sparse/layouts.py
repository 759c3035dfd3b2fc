"""How an encoder's self-attention is laid out: the whole source at once, or only pairs that its mask can show.

A window is attended to in blocks of queries, each with the keys around it, and strided positions as a source of their
own per residue. The numbers are those of the mask over the whole source.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import Scores, Visible
from fatdeploy.export.reference.config import Direction, ModelConfig
from fatdeploy.export.reference.positions import with_relative
from fatdeploy.export.reference.seams import seams
from fatdeploy.export.reference.sparse.masks import COLUMNS, allowed_keys, beside_added, in_direction

# Queries of a block that shares its keys. Fewer make products that are too small to be fast.
LEAST_BLOCK = 32
# Sources up to this length are attended to as a whole. Two layers of 512 took (onnxruntime, one thread, window 8) 0.94
# times as long that way at 8 tokens, 1.08 times at 512, 1.28 times at 1024 and 1.63 times at 2048.
WHOLE_UP_TO = 512


class Layout(Protocol):
    """What the layers of an encoder share about their self-attention."""

    def allowed(self, valid: Tensor) -> Tensor:
        """Return which keys each query sees, for a source [B, L]."""
        ...

    def related(self, visible: Visible, relation: nn.Module | None, x: Tensor) -> Visible:
        """Return what is visible in x [B, L, M] with the relative term of a stack or a layer, if it has one."""
        ...

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        """Return self-attention [B, L, M] of packed queries, keys and values [B, L, 3M]."""
        ...


def layout_of(config: ModelConfig, n_added: int) -> Layout:
    """Return the layout of an encoder with ``n_added`` columns before its source."""
    has_long_sources = config.max_source > WHOLE_UP_TO
    if has_long_sources and config.encoder_attention == "local":
        return Windows(config.window, config.encoder_direction)
    if has_long_sources and config.encoder_attention == "strided":
        return Strides(config.stride, config.encoder_direction)
    return AllPairs(config, n_added)


@dataclass(frozen=True)
class AllPairs:
    """Every query meets every key."""

    config: ModelConfig
    n_added: int

    def allowed(self, valid: Tensor) -> Tensor:
        return allowed_keys(self.config, valid, self.n_added)

    def related(self, visible: Visible, relation: nn.Module | None, x: Tensor) -> Visible:
        at = torch.arange(x.shape[1] - self.n_added, device=x.device)
        return beside_added(with_relative(visible, relation, at, at), self.n_added)

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        return seams().attend(qkv, scores, visible, dropout)


@dataclass(frozen=True)
class Windows:
    """Blocks of queries from the first position on, each with its keys and those of a window on both sides.

    The shape of a block does not depend on the source, so neither padding nor other rows can change a bit of it.
    """

    window: int
    direction: Direction

    @property
    def margin(self) -> int:
        """The keys on each side of a block."""
        return -(-self.window // COLUMNS) * COLUMNS

    @property
    def block(self) -> int:
        """The queries of a block."""
        return max(LEAST_BLOCK, self.margin)

    def allowed(self, valid: Tensor) -> Tensor:
        i, j = (at[:, None] for at in self._places(valid))
        distance = i - j.T
        pattern = (distance.abs() <= self.window) & in_direction(self.direction, distance)  # [I, J]
        seen = self._around(valid[..., None])[:, None, None, :, 0]  # [B·n, 1, 1, J]
        # A padded query sees everything: a softmax over nothing would be NaN.
        return (pattern & seen) | ~self._in_blocks(valid[..., None])[:, None]

    def related(self, visible: Visible, relation: nn.Module | None, x: Tensor) -> Visible:
        return with_relative(visible, relation, *self._places(x))

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        width = qkv.shape[-1] // 3
        q, kv = torch.split(qkv, [width, 2 * width], -1)
        blocks = seams().attend_pairs(self._in_blocks(q), self._around(kv), scores, visible, dropout)
        return blocks.reshape(qkv.shape[0], -1, width)[:, : qkv.shape[1]]

    def _places(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of a block's queries and keys, from its first query on."""
        i = torch.arange(self.block, device=like.device)
        return i, torch.arange(-self.margin, self.block + self.margin, device=like.device)

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Return x [B, L, M] as blocks [B·n, I, M], the last one with padding."""
        padded = functional.pad(x, (0, 0, 0, -x.shape[1] % self.block))
        return padded.reshape(-1, self.block, x.shape[-1])

    def _around(self, x: Tensor) -> Tensor:
        """Return what is around each block of x [B, L, M], as [B·n, J, M]."""
        missing = -x.shape[1] % self.block
        padded = functional.pad(x, (0, 0, self.margin, missing + self.margin))
        first = torch.arange(0, x.shape[1] + missing, self.block, device=x.device)[:, None]
        places = first + torch.arange(self.block + 2 * self.margin, device=x.device)
        return padded.index_select(1, places.flatten()).reshape(-1, places.shape[1], x.shape[-1])


@dataclass(frozen=True)
class Strides:
    """Positions of one residue as a source of their own."""

    stride: int
    direction: Direction

    def allowed(self, valid: Tensor) -> Tensor:
        real = self._by_residue(valid[..., None])[:, None]  # [B·s, 1, L / s, 1]
        seen = real.transpose(-1, -2)
        if self.direction == "both":
            # A residue may have no real position in a short source: a softmax over nothing would be NaN.
            return seen | ~seen.any(-1, keepdim=True)
        at = torch.arange(seen.shape[-1], device=valid.device)[:, None]
        return (in_direction(self.direction, at - at.T) & seen) | ~real

    def related(self, visible: Visible, relation: nn.Module | None, x: Tensor) -> Visible:
        at = torch.arange(0, x.shape[1] + self._missing(x), self.stride, device=x.device)
        return with_relative(visible, relation, at, at)

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        mixed = seams().attend(self._by_residue(qkv), scores, visible, dropout)  # [B·s, L / s, M]
        batch, length, width = qkv.shape[0], qkv.shape[1], mixed.shape[-1]
        in_order = mixed.reshape(batch, self.stride, -1, width).transpose(1, 2)
        return in_order.reshape(batch, -1, width)[:, :length]

    def _missing(self, x: Tensor) -> int:
        return -x.shape[1] % (self.stride * COLUMNS)

    def _by_residue(self, x: Tensor) -> Tensor:
        """Return x [B, L, M] as [B·s, L / s, M]."""
        padded = functional.pad(x, (0, 0, 0, self._missing(x)))
        by_residue = padded.reshape(x.shape[0], -1, self.stride, x.shape[-1]).transpose(1, 2)
        return by_residue.reshape(x.shape[0] * self.stride, -1, x.shape[-1])
