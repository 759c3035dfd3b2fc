"""What the originals answer: transformers' ``generate`` and CTranslate2 on real sentences, kept in build/real.

``generate`` takes minutes, so answers are written as they come, and an interrupted run continues where it stopped.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from benchmarks.harness.rounds import PartialResults
from benchmarks.real.folders.opus_mt import PAD
from benchmarks.real.folders.packages import sha256_of
from benchmarks.real.sources import MODEL, PEER, REAL, SENTENCES, Vocabulary, sentences, source_ids, spoken

Engine = Literal["transformers", "ctranslate2"]
MAX_NEW_TOKENS = 128
BATCH = 16
NOISE = 1e-5  # bound of fp32 logits, relative to the largest
PACKAGES: dict[Engine, tuple[str, ...]] = {
    "transformers": ("transformers", "torch"),
    "ctranslate2": ("ctranslate2",),
}


@dataclass(frozen=True)
class SearchSetting:
    """A search; with beams CTranslate2 ends as ``generate`` does with ``early_stopping``, so that both must agree."""

    beams: int
    early_stopping: bool = False


GREEDY, BEAMS = SearchSetting(1), SearchSetting(4, early_stopping=True)
FOLDER = SearchSetting(4)  # what generation_config.json says
SETTINGS: dict[str, tuple[Engine, SearchSetting]] = {
    "transformers-greedy": ("transformers", GREEDY),
    "transformers-beams": ("transformers", BEAMS),
    "transformers-folder": ("transformers", FOLDER),
    "ctranslate2-greedy": ("ctranslate2", GREEDY),
    "ctranslate2-beams": ("ctranslate2", BEAMS),
}


@dataclass(frozen=True)
class Answer:
    """The best target without EOS; greedy ones have margins and the largest logit, others a score."""

    tokens: list[int]
    score: float | None = None
    margins: list[float] | None = None  # per step: logit of the choice above the second best
    largest: float = 0.0  # of all logits of the steps, as a magnitude


Ask = Callable[[list[list[int]]], list[Answer]]


def answers(name: str, real: Path = REAL) -> list[Answer]:
    """Return an engine's answers to all sentences; those that are kept are not computed again."""
    engine, setting = SETTINGS[name]
    sources = source_ids(sentences(real), real)
    # Rows of similar length together: less padding.
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    kept = PartialResults(real / "answers" / f"{name}.json", _made_by(engine, setting, real))
    batches = {f"{start}": order[start : start + BATCH] for start in range(0, len(order), BATCH)}
    if missing := [key for key in batches if key not in kept.results]:
        ask = (_transformers if engine == "transformers" else _ctranslate2)(setting, real)
        with click.progressbar(missing, label=name, file=sys.stderr) as bar:
            for key in bar:
                kept.add(key, [asdict(answer) for answer in ask([sources[row] for row in batches[key]])])
    by_row = {
        row: Answer(**answer)
        for key, rows in batches.items()
        for row, answer in zip(rows, kept.results[key], strict=True)
    }
    return [by_row[row] for row in range(len(sources))]


def _made_by(engine: Engine, setting: SearchSetting, real: Path) -> dict[str, Any]:
    model = real / MODEL / "model.safetensors" if engine == "transformers" else real / PEER / "model.bin"
    return {
        "setting": asdict(setting),
        "max_new_tokens": MAX_NEW_TOKENS,
        "model": sha256_of(model),
        "sentences": sha256_of(real / SENTENCES),
        "versions": {package: version(package) for package in PACKAGES[engine]},
    }


def _transformers(setting: SearchSetting, real: Path) -> Ask:
    import torch
    from transformers import MarianMTModel, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = MarianMTModel.from_pretrained(real / MODEL).eval()

    def ask(sources: list[list[int]]) -> list[Answer]:
        source = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sources], True, PAD)  # noqa: FBT003
        generated = model.generate(
            source,
            attention_mask=(source != PAD).long(),
            num_beams=setting.beams,
            early_stopping=setting.early_stopping,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=setting.beams == 1,
        )
        rows = [spoken(row[1:]) for row in generated.sequences.tolist()]
        if setting.beams > 1:
            scores = generated.sequences_scores.tolist()
            return [Answer(tokens, score) for tokens, score in zip(rows, scores, strict=True)]
        logits = torch.stack(generated.logits, 1)[..., :PAD]  # [B, T, V], without the padding that is never chosen
        best = logits.topk(2).values
        steps = [len(tokens) + 1 for tokens in rows]
        return [
            Answer(tokens, None, (best[row, :n, 0] - best[row, :n, 1]).tolist(), float(logits[row, :n].abs().max()))
            for row, (tokens, n) in enumerate(zip(rows, steps, strict=True))
        ]

    return ask


def _ctranslate2(setting: SearchSetting, real: Path) -> Ask:
    import ctranslate2

    translator = ctranslate2.Translator(str(real / PEER), compute_type="float32")
    vocabulary = Vocabulary.of(real / MODEL)

    def ask(sources: list[list[int]]) -> list[Answer]:
        results = translator.translate_batch(
            [vocabulary.pieces(ids[:-1]) for ids in sources],  # it appends EOS itself
            beam_size=setting.beams,
            max_decoding_length=MAX_NEW_TOKENS,
            return_scores=True,
        )
        return [
            Answer([vocabulary.ids[piece] for piece in result.hypotheses[0]], result.scores[0]) for result in results
        ]

    return ask


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*SETTINGS]))
def main(names: tuple[str, ...]) -> None:
    """Compute the answers of all engines, or only of those named NAMES."""
    for name in names or SETTINGS:
        lengths = np.array([len(answer.tokens) for answer in answers(name)])
        print(f"{name}: {len(lengths)} sentences, {lengths.mean():.1f} tokens on average, at most {lengths.max()}")


if __name__ == "__main__":
    main()
