"""The benchmark of the published choices: what it trains, and the table that the docs show."""

from pathlib import Path

import pytest

from benchmarks.published.run import VARIANTS, Sizes, Variant, rows_of, shape_of, trained
from benchmarks.readme.published_table import published_table
from fatdeploy.errors import TrainingFailed
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.training.data import Parts, read_parts
from fatdeploy.export.training.trainer import Trainer

SIZES = Sizes(epochs=2, width=16, layers=1)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    for name, words in (("train", ["ab", "ba", "abc", "cab", "bb"]), ("validation", ["ca", "bc"])):
        lines = [f"{word}\t{' '.join(word.upper())} {word[0]}\n" for word in words]
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
    return read_parts(tmp_path / "train.tsv", tmp_path / "validation.tsv")


def test_variants_are_legal_and_each_differs_from_all_others() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS)
    shape = shape_of(Sizes())
    for variant in VARIANTS:
        config = config_from_preset(f"{variant.preset}-tiny", **shape, **dict(variant.changes))
        assert {name: getattr(config, name) for name, _ in variant.changes} == dict(variant.changes)


def test_a_variant_is_trained_judged_and_shown(tmp_path: Path, parts: Parts) -> None:
    variants = [Variant("transformer"), Variant("fat-published", (("fc_softmax", "softmax"),))]
    results = {variant: [trained(variant, SIZES, parts, tmp_path)] for variant in variants}
    assert [results[variant][0]["steps"] for variant in variants] == [2, 2]
    # Of 'C A c' and 'B C b' only the letters are words of their sources, and only frequent tokens are kept.
    assert results[variants[0]][0]["skipped"] is None
    assert 0 < results[variants[1]][0]["skipped"] < 1
    rows = rows_of(results, variants)
    machine = {"cpu": "a CPU", "cores": 1, "memory_bytes": 1e9}
    facts = {"machine": machine, "versions": {"torch": "2"}, "date": "2026-01-01"}
    table = published_table({**facts, "sizes": vars(SIZES), "pairs": {"train": 5, "validation": 2}, "results": rows})
    lines = table.splitlines()
    last = rows[1]["epochs"][-1]
    assert lines[3].startswith(f"| `fat-published` | `fc_softmax=softmax` | {last['loss']:.3f} | ")
    assert lines[-1].startswith("Each was trained once, with one seed, for 2 steps (2 epochs) on 5 pairs")


def test_a_training_that_fails_is_shown_as_failed(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Trainer) -> None:
        raise TrainingFailed("the loss is nan")

    monkeypatch.setattr(Trainer, "events", failing)
    variant = Variant("fat")
    result = trained(variant, SIZES, parts, tmp_path)
    assert result["failed"] == "the loss is nan"
    machine = {"cpu": "a CPU", "cores": 1, "memory_bytes": 1e9}
    facts = {"machine": machine, "versions": {"torch": "2"}, "date": "2026-01-01"}
    rows = rows_of({variant: [result]}, [variant])
    table = published_table({**facts, "sizes": vars(SIZES), "pairs": {"train": 5, "validation": 2}, "results": rows})
    assert "| `fat` | – | failed: the loss is nan | – | – |" in table
