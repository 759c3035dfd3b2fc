"""Pairs before they reach a training: parts of files, tokens, and batches in a seeded order."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fatdeploy.errors import DataError
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.training.batches import NOTHING, POOL, Batch, IdPair, batch_of, epoch_order
from fatdeploy.export.training.data import KEPT_APART, Parts, ids_of_parts, read_parts
from fatdeploy.export.training.tokenizers import TextCoder, built_tokenizer
from fatdeploy.pairs import Pair
from tests.support.trainings import part_of, spelled

PAIRS = [IdPair([15, 16, 17], [18, 19]), IdPair([14], [11])]


def shown(batch: Batch) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in vars(batch).items()}


def nat(length: str) -> ModelConfig:
    return config_from_preset("transformer-nat-tiny", length=length, max_target=4)


def test_an_autoregressive_batch_reads_bos_and_ends_with_eos() -> None:
    batch = batch_of(PAIRS, config_from_preset("transformer-tiny"))
    assert shown(batch) == {
        "source": [[15, 16, 17], [14, 0, 0]],
        "source_mask": [[True, True, True], [True, False, False]],
        "target_in": [[1, 18, 19], [1, 11, 0]],
        "target_out": [[18, 19, 2], [11, 2, NOTHING]],
        "lengths": [2, 1],
    }
    assert batch.n_tokens == 5
    assert {tensor.dtype for name, tensor in vars(batch).items() if name != "source_mask"} == {torch.int64}


def test_special_tokens_are_those_of_the_configuration() -> None:
    batch = batch_of(PAIRS, config_from_preset("transformer-tiny", pad_id=5, bos_id=0, eos_id=9))
    assert batch.source.tolist() == [[15, 16, 17], [14, 5, 5]]
    assert batch.target_in.tolist() == [[0, 18, 19], [0, 11, 5]]
    assert batch.target_out.tolist() == [[18, 19, 9], [11, 9, NOTHING]]


def test_targets_from_right_to_left_are_reversed_and_sources_are_not() -> None:
    batch = batch_of(PAIRS, config_from_preset("transformer-tiny", target_order="right_to_left"))
    assert batch.source.tolist() == [[15, 16, 17], [14, 0, 0]]
    assert batch.target_in.tolist() == [[1, 19, 18], [1, 11, 0]]
    assert batch.target_out.tolist() == [[19, 18, 2], [11, 2, NOTHING]]


def test_a_parallel_batch_with_a_length_head_reads_bos_up_to_each_length() -> None:
    batch = batch_of(PAIRS, nat("head"))
    assert batch.target_in.tolist() == [[1, 1], [1, 0]]
    assert batch.target_out.tolist() == [[18, 19], [11, NOTHING]]
    assert batch.lengths.tolist() == [2, 1]


def test_a_parallel_batch_without_a_length_head_reads_bos_everywhere_and_ends_with_eos() -> None:
    batch = batch_of(PAIRS, nat("eos"))
    assert batch.target_in.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.target_out.tolist() == [[18, 19, 2, NOTHING], [11, 2, NOTHING, NOTHING]]


def drawn(count: int) -> list[IdPair]:
    draw = random.Random(0)
    return [IdPair([9] * draw.randint(1, 30), [9] * draw.randint(1, 30)) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 8 * POOL + 3])
def test_every_pair_is_in_one_batch_of_an_epoch(count: int) -> None:
    order = epoch_order(drawn(count), 8, seed=0, epoch=0)
    assert sorted(index for batch in order for index in batch) == list(range(count))
    assert len(order) == sum(-(-min(8 * POOL, count - start) // 8) for start in range(0, count, 8 * POOL))
    assert max(map(len, order)) <= 8


def test_a_batch_holds_pairs_of_like_length() -> None:
    pairs = drawn(8 * POOL)
    lengths = [
        [(len(pairs[index].source), len(pairs[index].target)) for index in batch]
        for batch in epoch_order(pairs, 8, 0, 0)
    ]
    by_length = sorted(lengths, key=min)
    assert all(max(short) <= min(long) for short, long in pairwise(by_length))
    assert lengths != by_length


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    pairs = drawn(200)
    torch.manual_seed(1)
    first = epoch_order(pairs, 8, seed=3, epoch=5)
    torch.manual_seed(2)
    assert epoch_order(pairs, 8, seed=3, epoch=5) == first
    others = [epoch_order(pairs, 8, seed=3, epoch=6), epoch_order(pairs, 8, seed=4, epoch=5)]
    assert all(other != first for other in others)
    # Batches differ, not only their order.
    assert all({frozenset(batch) for batch in other} != {frozenset(batch) for batch in first} for other in others)


def file_of(path: Path, pairs: list[Pair]) -> Path:
    path.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in pairs))
    return path


def sources_of(pairs: Any) -> set[str]:
    return {pair.source for pair in pairs}


def test_about_one_source_in_fifty_is_kept_apart_with_all_its_variants(tmp_path: Path) -> None:
    pairs = [Pair(pair.source, target) for pair in spelled(1000) for target in (pair.target, "other")]
    parts = read_parts(file_of(tmp_path / "pairs.tsv", pairs), None)
    apart = sources_of(parts.validation.pairs)
    assert 10 <= len(apart) <= 35  # 20 on average
    assert not apart & sources_of(parts.train.pairs)
    assert len(parts.validation.pairs) == 2 * len(apart)
    for part in (parts.train, parts.validation):
        assert [pairs[line - 1] for line in part.lines] == list(part.pairs)
    assert len(parts.train.pairs) + len(parts.validation.pairs) == len(pairs)


def test_a_longer_file_keeps_apart_what_a_shorter_one_kept_apart(tmp_path: Path) -> None:
    pairs = spelled(4000)
    short, long = (read_parts(file_of(tmp_path / "pairs.tsv", some), None) for some in (pairs[3000:], pairs))
    kept = sources_of(short.validation.pairs)
    assert len(kept) > 5
    assert sources_of(long.validation.pairs) & sources_of(pairs[3000:]) == kept
    assert len(sources_of(long.validation.pairs)) > len(kept)


@pytest.mark.parametrize("words", [["a", "b"], [f"w{number}" for number in range(KEPT_APART // 2)]])
def test_one_of_few_sources_is_kept_apart(tmp_path: Path, words: list[str]) -> None:
    parts = read_parts(file_of(tmp_path / "pairs.tsv", [Pair(word, "x") for word in words]), None)
    assert len(parts.validation.pairs) == 1
    assert len(parts.train.pairs) == len(words) - 1


def test_a_single_source_cannot_be_trained_on_and_validated_with(tmp_path: Path) -> None:
    path = file_of(tmp_path / "pairs.tsv", [Pair("a", "x"), Pair("a", "y")])
    with pytest.raises(DataError, match=r"has only one source, and one must be kept apart .* or pass --validation"):
        read_parts(path, None)
    apart = read_parts(path, file_of(tmp_path / "apart.tsv", [Pair("b", "x")])).validation
    assert (apart.pairs, list(apart.lines)) == ([Pair("b", "x")], [1])


def test_a_validation_file_that_shares_sources_is_refused(tmp_path: Path) -> None:
    train = file_of(tmp_path / "train.tsv", spelled(50))
    apart = file_of(tmp_path / "apart.tsv", [*spelled(50)[:7], Pair("unseen", "x")])
    first = ", ".join(repr(source) for source in sorted(sources_of(spelled(50)[:7]))[:5])
    with pytest.raises(DataError, match=rf"apart.tsv: 7 of its sources are in .*train.tsv too.*: {first}; remove them"):
        read_parts(train, apart)


def test_the_digest_is_of_all_pairs_in_their_order_and_of_their_part() -> None:
    first, second = part_of([Pair("a", "x")], "one"), part_of([Pair("b", "y")], "two")
    both = part_of([*first.pairs, *second.pairs], "both")
    nothing = part_of([], "nothing")
    digests = {
        parts.digest
        for parts in (Parts(first, second), Parts(second, first), Parts(both, nothing), Parts(nothing, both))
    }
    assert len(digests) == 4
    assert Parts(part_of(list(first.pairs), "moved"), second).digest == Parts(first, second).digest


def coder_of(parts: Parts) -> TextCoder:
    return built_tokenizer([(pair.source, pair.target) for pair in parts.train.pairs], "characters")


def test_pairs_become_tokens_of_both_parts() -> None:
    parts = Parts(part_of([Pair("ab", "aab")], "train.tsv"), part_of([Pair("b?", "ba")], "apart.tsv"))
    coder = coder_of(parts)
    a, b = coder.target_ids("ab")
    train, apart = ids_of_parts(parts, coder, config_from_preset("transformer-tiny"))
    assert [(list(pair.source), list(pair.target)) for pair in train] == [([a, b], [a, a, b])]
    assert [(list(pair.source), list(pair.target)) for pair in apart] == [([b, coder.unk_id], [b, a])]


@pytest.mark.parametrize(
    ("preset", "changes", "most"),
    [
        ("transformer-tiny", {}, 3),
        ("transformer-nat-tiny", {"length": "eos"}, 3),
        ("transformer-nat-tiny", {"length": "head"}, 4),
    ],
)
def test_the_longest_target_that_fits_makes_a_batch(preset: str, changes: dict[str, str], most: int) -> None:
    config = config_from_preset(preset, max_source=5, max_target=4, **changes)
    parts = Parts(part_of([Pair("a" * 5, "b" * most)], "train.tsv"), part_of([], "apart.tsv"))
    train, _ = ids_of_parts(parts, coder_of(parts), config)
    assert batch_of(train, config).target_in.shape == (1, 4)
    longer = Parts(part_of([Pair("a", "b" * (most + 1))], "train.tsv"), part_of([], "apart.tsv"))
    with pytest.raises(DataError, match=rf"target has {most + 1} tokens at line 1; .* and a target {most} \("):
        ids_of_parts(longer, coder_of(longer), config)


def test_lines_that_are_too_long_are_reported_with_their_line_numbers(tmp_path: Path) -> None:
    lines = [f"{word}\tx" for word in map(str, range(10, 99))]
    lines[70] = "aaaa\tx"
    lines[3] = f"{'a' * 9}\t{'b' * 8}"
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines))
    # The source of the last line is kept apart.
    parts = read_parts(path, None)
    apart = parts.validation.lines[0]
    lines[apart - 1] = f"{parts.validation.pairs[0].source}\t{'c' * 7}"
    path.write_text("\n".join(lines))
    parts = read_parts(path, None)
    expected = {
        4: "source has 9 tokens and target has 8 tokens",
        71: "source has 4 tokens",
        apart: "target has 7 tokens",
    }
    with pytest.raises(DataError) as caught:
        ids_of_parts(parts, coder_of(parts), config_from_preset("transformer-tiny", max_source=3, max_target=7))
    reasons = "; ".join(f"{reason} at line {line}" for line, reason in sorted(expected.items()))
    assert str(caught.value) == (
        f"{path}: 3 of 89 lines cannot be used: {reasons}; a source may have 3 tokens and a target 6 (change "
        "the limits with --set max_source=N --set max_target=N): fix or remove them"
    )


def test_long_lines_of_both_files_are_reported_at_once() -> None:
    parts = Parts(part_of([Pair("a", "b"), Pair("aaa", "b")], "train.tsv"), part_of([Pair("aaaa", "b")], "apart.tsv"))
    with pytest.raises(
        DataError, match=r"^train.tsv: 1 of 2 lines .*3 tokens at line 2; .*apart.tsv: 1 of 1 lines .*4 "
    ):
        ids_of_parts(parts, coder_of(parts), config_from_preset("transformer-tiny", max_source=2, max_target=7))
