"""Model names that are also names of folders."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn

from fatdeploy.cli import main
from fatdeploy.errors import ConfigError
from fatdeploy.export.models.loading import bundled_model, model_from_source, typed_folder
from fatdeploy.export.pipeline import weights_hash
from fatdeploy.export.reference.checkpoint import save_checkpoint
from tests.support.choices import tiny


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return a model saved in the current folder under the names of fatdeploy's own models."""
    model = tiny({}, base="fat")
    monkeypatch.chdir(tmp_path)
    for name in ("g2p", "fat-small"):
        save_checkpoint(model, tmp_path / name)
    return model


@pytest.mark.parametrize(("name", "kind"), [("g2p", "the bundled model"), ("fat-small", "a preset")])
def test_a_name_that_is_also_a_checkpoint_folder_is_refused_and_a_path_means_the_folder(
    own: nn.Module, name: str, kind: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is both {kind} and a checkpoint folder here: type \./{name} for"):
        model_from_source(name)
    loaded, origin = model_from_source(f"./{name}")
    assert weights_hash(loaded) == weights_hash(own)
    assert (origin.name, origin.licence, origin.random) == (name, None, False)


def test_an_export_of_an_ambiguous_name_is_one_line_and_writes_nothing(own: nn.Module) -> None:
    result = CliRunner().invoke(main, ["export", "g2p", "--out", "out"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "type ./g2p for the folder" in result.stderr
    assert not Path("out").exists()


def test_the_bundled_model_loads_without_a_name_whatever_folders_exist(own: nn.Module) -> None:
    assert weights_hash(bundled_model()[0]) != weights_hash(own)


def test_a_folder_without_a_checkpoint_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g2p").mkdir()
    assert model_from_source("g2p")[1].name == "g2p"


@pytest.mark.parametrize(
    ("folder", "typed"), [("g2p", "./g2p"), ("./fat-tiny", "./fat-tiny"), ("my/g2p", "my/g2p"), ("words", "words")]
)
def test_a_folder_is_spelled_so_that_it_is_not_taken_for_a_model(folder: str, typed: str) -> None:
    assert typed_folder(Path(folder)) == typed
