"""Real sentences as ids, exactly as Marian's tokenizer makes them: sentencepiece's pieces, then EOS."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.provenance import ROOT
from benchmarks.real.folders.opus_mt import EOS, PAD

REAL = ROOT / "build" / "real"
MODEL, PEER, SENTENCES = "opus-mt-zh-en", "opus-mt-zh-en-ctranslate2", "zh-sentences.txt"
UNKNOWN = 1
EVERY = 4  # this share of the sentences is compared: 583 of 2,331


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of the model and their ids."""

    ids: dict[str, int]

    @classmethod
    def of(cls, model: Path) -> "Vocabulary":
        """Read the vocabulary of a Hugging Face folder."""
        return cls(json.loads((model / "vocab.json").read_text(encoding="utf-8")))

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the pieces of ids."""
        by_id = {index: piece for piece, index in self.ids.items()}
        return [by_id[index] for index in ids]


def all_sentences(real: Path = REAL) -> list[str]:
    """Return every sentence."""
    return (real / SENTENCES).read_text(encoding="utf-8").splitlines()


def sentences(real: Path = REAL) -> list[str]:
    """Return the sentences that engines are compared on."""
    return all_sentences(real)[::EVERY]


def source_ids(texts: list[str], real: Path = REAL) -> list[list[int]]:
    """Return the ids of texts, each with EOS at its end."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(str(real / MODEL / "source.spm"))
    ids = Vocabulary.of(real / MODEL).ids
    return [[*(ids.get(piece, UNKNOWN) for piece in processor.encode(text, out_type=str)), EOS] for text in texts]


def spoken(tokens: list[int]) -> list[int]:
    """Return a target without EOS and padding."""
    return [token for token in tokens if token not in (EOS, PAD)]


def evenly(total: int, count: int) -> list[int]:
    """Return some rows of all, evenly spread."""
    return [int(row) for row in np.linspace(0, total - 1, min(total, count))]
