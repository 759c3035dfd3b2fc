"""Decodes with a clock, behind engines of every kind: seconds by phase, and the tokens to check them by."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from fatdeploy.runtimes.bench.timing import Times
from fatdeploy.runtimes.engines.protocol import Capacity, State, StepOut, Stepper, Want
from fatdeploy.runtimes.proof.lockstep import greedy_calls
from fatdeploy.spec import Mask, Tokens

Phases = dict[str, float]  # seconds

# Engines are compared by this: CTranslate2 shows no other time of a step.
STEP = "per_token_by_difference"


class ClockedStepper(Generic[State]):
    """Another engine, with the moment and the tokens of each call."""

    def __init__(self, engine: Stepper[State]) -> None:
        self.engine, self.spec = engine, engine.spec
        self.marks: list[float] = []  # after encoding, before each step, before the release
        self.inputs: list[Tokens] = []

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> State:
        """Read the source."""
        state = self.engine.encode(source, mask, capacity)
        self.marks.append(time.perf_counter())
        return state

    def step(self, tokens: Tokens, state: State, want: Want) -> StepOut:
        """Feed tokens."""
        self.marks.append(time.perf_counter())
        self.inputs.append(tokens)
        return self.engine.step(tokens, state, want)

    def release(self, state: State) -> None:
        """Give the state back; what that costs is not part of the decode."""
        self.marks.append(time.perf_counter())
        self.engine.release(state)


def timed_greedy(engine: Stepper[Any], source: Tokens, mask: Mask, target: int) -> tuple[Phases, Tokens]:
    """Return seconds of each phase and the tokens [B, T]; EOS ends no row, so that every run does the same work."""
    clocked = ClockedStepper(engine)
    started = time.perf_counter()
    for logits in greedy_calls(clocked, source, mask, target):
        last = logits
    encoded, _, first, *_ = clocked.marks
    # The stepping helper yields no tokens: the choice of a step is the input of the next one.
    tokens = np.concatenate([*clocked.inputs[1:], last.argmax(-1)], 1)
    return phases_of(encoded - started, first - encoded, clocked.marks[-1] - started, target), tokens


def phases_of(encode: float, first_token: float, end_to_end: float, target: int) -> Phases:
    """Return the phases of a decode; a single step has no time per token."""
    phases = {"encode": encode, "first_token": first_token, "end_to_end": end_to_end}
    if target > 1:
        phases["per_token"] = (end_to_end - encode - first_token) / (target - 1)
    return phases


def phases_from_times(times: Times) -> Phases:
    """Return the phases of a decode by the loop that applications run."""
    return phases_of(times.encode, times.steps[0], times.end_to_end, len(times.steps))


def timed_steps(engine: Stepper[State], source: Tokens, mask: Mask, inputs: Tokens) -> tuple[np.ndarray, Tokens]:
    """Return seconds of each step on prescribed inputs [B, T], and the token that each step would choose [B, T]."""
    state = engine.encode(source, mask, Capacity(1, inputs.shape[1]))
    seconds, tokens = np.empty(inputs.shape[1]), np.empty_like(inputs)
    for step in range(inputs.shape[1]):
        started = time.perf_counter()
        logits = engine.step(inputs[:, step : step + 1], state, Want.LOGITS).logits
        tokens[:, step] = logits[:, 0].argmax(-1)
        seconds[step] = time.perf_counter() - started
    engine.release(state)
    return seconds, tokens


def repeated(decode: Callable[[int], Phases], target: int, repetitions: int) -> list[Phases]:
    """Return the phases of each repetition: a decode of all steps, and one of a single step."""
    repetitions_phases = []
    for _ in range(repetitions):
        phases, short = decode(target), decode(1)
        repetitions_phases.append({**phases, "encode_and_first_token": short["end_to_end"]})
    return with_differences(repetitions_phases, target)


def with_differences(repetitions: Sequence[Phases], target: int) -> list[Phases]:
    """Add the phases that follow from a long and a short decode: some engines show no others, so all have these."""
    # The median, because a slow short decode would make the step of its long one look fast.
    short = float(np.median([phases["encode_and_first_token"] for phases in repetitions]))
    steps = [(phases["end_to_end"] - short) / (target - 1) for phases in repetitions]
    return [
        {
            **phases,
            STEP: step,
            "encode_by_difference": phases["encode_and_first_token"] - step,
        }
        for phases, step in zip(repetitions, steps, strict=True)
    ]
