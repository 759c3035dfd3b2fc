"""How to train: every setting, its range, and how rates and shares change over a training. Imports no torch."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.reference.config_rules import wrong_value

Schedule = Literal["cosine", "step"]
SamplingForm = Literal["two-pass", "parallel", "sequential"]
OwnChoice = Literal["best", "drawn"]
Ramp = Literal["linear", "exponential", "inverse-sigmoid"]
Updates = Literal["batch", "token"]
Reward = Literal["none", "bleu", "token_error_rate"]
# The validation metrics that may choose the kept epoch, by the names that `fatdeploy eval` uses.
Criterion = Literal["token_error_rate", "sequence_error_rate", "loss", "bleu", "chrf"]
Device = Literal["cpu", "cuda"]

# Smallest and largest legal value of every number; None means no limit.
_RANGES: dict[str, tuple[float, float | None]] = {
    "epochs": (1, None),
    "batch_size": (1, None),
    "learning_rate": (0, 1),
    "gamma": (0, 1),
    "warmup": (0, None),
    "weight_decay": (0, 1),
    "clip": (0, None),
    "label_smoothing": (0, 0.9),
    "scheduled_sampling": (0, 1),
    "sampling_passes": (1, None),
    "reward_weight": (0, 1),
    "reward_after": (0, 1),
    "guided_attention": (0, None),
    "seed": (0, 2**31 - 1),
    "threads": (1, None),
    "save_seconds": (0, None),
}
# Settings that do nothing unless another one is switched on.
_NEEDS: dict[str, tuple[str, ...]] = {
    "scheduled_sampling": ("sampling_form", "ramp"),
    "reward": ("reward_weight", "reward_after"),
}
# The exponential ramp ends with this share of the true tokens that it began with.
_EXPONENTIAL_END = 0.01


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a model is trained.

    The learning rate rises over ``warmup`` steps; then it falls to zero in half a cosine over all ``epochs``
    (``schedule`` cosine), or it is multiplied by ``gamma`` after each of them (step). ``clip`` is the largest norm of
    gradients; 0 sets no limit. With ``updates`` token, the weights change after the loss of each target position.

    ``scheduled_sampling`` is the share of target tokens that the model reads from its own output at the end of
    training, rising along ``ramp``; ``sampling_form`` says how these tokens come about, ``sampling_passes`` how often
    the parallel form chooses them, and ``own_choice`` whether they are its best ones or drawn. ``free_running`` makes
    it read nothing but its own tokens from the start. ``reward`` adds self-critical training with ``reward_weight``
    after a share ``reward_after`` of all steps.

    ``guided_attention`` is the weight of a loss on attention far from the diagonal. ``draw_threshold`` draws the
    threshold of the hybrid forward pass at every step, between the configuration's and 1, and finally chooses the
    lowest one that costs next to nothing on the validation pairs. ``select_by`` is the validation metric that chooses
    the epoch to keep. ``save_seconds`` is the time between two saved states within an epoch.
    """

    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 1.5e-3
    schedule: Schedule = "cosine"
    gamma: float = 0.9
    warmup: int = 300
    weight_decay: float = 0.01
    clip: float = 1.0
    updates: Updates = "batch"
    label_smoothing: float = 0.1
    scheduled_sampling: float = 0.0
    sampling_form: SamplingForm = "two-pass"
    sampling_passes: int = 2
    own_choice: OwnChoice = "best"
    ramp: Ramp = "linear"
    free_running: bool = False
    reward: Reward = "none"
    reward_weight: float = 0.5
    reward_after: float = 0.5
    guided_attention: float = 0.0
    draw_threshold: bool = False
    select_by: Criterion = "token_error_rate"
    seed: int = 0
    device: Device = "cpu"
    threads: int = 1
    save_seconds: float = 120.0

    def __post_init__(self) -> None:
        reasons = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if reason := wrong_value(value, field.type) or _out_of_range(field.name, value):
                reasons.append(f"{field.name}: {reason}")
        if reasons := reasons or self._wrong_together():
            raise ConfigError(in_one_line("training refused", reasons))

    def _wrong_together(self) -> list[str]:
        """Return why settings do not go together."""
        reasons = [
            f"{name}: does nothing without {switch}"
            for switch, names in _NEEDS.items()
            for name in names
            if not self._differs(switch) and self._differs(name)
        ]
        if self._differs("gamma") and self.schedule != "step":
            reasons.append(f"gamma: does nothing with schedule = {self.schedule}, use step")
        if self._differs("sampling_passes") and self.sampling_form != "parallel":
            reasons.append(f"sampling_passes: does nothing with sampling_form = {self.sampling_form}, use parallel")
        if self._differs("own_choice") and not (self.scheduled_sampling or self.free_running):
            reasons.append("own_choice: does nothing without scheduled_sampling or free_running")
        if self.free_running and self.scheduled_sampling:
            reasons.append("free_running: reads no true tokens, so there is no share for scheduled_sampling: use one")
        if self.updates == "token":
            # Both are defined for whole targets.
            reasons += [
                f"updates: token needs losses of single positions, {name} has none: use batch"
                for name in ("guided_attention", "reward")
                if self._differs(name)
            ]
        return reasons

    def _differs(self, name: str) -> bool:
        """Return whether a setting is not its default."""
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def rate(self, step: int, n_steps: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        # Epochs have equally many steps.
        peak = self.learning_rate * self.gamma ** (step * self.epochs // n_steps if self.schedule == "step" else 0)
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        if self.schedule == "step":
            return peak
        done = (step - self.warmup) / max(1, n_steps - self.warmup)
        return self.learning_rate * (1 + math.cos(math.pi * min(1.0, done))) / 2

    def own_share(self, step: int, n_steps: int) -> float:
        """Return the share of target tokens that the model reads from its own output at a step."""
        if self.free_running:
            return 1.0
        if self.ramp == "linear":
            return self.scheduled_sampling * step / n_steps
        true_share: float = _EXPONENTIAL_END ** (step / n_steps)
        if self.ramp == "inverse-sigmoid":
            k = inverse_sigmoid_k(n_steps)
            true_share = k / (k + math.exp(step / k))
        return self.scheduled_sampling * (1 - true_share)

    def reward_share(self, step: int, n_steps: int) -> float:
        """Return the weight of the self-critical loss at a step; the other losses have the rest."""
        return self.reward_weight if self.reward != "none" and step >= self.reward_after * n_steps else 0.0


def inverse_sigmoid_k(n_steps: int) -> float:
    """Return the k of k / (k + exp(i / k)) for which half of the tokens are true in the middle of a training.

    That is k·ln(k) = n / 2; the share then falls from k / (k + 1) to 1 / (k + 1).
    """
    low, high = 1.0, max(3.0, n_steps / 2)
    for _ in range(100):
        k = (low + high) / 2
        low, high = (k, high) if k * math.log(k) < n_steps / 2 else (low, k)
    return (low + high) / 2


def _out_of_range(name: str, value: float) -> str:
    """Return why a number is out of its range; nothing if it is in it or has none."""
    if name not in _RANGES:
        return ""
    low, high = _RANGES[name]
    if low <= value and (high is None or value <= high) and not math.isinf(value):
        return ""
    return f"must lie in {low}…{'' if high is None else high}, found {value}"
