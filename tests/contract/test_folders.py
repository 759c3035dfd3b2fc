"""Folders that are replaced as a whole."""

import logging
import os
import time
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


def test_what_a_killed_process_left_is_removed_after_a_day_and_named_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".a.old1", ".a.young", ".ab.other", "a.mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    yesterday = time.time() - folders.LEFT_SECONDS - 1
    for name in (".a.old1", ".ab.other", "a.mine"):
        os.utime(tmp_path / name, (yesterday, yesterday))
    with caplog.at_level(logging.WARNING, "fatdeploy"):
        written(tmp_path / "a", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.young", ".ab.other", "a", "a.mine"]
    assert caplog.messages == [
        f"{tmp_path}/.a.young belongs to a process that writes {tmp_path}/a too, or was interrupted"
    ]


def written_at_once(folder: Path, *, force: bool) -> None:
    """Write a folder, and let another process finish the same folder first."""
    with replaced_folder(folder, force=force) as new:
        (new / "file").write_text("second")
        written(folder, "first")


def test_a_folder_that_another_process_wrote_meanwhile_is_replaced_only_by_force(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was written by another process meanwhile; pass --force"):
        written_at_once(tmp_path / "a", force=False)
    assert (tmp_path / "a" / "file").read_text() == "first"
    written_at_once(tmp_path / "b", force=True)
    assert (tmp_path / "b" / "file").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
