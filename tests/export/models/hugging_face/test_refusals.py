"""What `fatdeploy export` says about folders that cannot be imported: exit code 1, one line, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from fatdeploy.cli import main
from tests.support.hugging_face_folders import write_folder

Change = Callable[[Path], object]
N_TOKENS = 38


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two encoder layers, two decoder layers, no ties and 38 tokens."""
    path = tmp_path_factory.mktemp("refusals") / "bart"
    write_folder("bart", 3, path)
    return path


def refusal(source: str, out: Path) -> str:
    """Return the one line with which the command refuses a source."""
    before = sorted(out.parent.iterdir())
    result = CliRunner().invoke(main, ["export", source, "--out", str(out)])
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert sorted(out.parent.iterdir()) == before
    return result.stderr


def written(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def updated(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    return change


def without_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return changed


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def shards(change: Change) -> Change:
    """Store the weights in two shards and change the second."""

    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        listed = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
        for file in set(listed.values()):
            save_file({name: tensors[name] for name in tensors if listed[name] == file}, folder / file)
        index = {"metadata": {}, "weight_map": listed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        change(folder / "model-00002-of-00002.safetensors")

    return changed


class Payload:
    """Code in a pickle: it would leave a file in the current folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": torch.zeros(2), "payload": Payload()}, folder / "pytorch_model.bin")


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def adapter(folder: Path) -> None:
    emptied(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"lora": torch.zeros(2)}, folder / "adapter_model.safetensors")


CASES: dict[str, tuple[Change, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "folder has no config.json: a Hugging Face folder"),
    "empty folder": (emptied, "folder has no config.json: a Hugging Face folder"),
    "adapter alone": (adapter, "has an adapter (adapter_config.json) and no config.json: an adapter alone is not a mo"),
    "config is not JSON": (written("config.json", "{"), "config.json: configuration is not JSON"),
    "config is a list": (written("config.json", "[]"), "config.json: configuration is a JSON list, expected an object"),
    "config is deep": (written("config.json", "[" * 200_000), "config.json: configuration is not JSON"),
    "config is not text": (written("config.json", b"\xff\xfe"), "config.json: 'utf-8' codec can't decode"),
    "no type": (without_type, "config.json: model_type None is not supported, only marian, bart"),
    "type is unknown": (updated("config.json", model_type="whisper"), "model_type 'whisper' is not supported, only"),
    "type is a list": (updated("config.json", model_type=["bart"]), "model_type ['bart'] is not supported, only"),
    "weights are truncated": (lambda folder: truncated(folder / "model.safetensors"), "is the file complete?"),
    "weights are empty": (written("model.safetensors", b""), "model.safetensors: "),
    "shard is truncated": (shards(truncated), "model-00002-of-00002.safetensors: "),
    "shard is missing": (shards(Path.unlink), "cannot be followed: model-00002-of-00002.safetensors is missing"),
    "integers": (
        weights(lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)})),
        "lm_head.weight is I8, expected floating-point numbers",
    ),
    "code in a pickle": (pickled, "pytorch_model.bin is damaged, or has code in it, which was not executed"),
    "shapes": (
        weights(lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 5)})),
        "lm_head.weight has shape [7, 5], config.json expects [38, 24]",
    ),
    "layers": (
        updated("config.json", decoder_layers=4),
        "missing model.decoder.layers.2.*; missing model.decoder.layers.3.*",
    ),
    "NaN": (weights(lambda tensors: tensors["lm_head.weight"].fill_(torch.nan)), "NaN or infinity in lm_head.weight"),
    "settings are not JSON": (written("generation_config.json", "{"), "generation_config.json is not JSON"),
    "EOS": (updated("generation_config.json", eos_token_id=5000), "eos_id: must be below vocab_size = 38, found 5000"),
    "second EOS": (updated("generation_config.json", eos_token_id=[2, 5000]), "must be ids in 0…37, found 5000"),
    "bad words": (updated("generation_config.json", bad_words_ids=[[5000]]), "bad_words must be ids in 0…37, found"),
    "first token": (updated("generation_config.json", forced_bos_token_id=99), "must be ids in 0…37, found 99"),
    "beams": (updated("generation_config.json", num_beams="many"), "num_beams must be a whole number from 1 up"),
    "silence": (
        updated("generation_config.json", suppress_tokens=list(range(N_TOKENS))),
        "generation_config.json refused: no token is left that can be chosen",
    ),
    "tokenizer is not JSON": (written("tokenizer.json", "{"), "tokenizer.json (EOF while parsing an object"),
    "tokenizer has no model": (written("tokenizer.json", '{"version": "1.0"}'), "tokenizer.json (Model missing"),
    "tokenizer is not text": (written("tokenizer.json", b"\xff\xfe"), "tokenizer.json ('utf-8' codec can't decode"),
    "tokenizer's settings": (written("tokenizer_config.json", "[3]"), "tokenizer_config.json: expected an object"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_that_cannot_be_imported_is_refused_in_one_line(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = CASES[name]
    folder = Path(shutil.copytree(whole, tmp_path / "folder"))
    change(folder)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    line = refusal(str(folder), tmp_path / "work" / "out")
    assert reason in line
    assert str(folder) in line or "generation_config.json" in line


@pytest.mark.parametrize("name", ["Helsinki-NLP/opus-mt-zh-en", "t5-small"])
def test_the_name_of_a_download_is_not_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(name, tmp_path / "out")
    assert f"{name} is not a folder here, nor g2p, a preset" in line
    folder = name.rpartition("/")[2]
    assert f"Only local folders are read: if it is a model of Hugging Face, type hf download {name}" in line
    assert line.endswith(f"--local-dir {folder}, then fatdeploy export ./{folder}\n")


@pytest.mark.parametrize("name", ["./nowhere", "no/such/folder", "../opus-mt-zh-en", ""])
def test_a_path_that_does_not_exist_is_no_download(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(name, tmp_path / "out")
    assert ("has no config.json" if not name else "a checkpoint folder (no such folder)") in line


def test_a_file_is_not_a_folder(whole: Path, tmp_path: Path) -> None:
    assert "a checkpoint folder (it is a file)" in refusal(str(whole / "model.safetensors"), tmp_path / "out")
