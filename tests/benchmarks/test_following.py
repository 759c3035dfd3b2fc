"""The comparison of attentions to the source: joined words, what is written, and its table."""

from pathlib import Path

from benchmarks.following.run import SIZES, VARIANTS, joined_pairs, measured, result_of
from benchmarks.published.run import Variant, folder_of
from benchmarks.readme.following_table import following_table
from fatdeploy.export.training.data import DataPart, Parts
from fatdeploy.pairs import Pair

WORDS = [Pair(f"{first}{second}", f"{first.upper()} {second.upper()}") for first in "abcdef" for second in "abcdef"]
MONOTONIC = Variant("transformer", (("cross_attention", "monotonic"),))


def part_of(pairs: list[Pair]) -> DataPart:
    return DataPart(Path("words"), pairs, range(1, len(pairs) + 1))


def test_two_words_are_joined_with_their_sounds_unless_one_is_long() -> None:
    words = [Pair("ab", "A B"), Pair("x" * 16, "K"), Pair("c", "K"), Pair("d", "D")]
    assert joined_pairs(part_of(words)).pairs == [Pair("abc", "A B K")]


def test_an_attention_is_trained_and_scored_on_joined_words_too(tmp_path: Path) -> None:
    parts = Parts(part_of(WORDS[6:]), part_of(WORDS[:6]))
    result = measured(MONOTONIC, SIZES, parts, tmp_path)
    assert (result["failed"], result["steps"], len(result["epochs"])) == (None, SIZES.epochs, SIZES.epochs)
    assert result["joined"]["token_error_rate"] > 0
    assert (folder_of(MONOTONIC, tmp_path) / "model.safetensors").exists()


def test_the_table_has_a_row_per_attention() -> None:
    score = {"loss": 0.5, "token_error_rate": 12.34, "sequence_error_rate": 50.0}
    row = {"parameters": 1234, "steps": 10, "epochs": [score], "failed": None, "skipped": None, "joined": score}
    parts = Parts(part_of(WORDS), part_of(WORDS[:6]))
    result = {
        **result_of({variant: [row] for variant in VARIANTS}, parts),
        "date": "2026-11-18",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_bytes": 8e9},
        "versions": {"torch": "2"},
    }
    text = following_table(result)
    for attention in ("scaled_dot", "additive", "location", "monotonic"):
        assert f"| `{attention}` | 0.500 | 12.3 % | 50.0 % | 12.3 % | 1,234 |" in text
    assert "for 10 steps (6 epochs) on 36 pairs" in text
    failed = {**row, "failed": "the loss at step 3 is nan", "joined": None}
    lost = following_table({**result, "results": [{**failed, "changes": {"cross_attention": "location"}}]})
    assert "| `location` | failed: the loss at step 3 is nan | – | – | – | 1,234 |" in lost
