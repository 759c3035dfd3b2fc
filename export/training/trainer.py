"""The training loop: steps, validation after every epoch, the best weights kept, everything resumable."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from fatdeploy.errors import CheckpointError, TrainingFailed
from fatdeploy.export.reference.checkpoint import WEIGHTS, save_weights
from fatdeploy.export.reference.model import ReferenceModel, kept
from fatdeploy.export.training.batches import Batch, IdPair, batch_of, epoch_order
from fatdeploy.export.training.folder import GO_ON, replaced_file
from fatdeploy.export.training.losses import Objective
from fatdeploy.export.training.own_words import OwnWords
from fatdeploy.export.training.resume import STATE, load_state, save_state
from fatdeploy.export.training.rewards import self_critical
from fatdeploy.export.training.settings import Criterion, TrainSettings

# All other metrics are errors.
HIGH_IS_GOOD = ("bleu", "chrf")


@dataclass(frozen=True)
class ValidationScore:
    """How a model does on the validation pairs: loss in nats per token, all others in percent.

    BLEU and chrF are None unless they choose the epoch to keep.
    """

    loss: float
    token_error_rate: float
    sequence_error_rate: float
    bleu: float | None = None
    chrf: float | None = None

    def better_than(self, other: "ValidationScore | None", by: Criterion = "token_error_rate") -> bool:
        """Whether this model should replace the other; with an equal metric the loss decides."""
        return other is None or self._costs(by) < other._costs(by)

    def _costs(self, by: Criterion) -> tuple[float, float]:
        value = getattr(self, by)
        return (-value if by in HIGH_IS_GOOD else value), self.loss


@dataclass(frozen=True)
class Epoch:
    """The result of an epoch."""

    number: int  # from 1
    train_loss: float
    score: ValidationScore
    seconds: float  # CPU time of training alone, all epochs so far
    best: bool
    reward: float | None = None  # mean reward of what the model wrote for training sources; None without rewards


@dataclass(frozen=True)
class Step:
    """The result of a step."""

    epoch: int  # from 1
    step: int  # across all epochs, from 1
    loss: float


@dataclass
class Progress:
    """How far a training is: what the next step depends on besides weights, optimiser and random state."""

    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # over the tokens of this epoch
    n_tokens: int = 0
    reward_sum: float = 0.0  # over the targets that were rewarded in this epoch
    n_rewarded: int = 0
    epochs: list[Epoch] = field(default_factory=list)

    @property
    def best(self) -> ValidationScore | None:
        """The score of the kept weights."""
        return next((epoch.score for epoch in reversed(self.epochs) if epoch.best), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        """Return what ``to_dict`` described."""
        epochs = [Epoch(**{**epoch, "score": ValidationScore(**epoch["score"])}) for epoch in values["epochs"]]
        return cls(**{**values, "epochs": epochs})


class Trainer:
    """Trains a model on pairs, in a folder that holds the best weights and the state to resume from.

    ``validate`` scores the current model; ``identity`` is saved with every state, to be compared when resuming.
    """

    def __init__(
        self,
        model: ReferenceModel,
        pairs: Sequence[IdPair],
        settings: TrainSettings,
        folder: Path,
        validate: Callable[[ReferenceModel], ValidationScore],
        identity: dict[str, Any],
    ) -> None:
        self.model, self.settings, self.folder = model.to(settings.device), settings, folder
        self.progress = Progress()
        self._pairs, self._validate, self._identity = pairs, validate, identity
        self._objective = Objective(settings.label_smoothing, settings.guided_attention)
        self._own_words = OwnWords.of(settings)
        self._optimiser = _optimiser(model, settings)
        self.steps_per_epoch = len(epoch_order(pairs, settings.batch_size, 0, 0))
        self.n_steps = settings.epochs * self.steps_per_epoch

    def resume(self) -> None:
        """Continue where an earlier training stopped."""
        path = self.folder / STATE
        record = load_state(path, self.model, self._optimiser)
        try:
            self.progress = Progress.from_dict(record["progress"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is from another version of fatdeploy ({error}); start over with --force"
            ) from error

    def events(self) -> Iterator[Step | Epoch]:
        """Train to the end, yielding each step and each epoch."""
        torch.set_num_threads(self.settings.threads)
        if not self.progress.step:
            torch.manual_seed(self.settings.seed)
        saved = time.monotonic()
        while (done := len(self.progress.epochs)) < self.settings.epochs:
            order = epoch_order(self._pairs, self.settings.batch_size, self.settings.seed, done)
            for indices in order[self.progress.step - done * self.steps_per_epoch :]:
                yield self._step(indices)
                if time.monotonic() - saved > self.settings.save_seconds:
                    self.save()
                    saved = time.monotonic()
            yield self._ended_epoch()
            self.save()
            saved = time.monotonic()

    def save(self, *, advice: str = GO_ON) -> None:
        """Write the state to resume from; ``advice`` is what to do if that fails."""
        record = {"identity": self._identity, "progress": self.progress.to_dict()}
        save_state(self.folder / STATE, self.model, self._optimiser, record, advice=advice)

    def _step(self, indices: list[int]) -> Step:
        started, settings, progress = time.process_time(), self.settings, self.progress
        self.model.train()
        batch = batch_of([self._pairs[index] for index in indices], self.model.config).on(settings.device)
        for group in self._optimiser.param_groups:
            group["lr"] = settings.rate(progress.step, self.n_steps)
        if settings.draw_threshold:
            lowest = self.model.config.hybrid_threshold
            set_threshold(self.model, lowest + float(torch.rand(())) * (1 - lowest))
        if share := settings.own_share(progress.step, self.n_steps):
            batch = self._own_words.mixed(self.model, batch, share)
        parts = batch.positions() if settings.updates == "token" else [batch]
        loss_sum = sum(self._update(part) * part.n_tokens for part in parts)
        progress.step += 1
        progress.loss_sum += loss_sum
        progress.n_tokens += batch.n_tokens
        progress.seconds += time.process_time() - started
        return Step(len(progress.epochs) + 1, progress.step, loss_sum / batch.n_tokens)

    def _update(self, batch: Batch) -> float:
        """Change the weights once; return the token loss before that."""
        settings, progress = self.settings, self.progress
        losses = self._objective.losses(self.model, batch)
        loss = finite(float(losses.tokens), f"the loss at step {progress.step + 1}")
        total = losses.total
        if settings.reward != "none" and (weight := settings.reward_share(progress.step, self.n_steps)):
            rewarded = self_critical(self.model, batch, settings.reward)
            total = (1 - weight) * total + weight * rewarded.loss
            progress.reward_sum += rewarded.reward * len(batch.source)
            progress.n_rewarded += len(batch.source)
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        if settings.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self._optimiser.step()
        return loss

    def _ended_epoch(self) -> Epoch:
        progress = self.progress
        if self.settings.draw_threshold:
            set_threshold(self.model, 1.0)
        # Sources are decoded in the memory of the CPU.
        model = self.model if self.settings.device == "cpu" else copy.deepcopy(self.model).cpu()
        score = self._validate(model.eval())
        best = score.better_than(progress.best, self.settings.select_by)
        if best:
            replaced_file(self.folder / WEIGHTS, lambda path: save_weights(self.model, path))
        ended = Epoch(
            number=len(progress.epochs) + 1,
            train_loss=progress.loss_sum / progress.n_tokens,
            score=score,
            seconds=progress.seconds,
            best=best,
            reward=progress.reward_sum / progress.n_rewarded if progress.n_rewarded else None,
        )
        progress.epochs.append(ended)
        progress.loss_sum, progress.n_tokens = 0.0, 0
        progress.reward_sum, progress.n_rewarded = 0.0, 0
        return ended


def finite(loss: float, name: str) -> float:
    """Return a finite loss; any other ends the training."""
    if not math.isfinite(loss):
        raise TrainingFailed(f"{name} is {loss}: lower --learning-rate, or clip gradients (--clip 1)")
    return loss


def set_threshold(model: ReferenceModel, threshold: float) -> None:
    """Make the hybrid forward pass keep the tokens with a frequency rank, which is their id, below τ·V."""
    config = replace(model.config, hybrid_threshold=threshold)
    model.keep.copy_(kept(torch.arange(config.vocab_size), config))


def _optimiser(model: ReferenceModel, settings: TrainSettings) -> AdamW:
    parameters = list(model.parameters())
    # Weight decay does not make biases and gains simpler, and there are few of them.
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
