"""How to train: every setting and its range. Imports no torch."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fatdeploy.errors import ConfigError, in_one_line

# Smallest and largest legal value of every setting; None means no limit.
_RANGES: dict[str, tuple[float, float | None]] = {
    "epochs": (1, None),
    "batch_size": (1, None),
    "learning_rate": (0, 1),
    "warmup": (0, None),
    "weight_decay": (0, 1),
    "clip": (0, None),
    "label_smoothing": (0, 0.9),
    "scheduled_sampling": (0, 1),
    "guided_attention": (0, None),
    "seed": (0, 2**31 - 1),
    "threads": (1, None),
    "save_seconds": (0, None),
}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a model is trained.

    The learning rate rises over ``warmup`` steps and falls to zero in half a cosine over all ``epochs``. ``clip`` is
    the largest norm of gradients; 0 sets no limit. ``scheduled_sampling`` is the share of target tokens that the model
    reads from its own output at the end of training, rising from 0. ``guided_attention`` is the weight of a loss on
    attention far from the diagonal. ``draw_threshold`` draws the threshold of the hybrid forward pass at every step,
    between the configuration's and 1, and finally chooses the lowest one that costs next to nothing on the validation
    pairs. ``save_seconds`` is the time between two saved states within an epoch.
    """

    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 1.5e-3
    warmup: int = 300
    weight_decay: float = 0.01
    clip: float = 1.0
    label_smoothing: float = 0.1
    scheduled_sampling: float = 0.0
    guided_attention: float = 0.0
    draw_threshold: bool = False
    seed: int = 0
    threads: int = 1
    save_seconds: float = 120.0

    def __post_init__(self) -> None:
        reasons = []
        for field in dataclasses.fields(self):
            low, high = _RANGES.get(field.name, (0, 1))
            value = getattr(self, field.name)
            if not _is(value, field.type):
                reasons.append(f"{field.name}: expected {getattr(field.type, '__name__', field.type)}, found {value!r}")
            elif not low <= value or (high is not None and not value <= high) or math.isinf(value):
                reasons.append(f"{field.name}: must lie in {low}…{'' if high is None else high}, found {value}")
        if reasons:
            raise ConfigError(in_one_line("training refused", reasons))

    def rate(self, step: int, n_steps: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, n_steps - self.warmup)
        return self.learning_rate * (1 + math.cos(math.pi * min(1.0, done))) / 2

    def own_words(self, step: int, n_steps: int) -> float:
        """Return the share of target tokens that the model reads from its own output at a step."""
        return self.scheduled_sampling * step / n_steps


def _is(value: object, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)
