"""Files of pairs: what is read, and how every unreadable line is reported."""

from pathlib import Path

import pytest

from fatdeploy.errors import DataError
from fatdeploy.pairs import Pair, read_pairs


def file_of(folder: Path, data: bytes) -> Path:
    path = folder / "pairs.tsv"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "pairs"),
    [
        (b"a\tb\n", [("a", "b")]),
        (b"a\tb", [("a", "b")]),
        (b"a\tb\r\nc\td\r\n", [("a", "b"), ("c", "d")]),
        (b"\xef\xbb\xbfa\tb\n", [("a", "b")]),
        (b"a\tb\na\tc\na\tb\n", [("a", "b"), ("a", "c"), ("a", "b")]),
        ("Zürich 1\tˈtsyːrɪç\n".encode(), [("Zürich 1", "ˈtsyːrɪç")]),
        (b" a \t b ", [(" a ", " b ")]),
        ("a\u2028b\x0cc\td\n".encode(), [("a\u2028b\x0cc", "d")]),
    ],
)
def test_a_line_is_a_pair_whatever_ends_it(tmp_path: Path, data: bytes, pairs: list[tuple[str, str]]) -> None:
    assert read_pairs(file_of(tmp_path, data)) == [Pair(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "is blank at line 2"),
        (b" \t ", "is blank at line 2"),
        (b"\r", "is blank at line 2"),
        (b"a", "has no TAB at line 2"),
        (b"a\tb\tc", "has 2 TABs at line 2"),
        (b"a\tb\t", "has 2 TABs at line 2"),
        (b"\tb", "has an empty source at line 2"),
        (b"a\t  ", "has an empty target at line 2"),
        ("é\tb".encode("latin-1"), r"is not UTF-8 at line 2 \(byte 0xe9\)"),
        (b"a\0\tb", r"is not UTF-8 at line 2 \(byte 0x00, as in UTF-16\)"),
        (b"\xef\xbb\xbf", r"has no TAB at line 2"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = file_of(tmp_path, b"a\tb\n" + line + b"\nc\td\n")
    with pytest.raises(DataError, match=rf"pairs.tsv: 1 of 3 lines cannot be used: {reason}; a line is a source, one "):
        read_pairs(path)


def test_all_bad_lines_are_reported_at_once(tmp_path: Path) -> None:
    path = file_of(tmp_path, b"one\na\tb\n\tc\nd\t\n\xff\te\n")
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    assert str(caught.value) == (
        f"{path}: 4 of 5 lines cannot be used: has no TAB at line 1; has an empty source at line 3; has an empty "
        "target at line 4; is not UTF-8 at line 5 (byte 0xff); a line is a source, one TAB and a target, in UTF-8: "
        "fix or remove them"
    )


@pytest.mark.parametrize(("bad", "ending"), [(20, "at line 20; a line is"), (21, "at line 20; and 1 more; a line is")])
def test_twenty_bad_lines_are_named_and_the_others_counted(tmp_path: Path, bad: int, ending: str) -> None:
    with pytest.raises(DataError, match=f"^.*: {bad} of {bad} lines cannot be used: .*{ending}"):
        read_pairs(file_of(tmp_path, b"x\n" * bad))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_refused_at_its_first_line(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DataError, match="cannot be used: is not UTF-8 at line 1 "):
        read_pairs(file_of(tmp_path, "a\tb\nc\td\n".encode(encoding)))


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DataError, match=r"pairs.tsv is empty, expected a file of pairs: a line is a source, one TAB"):
        read_pairs(file_of(tmp_path, data))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.tsv does not exist, expected a file of pairs"):
        read_pairs(tmp_path / "none.tsv")
    with pytest.raises(DataError, match=r" is a folder, expected a file of pairs"):
        read_pairs(tmp_path)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*pairs.tsv/inside: Not a directory"):
        read_pairs(file_of(tmp_path, b"a\tb\n") / "inside")
