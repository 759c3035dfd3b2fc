"""The demonstration: the bundled model from checkpoint to words on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fatdeploy
from fatdeploy.bundle import PROBES, Bundle, read_bundle
from fatdeploy.errors import ConfigError
from fatdeploy.export.contract import Choices
from fatdeploy.export.g2p import NAME
from fatdeploy.export.pipeline import weights_hash, write_bundle
from fatdeploy.export.precision import Asked
from fatdeploy.export.sources import bundled_model
from fatdeploy.runtimes.gate import certificate_of, verified_quantized
from fatdeploy.runtimes.hypothesis import Hypothesis
from fatdeploy.runtimes.model import Model
from fatdeploy.runtimes.options import DecodeOptions
from fatdeploy.runtimes.ort import OrtEngine
from fatdeploy.runtimes.verify import read_probes, verified

WORDS = (
    "hello",
    "phoneme",
    "grapheme",
    "knight",
    "thought",
    "queue",
    "choir",
    "transformer",
    "autoregressive",
    "edge",
    "deployable",
    "supercalifragilistic",
)
BEAMS, ALTERNATIVES = 5, 3
REPETITIONS = 25  # of every word, for its latency
SHADES = " ░▒▓█"


@dataclass(frozen=True)
class Pronounced:
    """A word, the best pronunciations with their scores, and from which letters the greedy one was read."""

    word: str
    best: list[tuple[str, float | None]]
    greedy: str
    letters: list[list[float]]  # a row a phoneme of the greedy one, a column a letter


@dataclass(frozen=True)
class Demonstration:
    """All that is shown."""

    bundle: str
    bundle_bytes: int
    parity: dict[str, Any]  # of the graphs in fp32
    quantized: dict[str, Any] | None  # how close their integers come, measured here
    words: list[Pronounced]
    p50_ms: float
    p95_ms: float
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)


def demonstrated(words: Sequence[str], folder: Path, stage: Callable[[str], None]) -> Demonstration:
    """Return what the bundled model makes of words; its bundle is exported to ``folder`` unless it is there."""
    bundle = _exported(folder, stage)
    stage("comparing with the reference's tokens")
    parity, quantized = _compared(bundle)
    stage("pronouncing")
    with fatdeploy.load(folder, threads=1) as model:
        found = model.generate(list(words), DecodeOptions(num_beams=BEAMS, num_return_sequences=ALTERNATIVES))
        greedy = model.generate(list(words))
        times = _times(model, words)
    shown = [_pronounced(*each) for each in zip(words, found, greedy, strict=True)]
    p50, p95 = np.percentile(np.array(times) * 1e3, [50, 95]).tolist()
    return Demonstration(str(folder), bundle.total_bytes, parity, quantized, shown, p50, p95, 1)


def _compared(bundle: Bundle) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the parity of a bundle's graphs in fp32 and, of integers, how close they are to the reference here."""
    engine = OrtEngine(bundle, threads=1, spinning=False)
    try:
        if bundle.manifest.quantization is None:
            return verified(engine, read_probes(bundle.file(PROBES))).as_dict(), None
        certificate = certificate_of(bundle)
        return certificate["parity"], verified_quantized(engine, bundle, certificate)
    finally:
        engine.close()


def _exported(folder: Path, stage: Callable[[str], None]) -> Bundle:
    model, origin = bundled_model()
    if folder.exists():
        bundle = read_bundle(folder)
        if bundle.manifest.source.name != NAME:
            raise ConfigError(f"{folder} is a bundle of {bundle.manifest.source.name}: name another with --bundle")
        if bundle.manifest.source.sha256 == weights_hash(model):
            return bundle
    choices, asked = Choices(attention_layer=0), Asked(precision="int8")
    return write_bundle(model, folder, origin=origin, choices=choices, quantize=asked, force=True, stage=stage)


def _pronounced(word: str, found: Hypothesis, greedy: Hypothesis) -> Pronounced:
    every = (found, *found.alternatives)
    rows = [] if greedy.alignments is None else [[round(one, 4) for one in row] for row in greedy.alignments.tolist()]
    return Pronounced(word, [(one.text or "", one.score) for one in every], greedy.text or "", rows)


def _times(model: Model, words: Sequence[str]) -> list[float]:
    """Return the seconds of each word alone, again and again."""
    times = []
    for _ in range(REPETITIONS):
        for word in words:
            started = time.perf_counter()
            model.generate([word])
            times.append(time.perf_counter() - started)
    return times


def picture_lines(shown: Pronounced) -> list[str]:
    """Return the letters that each phoneme was read from: the darker, the more."""
    lines = [f"{'':6}{' '.join(shown.word)}"]
    # The last row is the end's, which is no phoneme.
    for phoneme, row in zip(shown.greedy.split(), shown.letters, strict=False):
        most = max(*row, 1e-9)
        shades = [SHADES[min(len(SHADES) - 1, round(max(0.0, one) / most * (len(SHADES) - 1)))] for one in row]
        lines.append(f"{phoneme:>5} {' '.join(shades)}")
    return lines
