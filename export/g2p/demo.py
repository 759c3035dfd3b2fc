"""The demonstration: the bundled model from checkpoint to words on this machine."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fatdeploy
from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.certificate import HalfParity, Parity, read_certificate
from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.g2p import LICENCE, NAME
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.models.loading import bundled_model
from fatdeploy.export.pipeline import weights_hash, write_bundle
from fatdeploy.export.quantize.quantizer import Integers, QuantizeRequest
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.model import Model
from fatdeploy.runtimes.proof.verify import GateCheck, verified_quantized
from fatdeploy.targets import DEFAULT_TARGET

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
    "internationalization",
)
BEAMS, ALTERNATIVES = 5, 3
REPETITIONS = 25  # of every word, for its latency
SHADES = " ░▒▓█"
# What is exported: integers, with the cross-attention of the first decoder layer for the picture.
PRECISION: Integers = "int8"
ATTENTION = 0
LETTERS = re.compile("[a-z']+")


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
    parity: Parity | HalfParity  # of the graphs in fp32
    quantized: GateCheck  # how close their integers come, measured here
    words: list[Pronounced]
    p50_ms: float
    p95_ms: float
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)


def demonstrated(words: Sequence[str], folder: Path, stage: Callable[[str], None]) -> Demonstration:
    """Return what the bundled model makes of words; its bundle is exported to ``folder`` unless it is there."""
    words = _letters_of(words)
    bundle = _exported(folder, stage)
    stage("comparing with the reference's tokens")
    parity, quantized = _compared(bundle)
    stage("pronouncing")
    with fatdeploy.load(folder, threads=1) as model:
        found = model.generate(words, DecodeOptions(num_beams=BEAMS, num_return_sequences=ALTERNATIVES))
        greedy = model.generate(words)
        times = _times(model, words)
    shown = [_pronounced(*each) for each in zip(words, found, greedy, strict=True)]
    p50, p95 = np.percentile(np.array(times) * 1e3, [50, 95]).tolist()
    return Demonstration(str(folder), bundle.total_bytes, parity, quantized, shown, p50, p95, 1)


def _letters_of(words: Sequence[str]) -> list[str]:
    """Return words as the model was trained to read them, in lower case; what no word of it has is refused."""
    lower = [word.lower() for word in words]
    wrong = [repr(word) for word in lower if not LETTERS.fullmatch(word)]
    if wrong:
        raise ConfigError(f"a word is letters from a to z and apostrophes, found {', '.join(wrong)}: leave them out")
    return lower


def _compared(bundle: Bundle) -> tuple[Parity | HalfParity, GateCheck]:
    """Return the parity of a bundle's graphs in fp32, and how close its integers are to the reference here."""
    engine = OrtEngine(bundle, OrtOptions(threads=1, spinning=False))
    try:
        return read_certificate(bundle).parity, verified_quantized(bundle, engine)
    finally:
        engine.close()


def _exported(folder: Path, stage: Callable[[str], None]) -> Bundle:
    """Return the bundle in a folder; it is exported if there is none, or one of other weights of the same model."""
    model, origin = bundled_model()
    if folder.exists():
        bundle = read_bundle(folder)
        _check_own(bundle)
        if bundle.manifest.source.sha256 == weights_hash(model):
            return bundle
        stage("the weights are others than those in the bundle: exporting again")
    exportable, asked = (
        exportable_model(model, Choices(attention_layer=ATTENTION)),
        QuantizeRequest(precision=PRECISION),
    )
    return write_bundle(exportable, folder, origin=origin, precision=asked, force=True, stage=stage)


def _check_own(bundle: Bundle) -> None:
    """Refuse a bundle that is not as the demonstration exports it: it is somebody's, and lacks what is shown."""
    manifest, alignment = bundle.manifest, bundle.spec.alignment
    compared: dict[str, tuple[object, object]] = {
        "model": (manifest.source.name, NAME),
        "licence": (manifest.source.licence, LICENCE),
        "target": (manifest.target, DEFAULT_TARGET),
        "precision": (manifest.precision, PRECISION),
        "attention": (None if alignment is None else alignment.layer, ATTENTION),
    }
    wrong = [f"{name} is {found}, expected {wanted}" for name, (found, wanted) in compared.items() if found != wanted]
    if wrong:
        told = in_one_line(f"{bundle.path} is not a bundle of the demonstration", wrong)
        raise ConfigError(f"{told}; name a folder that is not there yet with --bundle")


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
