"""How close the outputs of quantized engines are to fp32's, and to references where sentences have them."""

from pathlib import Path
from typing import Any

from benchmarks.real.sources import REAL
from fatdeploy.runtimes.evaluation.metrics import bleu, chrf

Ids = list[list[int]]
PAIRS = "zh-en-pairs.tsv"
WORD_START = "\u2581"  # sentencepiece's mark for a blank


def texts_of(outputs: Ids, pieces: dict[int, str]) -> list[str]:
    """Return targets as text."""
    return ["".join(pieces[token] for token in tokens).replace(WORD_START, " ").strip() for tokens in outputs]


def changed(outputs: Ids, expected: Ids) -> int:
    """Return how many outputs differ from the expected ones."""
    return sum(ours != theirs for ours, theirs in zip(outputs, expected, strict=True))


def closeness(outputs: Ids, fp32: Ids, pieces: dict[int, str]) -> dict[str, Any]:
    """Return how many sentences fp32 translates in the same way, and BLEU and chrF against fp32's translations."""
    hypotheses, references = texts_of(outputs, pieces), [[text] for text in texts_of(fp32, pieces)]
    return {
        "sentences": len(outputs),
        "unchanged": len(outputs) - changed(outputs, fp32),
        "chrf": chrf(hypotheses, references).value,
        "bleu": bleu(hypotheses, references).value,
    }


def read_references(sentences: list[str], real: Path = REAL) -> dict[int, str]:
    """Return the English originals of those sentences that have one, by row; blanks do not matter."""
    file = real / PAIRS
    if not file.exists():
        raise SystemExit(f"build/real/{PAIRS} does not exist: run make real-models")
    lines = file.read_text(encoding="utf-8").splitlines()
    originals = {"".join(source.split()): target for source, target in (line.split("\t") for line in lines)}
    keys = ["".join(sentence.split()) for sentence in sentences]
    return {row: originals[key] for row, key in enumerate(keys) if key in originals}


def quality(outputs: Ids, references: dict[int, str], pieces: dict[int, str]) -> dict[str, Any]:
    """Return BLEU and chrF of outputs against the references that there are."""
    hypotheses = texts_of([outputs[row] for row in references], pieces)
    accepted = [[text] for text in references.values()]
    return {
        "sentences": len(references),
        "bleu": bleu(hypotheses, accepted).value,
        "chrf": chrf(hypotheses, accepted).value,
    }
