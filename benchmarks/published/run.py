"""Train models with the published choices, one by one, for the same number of steps on words and their phonemes.

It writes the errors on words that no model saw as JSON. An interrupted run continues where it stopped.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.provenance import MEASURED, RESULTS, code_digest
from benchmarks.harness.recording import Recording, file_options
from fatdeploy.errors import TrainingFailed
from fatdeploy.export.g2p.data import dictionary_file, entries_from_text, first_words, parts_of
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.training.data import Parts, read_parts
from fatdeploy.export.training.resume import STATE
from fatdeploy.export.training.run import Training, TrainingPlan
from fatdeploy.export.training.settings import TrainSettings
from fatdeploy.export.training.trainer import Epoch

OUT = RESULTS / "published.json"


@dataclass(frozen=True)
class Variant:
    """A preset and what is changed in it."""

    preset: str
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Sizes:
    """What all variants share: words, and how long they are trained on."""

    train_words: int = 16_000
    validation_words: int = 1_000
    epochs: int = 5
    width: int = 96
    layers: int = 2


VARIANTS = (
    Variant("transformer"),
    Variant("fat"),
    *(
        Variant("fat", (change,))
        for change in (
            ("fc_softmax", "softmax"),
            ("fc_softmax", "tanh"),
            ("fc_keys", "embedded"),
            ("fc_table", "vocabulary"),
            ("fc_scale", False),
            ("hybrid_skips", "layer"),
            ("decoder_attention", "none"),
        )
    ),
    Variant("fat-published"),
    Variant("fat-published", (("fc_softmax", "softmax"),)),
    Variant("fat-published", (("hybrid_threshold", 1.0),)),
    Variant("fast"),
    Variant("fast-published"),
)


def shape_of(sizes: Sizes) -> dict[str, Any]:
    """Return the sizes of every model; words and their phonemes have at most 20 symbols."""
    layers = {"encoder_layers": sizes.layers, "decoder_layers": sizes.layers}
    return {"width": sizes.width, "heads": 4, **layers, "max_source": 32, "max_target": 32}


def written_parts(sizes: Sizes, cache: Path) -> Parts:
    """Return the pairs to train on and to validate with: those of the first words, by hash, of two parts."""
    parts = parts_of(entries_from_text(dictionary_file().read_text(encoding="utf-8")))
    paths = {}
    for name, count in (("train", sizes.train_words), ("validation", sizes.validation_words)):
        paths[name] = cache / f"published-{name}-{count}.tsv"
        lines = [f"{word}\t{phonemes}\n" for word, phonemes in first_words(parts[name], count)]
        paths[name].write_text("".join(lines), encoding="utf-8")
    return read_parts(paths["train"], paths["validation"])


def folder_of(variant: Variant, cache: Path) -> Path:
    """Return where a variant is trained; other code trains it elsewhere."""
    name = "-".join([variant.preset, *(f"{key}={value}" for key, value in variant.changes)])
    return cache / f"published-{code_digest(*MEASURED)}" / name


def trained(variant: Variant, sizes: Sizes, parts: Parts, cache: Path) -> dict[str, Any]:
    """Return the errors of a variant after every epoch, or why its training failed."""
    changes = {**shape_of(sizes), **dict(variant.changes)}
    plan = TrainingPlan(
        preset=f"{variant.preset}-tiny",
        changes=changes if variant.preset == "fast-published" else {"ffn_width": 2 * sizes.width, **changes},
        tokenizer="symbols",
        vocab_size=None,
        settings=TrainSettings(epochs=sizes.epochs, warmup=200, label_smoothing=0.0),
    )
    folder = folder_of(variant, cache)
    training = Training(plan, parts, folder, resume=(folder / STATE).exists())
    result = {"parameters": sum(tensor.numel() for tensor in training.trainer.model.parameters())}
    result["steps"] = training.trainer.n_steps
    failed = None
    try:
        for event in training.events():
            if isinstance(event, Epoch):
                click.echo(f"{folder.name}: epoch {event.number}, {event.score}", err=True)
    except TrainingFailed as error:
        failed = str(error)
    finally:
        training.close()
    epochs = [asdict(epoch.score) for epoch in training.trainer.progress.epochs]
    return {**result, "epochs": epochs, "failed": failed, "skipped": skipped_share(training, parts)}


def skipped_share(training: Training, parts: Parts) -> float | None:
    """Return the share of steps whose input the hybrid pass skips, of known targets; None without one."""
    config: ModelConfig = training.config
    if not config.hybrid:
        return None
    inputs = [
        (token, source)
        for pair in parts.validation.pairs
        for source in [set(training.coder.source_ids(pair.source))]
        for token in training.coder.target_ids(pair.target)
    ]
    kept = config.hybrid_threshold * config.vocab_size
    skipped = sum(token >= kept and token not in source for token, source in inputs)
    return skipped / (len(inputs) + len(parts.validation.pairs))  # and each begins with BOS, which is never skipped


def rows_of(results: dict[Variant, list[Any]], variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a row per variant."""
    return [{"preset": variant.preset, "changes": dict(variant.changes), **results[variant][0]} for variant in variants]


@click.command()
@file_options(OUT)
def main(cache: Path, out: Path) -> None:
    """Train every variant and record its errors on words that it never saw."""
    run, sizes = Recording(cache, out, ("fatdeploy", "torch", "numpy")), Sizes()
    parts = written_parts(sizes, run.cache)
    made_by = {"sizes": asdict(sizes), "pairs": parts.digest}
    results = run.measured(
        dict.fromkeys(VARIANTS, 1), lambda variant: trained(variant, sizes, parts, run.cache), made_by
    )
    pairs = {"train": len(parts.train.pairs), "validation": len(parts.validation.pairs)}
    run.write({"sizes": asdict(sizes), "pairs": pairs, "results": rows_of(results, VARIANTS)})


if __name__ == "__main__":
    main()
