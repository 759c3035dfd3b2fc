"""``fatdeploy export --shortlist-from``: the bundle comes with its shortlist."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fatdeploy.bundle import read_bundle
from fatdeploy.cli import main
from fatdeploy.manifest import SHORTLIST


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("cat\nhouse\nwindow\ntable\n")
    return path


def test_a_bundle_is_exported_with_its_shortlist(tmp_path: Path, words: Path) -> None:
    result = CliRunner().invoke(main, ["export", "g2p", "--out", str(tmp_path / "g2p"), "--shortlist-from", str(words)])
    assert result.exit_code == 0, result.output
    manifest = read_bundle(tmp_path / "g2p").manifest
    assert manifest.shortlist is not None
    assert (manifest.shortlist.lines, SHORTLIST in manifest.files) == (3, True)
    assert f"shortlist of {manifest.shortlist.line()}" in result.stdout
    assert "building the shortlist from 4 lines" in result.stderr


def test_a_file_that_cannot_be_read_is_refused_before_anything_is_traced(tmp_path: Path) -> None:
    arguments = ["export", "g2p", "--out", str(tmp_path / "g2p"), "--shortlist-from", str(tmp_path / "nowhere")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "nowhere does not exist, expected a file of sources" in result.stderr
    assert "tracing" not in result.stderr
    assert not (tmp_path / "g2p").exists()
