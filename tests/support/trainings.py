"""Small trainings for tests: pairs that a tiny model learns in seconds."""

import random
from pathlib import Path
from typing import Any

from fatdeploy.export.training.data import DataPart, Parts
from fatdeploy.export.training.run import Training, TrainingPlan
from fatdeploy.export.training.settings import TrainSettings
from fatdeploy.pairs import Pair

LETTERS = "abcdefgh"


def spelled(count: int, seed: int = 0, longest: int = 4) -> list[Pair]:
    """Return different words with their made-up pronunciations."""
    draw, words = random.Random(seed), {}
    while len(words) < count:
        word = "".join(draw.choices(LETTERS, k=draw.randint(1, longest)))
        words[word] = " ".join(word.upper())
    return [Pair(word, sounds) for word, sounds in words.items()]


def parts(count: int = 320) -> Parts:
    """Return pairs, a tenth of them for validation."""
    pairs, apart = spelled(count), count // 10
    return Parts(part_of(pairs[apart:], "train.tsv"), part_of(pairs[:apart], "validation.tsv"))


def part_of(pairs: list[Pair], path: str) -> DataPart:
    """Return pairs as if they were read from a file."""
    return DataPart(Path(path), pairs, range(1, len(pairs) + 1))


def plan(preset: str = "fat-tiny", changes: dict[str, Any] | None = None, **settings: Any) -> TrainingPlan:
    """Return a plan for a tiny model."""
    small = {"max_source": 8, "max_target": 16, "encoder_layers": 1, "decoder_layers": 1}
    chosen = {"epochs": 2, "batch_size": 16, "learning_rate": 5e-3, "warmup": 10, **settings}
    return TrainingPlan(
        preset=preset,
        changes=small | (changes or {}),
        tokenizer="symbols",
        vocab_size=None,
        settings=TrainSettings(**chosen),
    )


def trained(folder: Path, training_plan: TrainingPlan, data: Parts | None = None) -> Training:
    """Return a finished training."""
    training = Training(training_plan, data or parts(), folder, resume=False)
    for _ in training.events():
        pass
    training.finish()
    return training
