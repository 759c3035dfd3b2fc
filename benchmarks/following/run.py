"""Train a small transformer with each attention to the source, for the same steps, as ``benchmarks.published`` does.

Beside the errors on words that no model saw, it writes those on two such words written as one, which are longer than
what was trained on. An interrupted run continues where it stopped.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.recording import Recording, file_options
from benchmarks.published.run import Sizes, Variant, folder_of, rows_of, trained, written_parts
from fatdeploy.export.reference.checkpoint import TOKENIZER, load_checkpoint
from fatdeploy.export.training.data import DataPart, Parts, ids_of_parts
from fatdeploy.export.training.tokenizers import loaded_tokenizer
from fatdeploy.export.training.validation import Validation
from fatdeploy.pairs import Pair

OUT = RESULTS / "following.json"
SIZES = Sizes(width=64)
ATTENTIONS = ("scaled_dot", "additive", "location", "monotonic")
VARIANTS = tuple(Variant("transformer", (("cross_attention", attention),)) for attention in ATTENTIONS)
# Both words of two that are joined: the models read at most 32 symbols.
LONGEST_WORD = 15


def joined_pairs(part: DataPart) -> DataPart:
    """Return pairs of two words each, written as one word."""
    short = [pair for pair in part.pairs if max(len(pair.source), len(pair.target.split())) <= LONGEST_WORD]
    joined = [
        Pair(first.source + second.source, f"{first.target} {second.target}")
        for first, second in zip(short[::2], short[1::2], strict=False)
    ]
    return DataPart(part.path, joined, range(1, len(joined) + 1))


def joined_score(folder: Path, parts: Parts) -> dict[str, Any]:
    """Return what the kept weights of a training score on joined words."""
    model, coder = load_checkpoint(folder), loaded_tokenizer(folder / TOKENIZER)
    joined = joined_pairs(parts.validation)
    _, ids = ids_of_parts(replace(parts, validation=joined), coder, model.config)
    return asdict(Validation(joined.pairs, ids, coder)(model))


def measured(variant: Variant, sizes: Sizes, parts: Parts, cache: Path) -> dict[str, Any]:
    """Return the errors of a variant after every epoch, and those of its best weights on joined words."""
    result = trained(variant, sizes, parts, cache)
    return {**result, "joined": None if result["failed"] else joined_score(folder_of(variant, cache), parts)}


def result_of(results: dict[Variant, Sequence[Any]], parts: Parts) -> dict[str, Any]:
    """Return what is written."""
    pairs = {"train": len(parts.train.pairs), "validation": len(parts.validation.pairs)}
    return {"sizes": asdict(SIZES), "pairs": pairs, "results": rows_of(dict(results), VARIANTS)}


@click.command()
@file_options(OUT)
def main(cache: Path, out: Path) -> None:
    """Train every attention and record its errors on words that it never saw."""
    run = Recording(cache, out, ("fatdeploy", "torch", "numpy"))
    parts = written_parts(SIZES, run.cache)
    made_by = {"sizes": asdict(SIZES), "pairs": parts.digest}
    results = run.measured(
        dict.fromkeys(VARIANTS, 1), lambda variant: measured(variant, SIZES, parts, run.cache), made_by
    )
    run.write(result_of(results, parts))


if __name__ == "__main__":
    main()
