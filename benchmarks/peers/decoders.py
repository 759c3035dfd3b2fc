"""Engines behind one call: so many greedy steps of a batch of sources, timed, and the tokens that were said.

Nothing here imports torch unless the reference is asked for: the memory and the idle threads would be another's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from benchmarks.harness.measuring import Phases, timed_decode
from fatdeploy.bundle import read_bundle
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, State, Stepper, Want
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import Mask, Tokens

EngineName = Literal["fatdeploy", "ctranslate2", "plain", "reference"]

# What engines are compared by: the only time of a step that CTranslate2 lets us tell.
STEP = "per_token_by_difference"
# Imported before the clock starts: loading a model is what is compared.
IMPORTED: dict[EngineName, str] = {
    "fatdeploy": "onnxruntime",
    "ctranslate2": "ctranslate2",
    "plain": "onnxruntime",
    "reference": "torch",
}


class Decoder(Protocol):
    """A loaded engine and the sources that it is to decode."""

    def decoded(self, target: int) -> tuple[Phases, Tokens]:
        """Return seconds of the phases that the engine shows, and the tokens [B, T] of so many steps."""
        ...

    def following(self, tokens: Tokens) -> Tokens:
        """Return what is said after every part of known targets [B, T]."""
        ...


@dataclass(frozen=True)
class Stepping:
    """An engine that is fed token by token."""

    engine: Stepper[Any]
    probe: Probe

    def decoded(self, target: int) -> tuple[Phases, Tokens]:
        return timed_decode(self.engine, self.probe.source, self.probe.mask, target)

    def following(self, tokens: Tokens) -> Tokens:
        read = np.roll(tokens, 1, 1)
        read[:, 0] = self.engine.spec.bos_id
        return timed_steps(self.engine, self.probe.source, self.probe.mask, read)[1]


class Translating:
    """CTranslate2, which decodes by itself and shows nothing but its result."""

    def __init__(self, folder: Path, probe: Probe, **setting: Any) -> None:
        from benchmarks.peers.ctranslate2_decoding import Translation

        self.translation = Translation(folder, **setting)
        self.sources = self.translation.sources(probe.source, probe.mask)

    def decoded(self, target: int) -> tuple[Phases, Tokens]:
        started = time.perf_counter()
        results = self.translation.results(self.sources, target)
        ended = time.perf_counter()
        return {"end_to_end": ended - started}, self.translation.tokens(results)

    def following(self, tokens: Tokens) -> Tokens:
        return self.translation.following(self.sources, tokens)


def bundle_decoder(folder: Path, probe: Probe, threads: int) -> Decoder:
    """Load a bundle, its hashes checked."""
    return Stepping(OrtEngine(read_bundle(folder), threads=threads), probe)


def plain_decoder(folder: Path, probe: Probe, threads: int) -> Decoder:
    """Load a plain export with growing caches."""
    from benchmarks.peers.growing_caches_decoding import GrowingCaches

    return Stepping(GrowingCaches(folder, threads=threads), probe)


def reference_decoder(preset: str, probe: Probe, threads: int) -> Decoder:
    """Draw the reference's weights."""
    import torch

    from fatdeploy.export.models.eager import EagerEngine
    from fatdeploy.export.reference.weights import model_from_preset

    torch.set_num_threads(threads)
    return Stepping(EagerEngine(model_from_preset(preset)), probe)


def timed_steps(engine: Stepper[State], source: Tokens, mask: Mask, read: Tokens) -> tuple[np.ndarray, Tokens]:
    """Return seconds of each step on tokens that are given [B, T], and what is said after each."""
    state = engine.encode(source, mask, Capacity(1, read.shape[1]))
    times, said = np.empty(read.shape[1]), np.empty_like(read)
    for step in range(read.shape[1]):
        started = time.perf_counter()
        logits = engine.step(read[:, step : step + 1], state, Want.LOGITS).logits
        said[:, step] = logits[:, 0].argmax(-1)
        times[step] = time.perf_counter() - started
    engine.release(state)
    return times, said


def repeated(decoded: Callable[[int], Phases], target: int, repetitions: int) -> list[Phases]:
    """Return the phases of each repetition: a decode of all steps, and one of a single step."""
    found = []
    for _ in range(repetitions):
        phases, short = decoded(target), decoded(1)
        found.append({**phases, "encode_and_first_token": short["end_to_end"]})
    return with_differences(found, target)


def with_differences(found: list[Phases], target: int) -> list[Phases]:
    """Add what two decodes tell of an engine that does not show its phases: all engines are compared by these."""
    # The median, because a slow short decode would make the step of its long one look fast.
    short = float(np.median([phases["encode_and_first_token"] for phases in found]))
    steps = [(phases["end_to_end"] - short) / (target - 1) for phases in found]
    return [
        {
            **phases,
            STEP: step,
            "encode_by_difference": phases["encode_and_first_token"] - step,
        }
        for phases, step in zip(found, steps, strict=True)
    ]
