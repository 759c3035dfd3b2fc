"""Checkpoints: they load as saved, damage is one clear error, and nothing is ever unpickled."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fatdeploy.errors import CheckpointError, ConfigError
from fatdeploy.export.reference.checkpoint import load_checkpoint, save_checkpoint, stored_tensors
from fatdeploy.export.reference.model import ReferenceModel
from tests.support.choices import CHOICES, drawn_batch, name_of, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tiny({}, base="fat"), tmp_path / "model")
    return tmp_path / "model"


def changed(folder: Path, change: dict) -> None:
    """Rewrite the weights with some tensors replaced (None: removed)."""
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("changes", [*CHOICES, {"decoding": "parallel", "decoder_attention": "full"}], ids=name_of)
@torch.inference_mode()
def test_a_saved_model_loads_with_the_same_numbers(changes: dict, tmp_path: Path) -> None:
    model = tiny(changes)
    save_checkpoint(model, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert loaded.config == model.config
    source, mask, target = drawn_batch(model.config, [5, 3], 4)
    assert torch.equal(loaded(source, mask, target), model(source, mask, target))


def test_a_checkpoint_has_three_files_and_tied_weights_once(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text("{}")
    model = tiny({})
    save_checkpoint(model, tmp_path / "model", tokenizer=tmp_path / "words.json")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert [name for name in names if "embedding" in name or "output" in name] == ["source_embedding.weight"]
    assert names == stored_tensors(model).keys()


def test_weights_stored_in_half_precision_are_read_as_float32(folder: Path) -> None:
    halves = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(halves, folder / "model.safetensors")
    assert {parameter.dtype for parameter in load_checkpoint(folder).parameters()} == {torch.float32}


def test_missing_extra_misshaped_and_wrong_tensors_are_listed_together(folder: Path) -> None:
    change = {
        "decoder.norm.bias": None,
        "surplus": torch.zeros(2),
        "decoder.norm.weight": torch.zeros(3),
        "keep": torch.zeros(64),
        "encoder.norm.bias": torch.full((32,), torch.nan),
    }
    changed(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    for reason in (
        "missing decoder.norm.bias [32]",
        "extra surplus [2]",
        "decoder.norm.weight has shape [3], expected [32]",
        "keep is torch.float32, expected torch.bool",
        "encoder.norm.bias contains NaN or infinity",
    ):
        assert reason in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_a_number_is_refused(folder: Path, value: float) -> None:
    changed(folder, {"decoder.norm.bias": torch.full((32,), value)})
    with pytest.raises(CheckpointError, match=r"decoder\.norm\.bias contains NaN or infinity"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
        load_checkpoint(folder)


def test_a_missing_folder_is_an_error_that_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a checkpoint is a folder with config\.json and model\.safetensors"):
        load_checkpoint(tmp_path / "nowhere")


def test_a_configuration_that_is_refused_is_named_with_its_file(folder: Path) -> None:
    (folder / "config.json").write_text('{"width": 3}')
    with pytest.raises(CheckpointError, match=r"config\.json: configuration refused: .*heads: missing"):
        load_checkpoint(folder)


def test_a_pickle_in_place_of_weights_is_refused_and_not_run(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(folder / "sprung"),)

    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="is the file complete"):
        load_checkpoint(folder)
    assert not (folder / "sprung").exists()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_or_altered_file_is_an_error_or_finite_weights_and_never_a_crash(
    folder: Path, data: st.DataObject
) -> None:
    path = folder / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        place = data.draw(st.integers(0, min(len(whole), 4000) - 1))
        damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    path.write_bytes(damaged)
    try:
        loaded = load_checkpoint(folder)
    except CheckpointError:
        pass
    else:
        # A file with a flipped bit may be legal, a model of other finite numbers; a shorter file never is.
        assert len(damaged) == len(whole) or path.name == "config.json"
        assert all(parameter.isfinite().all() for parameter in loaded.parameters())
    finally:
        path.write_bytes(whole)


def test_an_existing_folder_is_replaced_only_with_force(folder: Path) -> None:
    before = load_checkpoint(folder).state_dict()
    with pytest.raises(ConfigError, match=r"exists; choose another folder or pass --force"):
        save_checkpoint(tiny({}), folder)
    assert torch.equal(load_checkpoint(folder).state_dict()["keep"], before["keep"])
    save_checkpoint(tiny({}), folder, force=True)
    assert load_checkpoint(folder).config.hybrid is False
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


KILLED = """
import os, signal, sys
from fatdeploy.export.reference import checkpoint
from fatdeploy.export.reference.weights import model_from_preset
model = model_from_preset("transformer-tiny")
def killed(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "weights":
    checkpoint.save_file = killed
else:
    import fatdeploy.folders
    fatdeploy.folders._exchange = killed
checkpoint.save_checkpoint(model, sys.argv[1], force=True)
"""


@pytest.mark.parametrize("moment", ["weights", "exchange"])
def test_a_save_that_is_killed_leaves_the_old_checkpoint(folder: Path, moment: str) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(folder), moment], check=False)
    assert run.returncode == -9
    assert load_checkpoint(folder).config.hybrid is True


def test_others_may_read_all_files_of_a_checkpoint(folder: Path) -> None:
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_a_model_on_its_own_saves_what_a_strict_load_accepts(tmp_path: Path) -> None:
    untrained = ReferenceModel(tiny({}).config)
    save_checkpoint(untrained, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert not loaded.training
