"""The model's own tokens in training: which of them it reads (scheduled sampling, free running), and what it writes.

They are chosen as on a device, without dropout, and no gradient flows through a choice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.training.batches import NOTHING, Batch
from fatdeploy.export.training.settings import TrainSettings


@dataclass(frozen=True)
class OwnWords:
    """How own tokens come about; ``n_passes`` is None if they are chosen one after another."""

    n_passes: int | None = 1
    drawn: bool = False

    @classmethod
    def of(cls, settings: TrainSettings) -> "OwnWords":
        """Return what the settings of a training say."""
        drawn = settings.own_choice == "drawn"
        if settings.free_running or settings.sampling_form == "sequential":
            return cls(None, drawn)
        return cls(settings.sampling_passes if settings.sampling_form == "parallel" else 1, drawn)

    def mixed(self, model: ReferenceModel, batch: Batch, share: float) -> Batch:
        """Return a batch in which the model reads its own token instead of a true one at this share of positions.

        Coins and noise are drawn once per position. Each pass chooses all tokens at once, after what the pass before
        left; pass k has the first k tokens right, so as many passes as tokens are the sequential form.
        """
        # BOS stays first, and padding stays padding.
        coins = torch.rand(batch.target_in[:, 1:].shape).to(batch.target_in.device) < share
        places = coins & (batch.target_in[:, 1:] != model.config.pad_id)
        noise = gumbel(batch.target_in[:, 1:], model.config.vocab_size) if self.drawn else None
        if not places.any():
            return batch
        with choosing(model):
            choose = _one_after_another if self.n_passes is None else self._in_passes
            return replace(batch, target_in=choose(model, batch, places, noise))

    def _in_passes(self, model: ReferenceModel, batch: Batch, places: Tensor, noise: Tensor | None) -> Tensor:
        """Return the tokens to read [B, T] after all passes."""
        memory = model.encode(batch.source, batch.source_mask)
        read = batch.target_in
        for _ in range(self.n_passes or 0):
            decoded, _ = model.decode(read, model.stateless(), memory)
            own = best(model.logits(decoded, memory)[:, :-1], noise)
            read = torch.cat([read[:, :1], own.where(places, batch.target_in[:, 1:])], 1)
        return read


def _one_after_another(model: ReferenceModel, batch: Batch, places: Tensor, noise: Tensor | None) -> Tensor:
    """Return the tokens to read [B, T]: each own token is chosen after the true and own ones before it."""
    memory = model.encode(batch.source, batch.source_mask)
    n_tokens = batch.target_in.shape[1]
    state = model.start(memory, n_tokens)
    read = [batch.target_in[:, :1]]
    for t in range(n_tokens - 1):
        logits, state = model.step(read[t], state, memory)
        own = best(logits, None if noise is None else noise[:, t : t + 1])
        read.append(own.where(places[:, t : t + 1], batch.target_in[:, t + 1 : t + 2]))
    return torch.cat(read, 1)


def written(model: ReferenceModel, batch: Batch, longest: int, *, drawn: bool) -> Tensor:
    """Return the targets [B, L] that the model writes for a batch, with EOS and NOTHING after it, up to ``longest``."""
    with choosing(model):
        memory = model.encode(batch.source, batch.source_mask)
        state = model.start(memory, longest)
        tokens = torch.full_like(batch.target_in[:, :1], model.config.bos_id)
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        columns = []
        for _ in range(longest):
            logits, state = model.step(tokens, state, memory)
            tokens = best(logits, gumbel(tokens, model.config.vocab_size) if drawn else None)
            columns.append(tokens.masked_fill(ended, NOTHING))
            ended = ended | (tokens == model.config.eos_id)
            if ended.all():
                break
    return torch.cat(columns, 1)


def gumbel(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return noise [..., V] with which the best score of each of these tokens is a draw from the softmax."""
    # Always from the generator of the CPU, which is part of the state that a training resumes from.
    return -torch.empty(*tokens.shape, vocab_size).exponential_().log().to(tokens.device)


def best(logits: Tensor, noise: Tensor | None) -> Tensor:
    """Return the token with the highest score [..., V], noise included."""
    return (logits if noise is None else logits + noise).argmax(-1)


@contextmanager
def choosing(model: ReferenceModel) -> Iterator[None]:
    """Choose without dropout and without gradients; then the model learns again if it did before."""
    learning = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(learning)
