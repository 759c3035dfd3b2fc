"""Folders that are replaced as a whole."""

from pathlib import Path

import pytest

from fatdeploy import folders
from fatdeploy.errors import ConfigError
from fatdeploy.folders import replaced_folder


def written(folder: Path, text: str, *, force: bool = False) -> None:
    with replaced_folder(folder, force=force) as new:
        (new / "file").write_text(text)


def test_a_new_folder_appears_with_the_parents_it_needs(tmp_path: Path) -> None:
    written(tmp_path / "a" / "b", "new")
    assert (tmp_path / "a" / "b" / "file").read_text() == "new"


def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    written(tmp_path / "a", "old")
    with pytest.raises(FileNotFoundError), replaced_folder(tmp_path / "a", force=True) as new:
        (new / "file").rename(tmp_path / "elsewhere")
    assert (tmp_path / "a" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_force_replaces_the_whole_folder(tmp_path: Path) -> None:
    written(tmp_path / "a", "old")
    (tmp_path / "a" / "other").write_text("gone")
    written(tmp_path / "a", "new", force=True)
    assert [(path.name, path.read_text()) for path in (tmp_path / "a").iterdir()] == [("file", "new")]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_two_renames_replace_a_folder_without_an_atomic_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "a", "old")
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_, **__: object())
    written(tmp_path / "a", "new", force=True)
    assert (tmp_path / "a" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    written(tmp_path / "a", "new")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    with pytest.raises(ConfigError, match="is not a folder; move it away first"):
        written(tmp_path / "a", "new", force=True)
    assert (tmp_path / "a").read_text() == "precious"
