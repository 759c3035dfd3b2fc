"""A whole folder, weights, tokenizer and settings, from the command line to text, beside what transformers says."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

import fatdeploy
from fatdeploy.cli import main
from tests.support.hugging_face_folders import make_lively
from tests.support.text.piece_folders import marian_folder, texts

TEXTS = [text for text in texts(60) if len(text.split()) > 3][:12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Marian folder with a tokenizer, as OPUS-MT has it: padding is the last id and starts targets."""
    path = marian_folder(tmp_path_factory.mktemp("whole") / "tiny-mt", gaps=False)
    vocabulary = json.loads((path / "vocab.json").read_text())
    pad, eos = vocabulary["<pad>"], vocabulary["</s>"]
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 96}
    ids = {"pad_token_id": pad, "eos_token_id": eos, "bos_token_id": 0, "decoder_start_token_id": pad}
    with torch.random.fork_rng():
        model = MarianMTModel(MarianConfig(vocab_size=len(vocabulary), **sizes, **heads, **ids)).eval()
    make_lively(model, torch.Generator().manual_seed(3))
    with torch.no_grad():
        model.model.shared.weight[pad] = 0
    model.generation_config.update(num_beams=3, max_length=24, bad_words_ids=[[pad]], forced_eos_token_id=eos)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    out = folder.with_name("bundle")
    result = CliRunner().invoke(main, ["export", str(folder), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "targets with the folder's settings" in result.output
    return out


# transformers recommends sacremoses for Marian, and calls it nowhere.
@pytest.mark.filterwarnings("ignore:Recommended")
def test_run_writes_what_transformers_writes(bundle: Path, folder: Path) -> None:
    tokenizer, model = MarianTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder).eval()
    expected = [
        tokenizer.decode(model.generate(**tokenizer(text, return_tensors="pt"))[0], skip_special_tokens=True)
        for text in TEXTS
    ]
    assert len(set(expected)) > 6
    result = CliRunner().invoke(main, ["run", str(bundle), *TEXTS])
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n")[:-1] == expected


def test_what_the_caller_says_wins_over_the_folders_settings(bundle: Path) -> None:
    with fatdeploy.load(bundle) as model:
        beams, greedy = (model.generate(TEXTS, **changes) for changes in ({}, {"num_beams": 1, "max_new_tokens": 5}))
    assert max(len(row.tokens) for row in beams) > 5 >= max(len(row.tokens) for row in greedy)


def test_a_converted_tokenizer_says_how_many_texts_it_reads_differently(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    arguments = ["export", str(folder), "--out", str(tmp_path / "converted"), "--tokenizer", "convert"]
    refused = CliRunner().invoke(main, arguments)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--tokenizer convert needs --calibration" in refused.stderr
    result = CliRunner().invoke(main, [*arguments, "--calibration", str(tmp_path / "texts.txt")])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "converted")]).stdout
    assert f"of {len(TEXTS)} texts 0 with other tokens, 0 with another text" in shown
    assert sorted(path.name for path in (tmp_path / "converted").glob("*.spm")) == []
