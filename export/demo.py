"""The demonstration: a reference model decodes a few random sources."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fatdeploy.export.eager import EagerEngine
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.runtimes.decode import decode
from fatdeploy.runtimes.hypothesis import Hypothesis
from fatdeploy.runtimes.options import DecodeOptions
from fatdeploy.spec import ModelSpec


@dataclass(frozen=True)
class Demonstration:
    """What was decoded, and how fast."""

    preset: str
    sources: list[list[int]]
    outputs: list[Hypothesis]
    steps: int
    seconds: float

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "steps_per_second": self.steps_per_second}


def random_sources(spec: ModelSpec, count: int, seed: int) -> list[list[int]]:
    """Return sources of 3 to 12 ordinary tokens."""
    draw = np.random.default_rng(seed)
    special = {spec.pad_id, spec.bos_id, spec.eos_id}
    ordinary = [token for token in range(spec.vocab_size) if token not in special]
    lengths = draw.integers(3, 13, count).clip(max=spec.max_source)
    return [draw.choice(ordinary, length).tolist() for length in lengths]


def demonstrated(preset: str, count: int, options: DecodeOptions, seed: int) -> Demonstration:
    """Return what a preset with seeded random weights makes of seeded random sources."""
    engine = EagerEngine(model_from_preset(preset, seed))
    sources = random_sources(engine.spec, count, seed)
    decode(engine, sources[:1], options)  # the first call of a process pays for things that no later one does
    started = time.perf_counter()
    outputs = decode(engine, sources, options)
    seconds = time.perf_counter() - started
    return Demonstration(preset, sources, outputs, steps_of(outputs, engine.spec), seconds)


def steps_of(outputs: list[Hypothesis], spec: ModelSpec) -> int:
    """Return how many decoder steps led to these outputs: those of the longest row, its EOS included."""
    if spec.decoding == "parallel":
        return 1
    return max(len(output.tokens) + (output.finish == "eos") for output in outputs)
