"""Sources for calibrating and judging a quantization: reading a file, and reporting every line that is not a source."""

import re
from pathlib import Path

import numpy as np
import pytest

from fatdeploy.errors import DataError
from fatdeploy.export.quantize.examples import Example, examples_from_file, random_examples
from fatdeploy.export.training.tokenizers import built_tokenizer
from fatdeploy.pairs import read_sources
from fatdeploy.runtimes.text.tokenizer import Tokenizer, tokenizer_from_file
from fatdeploy.spec import ModelSpec
from tests.support.engines.scripted import SPEC

LETTERS = ModelSpec(vocab_size=12, width=1, max_source=6, max_target=6, pad_id=0, bos_id=1, eos_id=2)


def file_of(folder: Path, data: bytes) -> Path:
    path = folder / "some.txt"
    path.write_bytes(data)
    return path


def plain(examples: list[Example]) -> list[tuple[list[int], tuple[str, ...]]]:
    assert {example.source.dtype for example in examples} == {np.dtype(np.int64)}
    return [(example.source.tolist(), example.references) for example in examples]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Return a tokenizer of the letters a, b and c."""
    built_tokenizer([("aaa", "aaa"), ("bb", "bb"), ("c", "c")], "characters").save(tmp_path / "tokenizer.json")
    return tokenizer_from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\nb", [("a", None), ("b", None)]),
        (b"a\tx\nb\n", [("a", "x"), ("b", None)]),
        (b"\xef\xbb\xbfa b\r\nnone\t none \r\n", [("a b", None), ("none", " none ")]),
        (b"a\na\n", [("a", None), ("a", None)]),
    ],
)
def test_a_line_is_a_source_with_or_without_a_target(
    tmp_path: Path, data: bytes, expected: list[tuple[str, str | None]]
) -> None:
    assert read_sources(file_of(tmp_path, data)) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "has an empty source at line 2"),
        (b" ", "has an empty source at line 2"),
        (b"\t", "is blank at line 2"),
        (b"\tx", "has an empty source at line 2"),
        (b"a\t", "has an empty target at line 2"),
        (b"a\tx\ty", "has 2 TABs at line 2"),
        ("é".encode("latin-1"), r"is not UTF-8 at line 2 \(byte 0xe9\)"),
        (b"a\0b\0", r"is not UTF-8 at line 2 \(byte 0x00, as in UTF-16\)"),
    ],
)
def test_a_line_that_is_not_a_source_is_named_by_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    expected = rf"some\.txt: 1 of 3 lines cannot be used: {reason}; a line is a source, or a source, one TAB and a "
    with pytest.raises(DataError, match=expected):
        read_sources(file_of(tmp_path, b"a\n" + line + b"\nc\td\n"))


def test_a_missing_file_an_empty_file_and_a_folder_are_reported_with_what_is_expected(tmp_path: Path) -> None:
    expected = "expected a file of sources: a line is a source, or a source, one TAB and a target, in UTF-8"
    with pytest.raises(DataError, match=rf"some\.txt is empty, {expected}"):
        examples_from_file(file_of(tmp_path, b""), SPEC, None)
    with pytest.raises(DataError, match=rf"none\.txt does not exist, {expected}"):
        examples_from_file(tmp_path / "none.txt", SPEC, None)
    with pytest.raises(DataError, match=rf"{re.escape(tmp_path.name)} is a folder, {expected}"):
        examples_from_file(tmp_path, SPEC, None)


def test_another_encoding_is_reported_at_every_line(tmp_path: Path) -> None:
    path = file_of(tmp_path, "ab\nc\n".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"3 of 3 lines cannot be used: is not UTF-8 at line 1 \(byte 0x00, as in UTF-"):
        examples_from_file(path, SPEC, None)


def test_without_a_tokenizer_a_line_is_ids(tmp_path: Path) -> None:
    examples = examples_from_file(file_of(tmp_path, b"3 4 5\n9\n 7  3 \t4 4\n"), SPEC, None)
    assert plain(examples) == [([3, 4, 5], ()), ([9], ()), ([7, 3], ("4 4",))]


def test_with_a_tokenizer_a_line_is_text_and_what_closes_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    examples = examples_from_file(file_of(tmp_path, b"cab\tx y\naa\n"), LETTERS, tokenizer)
    assert plain(examples) == [
        (tokenizer.encoded("cab").ids.tolist(), ("x y",)),
        (tokenizer.encoded("aa").ids.tolist(), ()),
    ]
    assert examples[0].source.tolist()[:2] != examples[1].source.tolist()[:2]


def test_a_source_appears_once_with_all_its_targets(tmp_path: Path, tokenizer: Tokenizer) -> None:
    examples = examples_from_file(file_of(tmp_path, b"a\tx\nb\na\ty\na\tx\nb\tz\n"), LETTERS, tokenizer)
    assert [example.references for example in examples] == [("x", "y"), ("z",)]


def test_all_lines_that_the_model_cannot_read_are_reported_at_once(tmp_path: Path) -> None:
    lines = [b"3", b"3 x", b"3 10", b"-1", b"3 3 3 3 3", b"4\tx", b"99999999999999999999", b"1e3", b"10 3\ty"]
    path = file_of(tmp_path, b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        examples_from_file(path, SPEC, None)
    no_ids = "is not a row of token ids separated by blanks, and the model has no tokenizer"
    assert str(caught.value) == (
        f"{path}: 7 of 9 lines cannot be used: source {no_ids} at line 2; source ids must lie in 0…9, found 10 at "
        "line 3; source ids must lie in 0…9, found -1 at line 4; source has 5 tokens, more than max_source = 4 at "
        "line 5; source ids must be integers, found object at line 7; "
        f"source {no_ids} at line 8; source ids must lie in 0…9, found 10 at line 9; the model must be able to read "
        "every source: fix or remove them"
    )


def test_a_text_that_is_too_long_is_reported_and_not_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    n_tokens = len(tokenizer.encoded("abcabcabc").ids)
    with pytest.raises(
        DataError, match=rf"source has {n_tokens} tokens, more than max_source = 6 at line 2; the model"
    ):
        examples_from_file(file_of(tmp_path, b"abc\nabcabcabc\n"), LETTERS, tokenizer)


def test_random_examples_are_seeded_short_and_ordinary() -> None:
    spec = ModelSpec(vocab_size=9, width=1, max_source=100, max_target=6, pad_id=4, bos_id=0, eos_id=8)
    examples, again, other = (random_examples(spec, seed) for seed in (3, 3, 4))
    assert plain(examples) == plain(again) != plain(other)
    assert len(examples) == 32
    assert {len(example.source) for example in examples} <= set(range(1, 33))
    assert len({len(example.source) for example in examples}) > 10
    assert set(np.concatenate([example.source for example in examples]).tolist()) == {1, 2, 3, 5, 6, 7}
    assert not any(example.references for example in examples)
    assert max(len(example.source) for example in random_examples(SPEC, 0)) == SPEC.max_source == 4
