"""Engines behind one call: a number of greedy steps on a batch of sources, timed, with the tokens.

torch is imported for the reference alone: it would add its memory and idle threads to every other engine.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.harness.settings import EngineName, EngineSetting
from benchmarks.harness.timing import Phases, timed_greedy, timed_steps
from fatdeploy.bundle import read_bundle
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Stepper
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import Tokens

# Imported before the clock starts: loading a model is what is compared.
IMPORTED: dict[EngineName, str] = {
    "fatdeploy": "onnxruntime",
    "ctranslate2": "ctranslate2",
    "plain": "onnxruntime",
    "reference": "torch",
}


class Decoder(Protocol):
    """A loaded engine and the sources that it decodes."""

    def decoded(self, target: int) -> tuple[Phases, Tokens]:
        """Return seconds of the phases that the engine shows, and the tokens [B, T] of ``target`` steps."""
        ...

    def following(self, tokens: Tokens) -> Tokens:
        """Return the token that the engine chooses after every prefix of known targets [B, T]."""
        ...


@dataclass(frozen=True)
class Stepping:
    """An engine that is fed token by token."""

    engine: Stepper[Any]
    probe: Probe

    def decoded(self, target: int) -> tuple[Phases, Tokens]:
        return timed_greedy(self.engine, self.probe.source, self.probe.mask, target)

    def following(self, tokens: Tokens) -> Tokens:
        inputs = np.roll(tokens, 1, 1)
        inputs[:, 0] = self.engine.spec.bos_id
        return timed_steps(self.engine, self.probe.source, self.probe.mask, inputs)[1]


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


def loaded_decoder(setting: EngineSetting, folder: Path | None, probe: Probe) -> Decoder:
    """Return an engine that has loaded its model; the reference has no folder to load."""
    if folder is None:
        return _reference_decoder(setting.preset, probe, setting.threads)
    if setting.engine == "ctranslate2":
        pool = {"threads": setting.threads, "workers": setting.workers}
        return Translating(folder, probe, compute_type=setting.precision, **pool)
    return (_plain_decoder if setting.engine == "plain" else _bundle_decoder)(folder, probe, setting.threads)


def _bundle_decoder(folder: Path, probe: Probe, threads: int) -> Decoder:
    """Load a bundle and check its hashes."""
    return Stepping(OrtEngine(read_bundle(folder), OrtOptions(threads=threads)), probe)


def _plain_decoder(folder: Path, probe: Probe, threads: int) -> Decoder:
    """Load a plain export with growing caches."""
    from benchmarks.peers.growing_caches_decoding import GrowingCaches

    return Stepping(GrowingCaches(folder, threads=threads), probe)


def _reference_decoder(preset: str, probe: Probe, threads: int) -> Decoder:
    """Draw the reference's weights."""
    import torch

    from fatdeploy.export.models.eager import EagerEngine
    from fatdeploy.export.reference.weights import model_from_preset

    torch.set_num_threads(threads)
    return Stepping(EagerEngine(model_from_preset(preset)), probe)
