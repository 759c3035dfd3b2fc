"""Which keys each query of the encoder sees, and tokens that are added before the source."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import Visible
from fatdeploy.export.reference.config import Direction, ModelConfig
from fatdeploy.export.reference.sparse.kinds import Mask, masks_of

# Added tokens fill so many columns, hidden ones among them. Products add up this many keys at a time: in integers a
# row would otherwise depend on padding, which runtimes keep at a multiple of it too.
COLUMNS = 4


def allowed_keys(config: ModelConfig, valid: Tensor, n_added: int = 0) -> Tensor:
    """Return which keys each query sees, [B, 1 or H, 1 or L, L]: masks of the attention, direction, padding.

    The first ``n_added`` of L columns are not positions of the source.
    """
    masks = masks_of(config.encoder_attention)
    if config.encoder_direction == "both" and not any(masks):
        return valid[:, None, None, :]
    i = torch.arange(valid.shape[1], device=valid.device)[:, None] - n_added
    everything = torch.ones_like(i == i.T)
    shown = _shown(config, i, n_added > 0)
    direction = in_direction(config.encoder_direction, i - i.T)
    pattern = torch.stack([_union(shown, head, everything) & direction for head in masks])  # [1 or H, L, L]
    # A padded query sees everything. Its result is never used, but a softmax over nothing would be NaN, and a weight of
    # 0 times NaN is NaN.
    return (pattern & valid[:, None, None, :]) | ~valid[:, None, :, None]


def in_direction(direction: Direction, distance: Tensor) -> Tensor:
    """Return which keys a direction leaves, from how far each is on the left of its query."""
    match direction:
        case "both":
            return torch.ones_like(distance, dtype=torch.bool)
        case "left_to_right":
            return distance >= 0
        case "right_to_left":
            return distance <= 0


def _shown(config: ModelConfig, i: Tensor, has_added: bool) -> dict[Mask, Tensor]:
    """Return what each mask shows of positions i [L, 1]; added tokens are at negative ones."""
    j = i.T
    local, strided = (i - j).abs() <= config.window, (i - j) % config.stride == 0
    if has_added:
        # An added token is at no distance from anything. Without the mask of global tokens it sees itself alone.
        of_source, itself = (i >= 0) & (j >= 0), i == j
        local, strided = ((mask & of_source) | itself for mask in (local, strided))
    n_first = 0 if has_added else config.n_global_tokens
    return {"local": local, "strided": strided, "global_tokens": (i < n_first) | (j < n_first) | (i == j)}


def _union(shown: dict[Mask, Tensor], head: tuple[Mask, ...], everything: Tensor) -> Tensor:
    if not head:
        return everything
    first, *others = (shown[mask] for mask in head)
    for mask in others:
        first = first | mask
    return first


def beside_added(visible: Visible, n_added: int) -> Visible:
    """Return the relative terms of a source's pairs beside those of added columns, which are zero."""
    front, relative, distances = (n_added, 0, n_added, 0), visible.relative, visible.distances
    if not n_added:
        return visible
    if relative is not None:
        relative = functional.pad(relative, front)  # [H, I, J]
    if distances is not None:
        distances = replace(distances, places=functional.pad(distances.places, (0, 0, *front)))  # [I, J, P]
    return replace(visible, relative=relative, distances=distances)


class GlobalVectors(nn.Module):
    """Learned vectors before the source, inside the encoder; they have no positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(config.n_global_tokens, config.width))
        self.n_columns = -(-config.n_global_tokens // COLUMNS) * COLUMNS

    def before(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and x [B, S, M], and which of them are real [B, L]: all added tokens, and ``valid``."""
        count = len(self.vectors)
        tokens = functional.pad(self.vectors, (0, 0, 0, self.n_columns - count))
        real = (torch.arange(self.n_columns, device=x.device) < count).expand(x.shape[0], -1)
        return torch.cat([tokens.expand(x.shape[0], -1, -1), x], 1), torch.cat([real, valid], 1)
