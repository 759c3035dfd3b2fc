"""The second act of the demonstration: a folder of Hugging Face translates sentences."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import MarianConfig, MarianMTModel

from fatdeploy.cli import main
from fatdeploy.export.g2p.translation import SENTENCES, translated
from tests.support.hugging_face_folders import make_lively
from tests.support.quantized import quantized_g2p
from tests.support.text.piece_folders import marian_folder


def write_marian(folder: Path, seed: int = 0) -> Path:
    """Write a tiny model with the tokenizer of its family."""
    marian_folder(folder)
    tokens = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in {"layers": 1, "ffn_dim": 24}.items()}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    ids = {"pad_token_id": tokens["<pad>"], "decoder_start_token_id": tokens["<pad>"], "eos_token_id": 0}
    config = MarianConfig(vocab_size=len(tokens), d_model=16, max_position_embeddings=64, **sizes, **heads, **ids)
    with torch.random.fork_rng():
        model = MarianMTModel(config)
    make_lively(model, torch.Generator().manual_seed(seed))
    model.generation_config.update(max_new_tokens=8, max_length=None)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_marian(tmp_path_factory.mktemp("demo") / "tiny-marian")


def test_a_folder_is_exported_once_and_again_when_its_weights_change(tmp_path: Path) -> None:
    folder = write_marian(tmp_path / "marian")
    runs = []
    for seed in (0, 0, 1):
        write_marian(folder, seed)
        stages: list[str] = []
        act = translated(folder, stages.append)
        runs.append(("exporting marian" in stages, "the bundle has other weights: exporting again" in stages))
        assert act.bundle == str(tmp_path / "marian.bundle")
    assert runs == [(True, False), (False, False), (True, True)]


def test_the_demonstration_translates_after_it_pronounced(folder: Path) -> None:
    command = ["demo", "kit", "--bundle", str(quantized_g2p("int8").path), "--translate", str(folder)]
    run = CliRunner().invoke(main, command)
    assert run.exit_code == 0, run.output
    lines = run.stdout.splitlines()
    assert [lines.index(sentence) for sentence in SENTENCES] == [*range(n := lines.index(SENTENCES[0]), n + 10, 2)]
    assert all(line.startswith("    ") and line.endswith(" ms)") for line in lines[n + 1 : n + 10 : 2])
    assert "rows are the reference's; chosen logits within" in lines[n + 10]
    assert lines[n + 11].startswith("proof: transformers ")
    assert lines[-1].endswith(f"Next: fatdeploy run {folder}.bundle 你好")
    shown = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert [entry["source"] for entry in shown["translation"]["sentences"]] == [*SENTENCES]
    assert len(shown["translation"]["proof"]) == 2


def test_a_folder_that_does_not_exist_is_refused_before_anything_is_exported(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["demo", "--bundle", str(tmp_path / "new"), "--translate", str(tmp_path / "none")])
    assert run.exit_code == 2
    assert "does not exist" in run.stderr
    assert not (tmp_path / "new").exists()
