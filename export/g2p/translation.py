"""The second act of the demonstration: a Hugging Face folder, exported once, translates Chinese sentences."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fatdeploy
from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.certificate import read_certificate
from fatdeploy.export.models.loading import model_from_source, typed_folder
from fatdeploy.export.pipeline import weights_hash, write_bundle

SENTENCES = (
    "今天天气很好，我们去公园散步吧。",
    "机器学习正在改变世界。",
    "请问最近的地铁站在哪里？",
    "这本书是我在大学时读过的最有意思的一本。",
    "由于天气原因，航班被取消了，请旅客到柜台办理改签手续。",
)


@dataclass(frozen=True)
class TranslatedSentence:
    """A sentence, its translation, and how long that took."""

    source: str
    target: str
    ms: float


@dataclass(frozen=True)
class TranslationAct:
    """Everything that the second act shows."""

    bundle: str
    bundle_bytes: int
    proof: list[str]  # lines of the certificate
    sentences: list[TranslatedSentence]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return everything for a terminal; Chinese characters are too wide for columns."""
        pairs = [
            line for entry in self.sentences for line in (entry.source, f"    {entry.target}  ({entry.ms:.0f} ms)")
        ]
        return [*pairs, *(f"proof: {line}" for line in self.proof)]


def translated(folder: Path, stage: Callable[[str], None]) -> TranslationAct:
    """Return how the model of a folder translates, with the folder's own settings; its bundle is kept beside it."""
    out = folder.with_name(f"{folder.name}.bundle")
    bundle = _exported(folder, out, stage)
    stage("translating")
    with fatdeploy.load(out) as model:
        sentences = []
        for source in SENTENCES:
            started = time.perf_counter()
            [hypothesis] = model.generate([source])
            ms = (time.perf_counter() - started) * 1e3
            sentences.append(TranslatedSentence(source, hypothesis.text or "", ms))
    certificate = read_certificate(bundle)
    proof = [certificate.parity.line()]
    if certificate.original is not None:
        proof.append(certificate.original.line())
    return TranslationAct(str(out), bundle.total_bytes, proof, sentences)


def _exported(folder: Path, out: Path, stage: Callable[[str], None]) -> Bundle:
    """Return the bundle of a folder; export it if it is missing or has other weights."""
    model, origin = model_from_source(typed_folder(folder))
    if out.exists():
        bundle = read_bundle(out)
        if bundle.manifest.source.sha256 == weights_hash(model):
            return bundle
        stage("the bundle has other weights: exporting again")
    stage(f"exporting {folder.name}")
    return write_bundle(model, out, origin=origin, force=True, stage=stage)
