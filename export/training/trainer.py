"""The training loop: one step after another, validation each epoch, the best weights kept, everything resumable."""

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
from fatdeploy.export.training.batches import IdPair, batch_of, epoch_order
from fatdeploy.export.training.folder import GO_ON, replaced_file
from fatdeploy.export.training.losses import Objective
from fatdeploy.export.training.resume import STATE, load_state, save_state
from fatdeploy.export.training.settings import TrainSettings


@dataclass(frozen=True)
class ValidationScore:
    """What a model does with the validation pairs: loss in nats a token, error rates in percent."""

    loss: float
    token_error_rate: float
    sequence_error_rate: float

    def better_than(self, other: "ValidationScore | None") -> bool:
        """Whether this is to be kept instead of another."""
        if other is None:
            return True
        mine, theirs = ((one.token_error_rate, one.loss) for one in (self, other))
        return mine < theirs


@dataclass(frozen=True)
class Epoch:
    """What is known after an epoch."""

    number: int  # from 1
    train_loss: float
    score: ValidationScore
    seconds: float  # of one core, of training alone, all epochs so far
    best: bool


@dataclass(frozen=True)
class Step:
    """What is known after a step."""

    epoch: int  # from 1
    step: int  # of all, from 1
    loss: float


@dataclass
class Progress:
    """Where a training stands: what the next step depends on beside weights, optimiser and random state."""

    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # of this epoch's tokens
    n_tokens: int = 0
    epochs: list[Epoch] = field(default_factory=list)

    @property
    def best(self) -> ValidationScore | None:
        """The score of the weights that are kept."""
        return next((epoch.score for epoch in reversed(self.epochs) if epoch.best), None)

    def to_dict(self) -> dict[str, Any]:
        """Return all as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        """Return what ``to_dict`` described."""
        epochs = [Epoch(**{**one, "score": ValidationScore(**one["score"])}) for one in values["epochs"]]
        return cls(**{**values, "epochs": epochs})


class Trainer:
    """Trains a model on pairs, in a folder that holds the best weights and the state to go on from.

    ``validate`` scores the model as it is; ``identity`` is recorded with every state, for who resumes to compare.
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
        self.model, self.settings, self.folder = model, settings, folder
        self.progress = Progress()
        self._pairs, self._validate, self._identity = pairs, validate, identity
        self._objective = Objective(settings.label_smoothing, settings.guided_attention)
        self._optimiser = _optimiser(model, settings)
        self.steps_per_epoch = len(epoch_order(pairs, settings.batch_size, 0, 0))
        self.n_steps = settings.epochs * self.steps_per_epoch

    def resume(self) -> None:
        """Go on where an earlier training stopped."""
        path = self.folder / STATE
        record = load_state(path, self.model, self._optimiser)
        try:
            self.progress = Progress.from_dict(record["progress"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is of another version of fatdeploy ({error}); train anew with --force"
            ) from error

    def events(self) -> Iterator[Step | Epoch]:
        """Train to the end, and tell each step and each epoch."""
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
        """Write the state to go on from; ``advice`` is what to do if that fails."""
        record = {"identity": self._identity, "progress": self.progress.to_dict()}
        save_state(self.folder / STATE, self.model, self._optimiser, record, advice=advice)

    def _step(self, indices: list[int]) -> Step:
        started, settings, progress = time.process_time(), self.settings, self.progress
        self.model.train()
        batch = batch_of([self._pairs[index] for index in indices], self.model.config)
        for group in self._optimiser.param_groups:
            group["lr"] = settings.rate(progress.step, self.n_steps)
        if settings.draw_threshold:
            lowest = self.model.config.hybrid_threshold
            set_threshold(self.model, lowest + float(torch.rand(())) * (1 - lowest))
        losses = self._objective.losses(self.model, batch, settings.own_words(progress.step, self.n_steps))
        loss = finite(float(losses.tokens), f"the loss at step {progress.step + 1}")
        self._optimiser.zero_grad(set_to_none=True)
        losses.total.backward()  # type: ignore[no-untyped-call]
        if settings.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self._optimiser.step()
        progress.step += 1
        progress.loss_sum += loss * batch.n_tokens
        progress.n_tokens += batch.n_tokens
        progress.seconds += time.process_time() - started
        return Step(len(progress.epochs) + 1, progress.step, loss)

    def _ended_epoch(self) -> Epoch:
        progress = self.progress
        if self.settings.draw_threshold:
            set_threshold(self.model, 1.0)
        score = self._validate(self.model.eval())
        best = score.better_than(progress.best)
        if best:
            replaced_file(self.folder / WEIGHTS, lambda path: save_weights(self.model, path))
        ended = Epoch(
            number=len(progress.epochs) + 1,
            train_loss=progress.loss_sum / progress.n_tokens,
            score=score,
            seconds=progress.seconds,
            best=best,
        )
        progress.epochs.append(ended)
        progress.loss_sum, progress.n_tokens = 0.0, 0
        return ended


def finite(loss: float, name: str) -> float:
    """Return a loss that is a number; any other ends the training."""
    if not math.isfinite(loss):
        raise TrainingFailed(f"{name} is {loss}: lower --learning-rate, or clip gradients (--clip 1)")
    return loss


def set_threshold(model: ReferenceModel, threshold: float) -> None:
    """Let the hybrid forward pass keep the tokens whose frequency rank, which is their id, is below τ·V."""
    config = replace(model.config, hybrid_threshold=threshold)
    model.keep.copy_(kept(torch.arange(config.vocab_size), config))


def _optimiser(model: ReferenceModel, settings: TrainSettings) -> AdamW:
    parameters = list(model.parameters())
    # Biases and gains are few and have no direction in which smaller is simpler.
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
