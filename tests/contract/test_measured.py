"""Measurements are kept per machine and key, and a broken cache only costs another measurement."""

from pathlib import Path

import pytest

from fatdeploy import measured
from fatdeploy.measured import cache_folder, kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FATDEPLOY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_value_is_measured_once_per_key(cache: Path) -> None:
    calls: list[str] = []

    def value(key: str) -> list[float]:
        return kept("times", key, lambda: calls.append(key) or [len(calls) / 2])

    assert [value("a"), value("b"), value("a"), value("b")] == [[0.5], [1.0], [0.5], [1.0]]
    assert calls == ["a", "b"]
    assert kept("other", "a", lambda: 7) == 7


def test_another_machine_measures_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept("times", "a", lambda: 1) == 1
    monkeypatch.setattr(measured, "machine_key", lambda: "another")
    assert kept("times", "a", lambda: 2) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": "b", "value": 3}', '{"key": "a"}'])
def test_a_damaged_file_is_measured_again(cache: Path, damage: str) -> None:
    kept("times", "a", lambda: 1)
    [file] = cache.glob("times/*.json")
    file.write_text(damage)
    assert kept("times", "a", lambda: 2) == 2
    assert kept("times", "a", lambda: 3) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FATDEPLOY_CACHE", str(tmp_path / "file"))
    assert kept("times", "a", lambda: 1) == 1
    assert kept("times", "a", lambda: 2) == 2


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FATDEPLOY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fatdeploy"
    monkeypatch.setenv("FATDEPLOY_CACHE", "")
    assert cache_folder() is None
    assert [kept("times", "a", lambda: 1), kept("times", "a", lambda: 2)] == [1, 2]
