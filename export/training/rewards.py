"""Self-critical training: a metric without a gradient, BLEU or the token error rate, as a reward of whole targets."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.training.batches import NOTHING, Batch
from fatdeploy.export.training.own_words import written
from fatdeploy.export.training.settings import Reward
from fatdeploy.runtimes.evaluation.metrics import edit_distance

Ids = Sequence[int]
# A model that has not learned to stop yet would write up to the last position.
LONGER_THAN_LONGEST = 1.5
MOST_WORDS = 4  # the longest n-grams of BLEU


def sentence_bleu(hypothesis: Ids, reference: Ids) -> float:
    """Return the BLEU of one target, from 0 to 1; counts of n-grams with n > 1 have one added (Lin and Och, 2004)."""
    if not hypothesis:
        return 0.0
    logarithms = 0.0
    for n in range(1, MOST_WORDS + 1):
        ours, theirs = (
            Counter(tuple(ids[place : place + n]) for place in range(len(ids) - n + 1))
            for ids in (hypothesis, reference)
        )
        matches, added = (ours & theirs).total(), int(n > 1)
        if not matches + added:
            return 0.0
        logarithms += math.log((matches + added) / (ours.total() + added))
    shortness = min(0.0, 1 - len(reference) / len(hypothesis))
    return math.exp(logarithms / MOST_WORDS + shortness)


def token_accuracy(hypothesis: Ids, reference: Ids) -> float:
    """Return 1 minus the token error rate: 1 for the reference itself, below 0 for more edits than it has tokens."""
    return 1 - edit_distance(hypothesis, reference) / max(1, len(reference))


REWARDS: dict[Reward, Callable[[Ids, Ids], float]] = {"bleu": sentence_bleu, "token_error_rate": token_accuracy}


@dataclass(frozen=True)
class Rewarded:
    """The self-critical loss of a batch, and the mean reward of the targets that the model writes now."""

    loss: Tensor
    reward: float


def self_critical(model: ReferenceModel, batch: Batch, kind: Reward) -> Rewarded:
    """Return −Σ (r(drawn) − r(best)) log p(drawn) per drawn token (Rennie et al., 2017).

    Targets are drawn from the model, and the one of its best tokens is the baseline: what is better than that becomes
    more probable.
    """
    longest = min(model.config.max_target, int(LONGER_THAN_LONGEST * int(batch.lengths.max())) + 2)
    greedy, drawn = (written(model, batch, longest, drawn=drawn) for drawn in (False, True))
    references = rows_of(batch.target_out, model.config.eos_id)
    ours, theirs = (
        [REWARDS[kind](row, reference) for row, reference in zip(rows, references, strict=True)]
        for rows in (rows_of(drawn, model.config.eos_id), rows_of(greedy, model.config.eos_id))
    )
    advantages = torch.tensor(ours, device=drawn.device) - torch.tensor(theirs, device=drawn.device)
    surprise = surprises(model, batch, drawn)
    loss = (advantages[:, None] * surprise).sum() / (drawn >= 0).sum()
    return Rewarded(loss, sum(theirs) / len(theirs))


def surprises(model: ReferenceModel, batch: Batch, targets: Tensor) -> Tensor:
    """Return −log p of each token of targets [B, L] after the ones before it; 0 where there is none."""
    first = torch.full_like(targets[:, :1], model.config.bos_id)
    read = torch.cat([first, targets[:, :-1].masked_fill(targets[:, :-1] < 0, model.config.pad_id)], 1)
    memory = model.encode(batch.source, batch.source_mask)
    decoded, _ = model.decode(read, model.stateless(), memory)
    logits = model.logits(decoded, memory).transpose(1, 2)
    return functional.cross_entropy(logits, targets, ignore_index=NOTHING, reduction="none")


def rows_of(targets: Tensor, eos_id: int) -> list[list[int]]:
    """Return the tokens of each target [B, L], without EOS and what is after it."""
    return [[token for token in row if token not in (NOTHING, eos_id)] for row in targets.tolist()]
