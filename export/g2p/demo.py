"""The demonstration: the bundled model from checkpoint to pronounced words on this machine."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
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
from fatdeploy.export.quantize.request import Integers, QuantizeRequest
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
REPETITIONS = 25  # per word, to measure latency
SHADES = " ░▒▓█"
# The export has integers, and the cross-attention of the first decoder layer for the picture.
PRECISION: Integers = "int8"
ATTENTION = 0
LETTERS = re.compile("[a-z']+")


@dataclass(frozen=True)
class Pronounced:
    """A word, its best pronunciations with their scores, and the letters that the greedy one was read from."""

    word: str
    best: list[tuple[str, float | None]]
    greedy: str
    letters: list[list[float]]  # one row per phoneme of the greedy one, one column per letter


@dataclass(frozen=True)
class Demonstration:
    """Everything the demonstration shows."""

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
    """Return how the bundled model pronounces words; its bundle is exported to ``folder`` if missing."""
    words = _letters_of(words)
    bundle = _exported(folder, stage)
    stage("comparing with the reference's tokens")
    parity, quantized = _compared(bundle)
    stage("pronouncing")
    with fatdeploy.load(folder, threads=1) as model:
        beams = model.generate(words, DecodeOptions(num_beams=BEAMS, num_return_sequences=ALTERNATIVES))
        greedy = model.generate(words)
        times = _times(model, words)
    pronounced = [_pronounced(*results) for results in zip(words, beams, greedy, strict=True)]
    p50, p95 = np.percentile(np.array(times) * 1e3, [50, 95]).tolist()
    return Demonstration(str(folder), bundle.total_bytes, parity, quantized, pronounced, p50, p95, 1)


def _letters_of(words: Sequence[str]) -> list[str]:
    """Return words in lower case, as the model was trained on; words with anything but letters are refused."""
    lower = [word.lower() for word in words]
    wrong = [repr(word) for word in lower if not LETTERS.fullmatch(word)]
    if wrong:
        raise ConfigError(f"a word is letters from a to z and apostrophes, found {', '.join(wrong)}: leave them out")
    return lower


def _compared(bundle: Bundle) -> tuple[Parity | HalfParity, GateCheck]:
    """Return the parity of a bundle's graphs in fp32, and how close its integers are to the reference here."""
    with closing(OrtEngine(bundle, OrtOptions(threads=1, spinning=False))) as engine:
        return read_certificate(bundle).parity, verified_quantized(bundle, engine)


def _exported(folder: Path, stage: Callable[[str], None]) -> Bundle:
    """Return the bundle in a folder; export it if it is missing, or has other weights of the same model."""
    model, origin = bundled_model()
    if folder.exists():
        bundle = read_bundle(folder)
        _check_own(bundle)
        if bundle.manifest.source.sha256 == weights_hash(model):
            return bundle
        stage("the bundle has other weights: exporting again")
    exportable = exportable_model(model, Choices(attention_layer=ATTENTION))
    request = QuantizeRequest(precision=PRECISION)
    return write_bundle(exportable, folder, origin=origin, precision=request, force=True, stage=stage)


def _check_own(bundle: Bundle) -> None:
    """Refuse a bundle that the demonstration did not export: it belongs to the user, and lacks what is shown."""
    manifest, alignment = bundle.manifest, bundle.spec.alignment
    values: dict[str, tuple[object, object]] = {
        "model": (manifest.source.name, NAME),
        "licence": (manifest.source.licence, LICENCE),
        "target": (manifest.target, DEFAULT_TARGET),
        "precision": (manifest.precision, PRECISION),
        "attention": (None if alignment is None else alignment.layer, ATTENTION),
    }
    wrong = [f"{name} is {value}, expected {own}" for name, (value, own) in values.items() if value != own]
    if wrong:
        message = in_one_line(f"{bundle.path} is not a bundle of the demonstration", wrong)
        raise ConfigError(f"{message}; name a new folder with --bundle")


def _pronounced(word: str, best: Hypothesis, greedy: Hypothesis) -> Pronounced:
    texts = [(hypothesis.text or "", hypothesis.score) for hypothesis in (best, *best.alternatives)]
    weights = [] if greedy.alignments is None else greedy.alignments.tolist()
    return Pronounced(word, texts, greedy.text or "", [[round(weight, 4) for weight in row] for row in weights])


def _times(model: Model, words: Sequence[str]) -> list[float]:
    """Return the seconds that each word takes alone, measured repeatedly."""
    times = []
    for _ in range(REPETITIONS):
        for word in words:
            started = time.perf_counter()
            model.generate([word])
            times.append(time.perf_counter() - started)
    return times


def picture_lines(shown: Pronounced) -> list[str]:
    """Return the letters that each phoneme was read from: the darker, the higher the weight."""
    lines = [f"{'':6}{' '.join(shown.word)}"]
    # The last row belongs to EOS, which is not a phoneme.
    for phoneme, row in zip(shown.greedy.split(), shown.letters, strict=False):
        most = max(*row, 1e-9)
        shades = [SHADES[min(len(SHADES) - 1, round(max(0.0, weight) / most * (len(SHADES) - 1)))] for weight in row]
        lines.append(f"{phoneme:>5} {' '.join(shades)}")
    return lines
