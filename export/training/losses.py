"""The training loss: token loss, length loss of parallel models, and attention far from the diagonal."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fatdeploy.export.reference.model import Decoded, ReferenceModel
from fatdeploy.export.training.batches import NOTHING, Batch

LENGTH_WEIGHT = 0.1
# Width of the band around the diagonal where attention costs little, as a share of both lengths.
DIAGONAL_WIDTH = 0.2


@dataclass(frozen=True)
class Losses:
    """The sum to minimise, and the plain token loss in nats for reports."""

    total: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Objective:
    """The weights of the losses."""

    label_smoothing: float = 0.0
    guided_attention: float = 0.0

    def losses(self, model: ReferenceModel, batch: Batch) -> Losses:
        """Return the losses of a batch."""
        memory = model.encode(batch.source, batch.source_mask)
        guided = model.config.decoder_layers - 1 if self.guided_attention > 0 else None
        decoded, _ = model.decode(batch.target_in, model.stateless(), memory, weights_of=guided)
        logits = model.logits(decoded, memory).flatten(0, 1)
        targets = batch.target_out.flatten()
        tokens = functional.cross_entropy(logits, targets, ignore_index=NOTHING)
        total = tokens
        if self.label_smoothing > 0:
            total = functional.cross_entropy(
                logits, targets, ignore_index=NOTHING, label_smoothing=self.label_smoothing
            )
        if memory.length_logits is not None:
            total = total + LENGTH_WEIGHT * functional.cross_entropy(memory.length_logits, batch.lengths - 1)
        if guided is not None and guided in decoded.weights:
            backwards = model.config.target_order == "right_to_left"
            total = total + self.guided_attention * far_attention(decoded, guided, batch, backwards=backwards)
        return Losses(total, tokens.detach())


def far_attention(decoded: Decoded, layer: int, batch: Batch, *, backwards: bool = False) -> Tensor:
    """Return how much of a layer's cross-attention [B, H, T, S] is far from the diagonal (guided attention loss).

    A target written ``backwards`` starts at the end of the source, so it has the other diagonal.
    """
    weights = decoded.weights[layer]
    at_source = _shares(batch.source_mask)  # [B, S]
    at_target = _shares(batch.learned)  # [B, T]
    if backwards:
        at_target = 1 - at_target
    distance = at_target[:, :, None] - at_source[:, None, :]
    cost = 1 - torch.exp(-distance.square() / (2 * DIAGONAL_WIDTH**2))
    real = (batch.learned[:, :, None] & batch.source_mask[:, None, :])[:, None]  # [B, 1, T, S]
    # The tanh forms have negative weights too.
    return (weights.abs() * cost[:, None] * real).sum() / (batch.learned.sum() * weights.shape[1])


def _shares(real: Tensor) -> Tensor:
    """Return the place of each position [B, L] in its row, from 0 to 1."""
    return torch.arange(real.shape[1], device=real.device) / (real.sum(1, keepdim=True) - 1).clamp(min=1)
