"""The example of translation, as a user runs it: training, export and the device in one call."""

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.checkpoint import TOKENIZER, load_checkpoint
from fatdeploy.export.training.data import read_parts
from fatdeploy.export.training.tokenizers import loaded_tokenizer
from fatdeploy.pairs import read_pairs
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.trainings import spelled

EXAMPLE = Path(__file__).parents[3] / "examples" / "translate.py"
SMALL = ["--preset", "transformer-tiny", "--longest", "24", "--vocab-size", "280", "--epochs", "2", "--warmup", "5"]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Return a file of words without blanks, and their spelling."""
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in spelled(80)))
    return path


def run_example(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["translate.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_example_trains_exports_and_translates(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Words of two characters: what the package does to Chinese, in a form that can be foreseen.
    jieba = ModuleType("jieba")
    monkeypatch.setattr(jieba, "cut", lambda text: [text[:2], " ", text[2:]], raising=False)
    monkeypatch.setitem(sys.modules, "jieba", jieba)
    out = tmp_path / "out"
    run_example(monkeypatch, pairs, "--out", out, "--segment", "jieba", *SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["epoch 1", "epoch 2"]
    apart = read_parts(pairs, None).validation.pairs
    separated = read_pairs(out / "validation.tsv")
    assert [pair.source for pair in separated] == [f"{pair.source[:2]} {pair.source[2:]}".strip() for pair in apart]
    assert any(" " in pair.source for pair in separated)
    assert len(read_pairs(out / "train.tsv")) + len(separated) == 80
    # The device translates as the checkpoint does.
    coder = loaded_tokenizer(out / "model" / TOKENIZER)
    sources = [coder.source_ids(pair.source) for pair in separated]
    rows = decode(EagerEngine(load_checkpoint(out / "model")), sources, DecodeOptions(num_beams=4))
    assert lines[2:-1] == [
        line
        for pair, row in list(zip(apart, rows, strict=True))[:5]
        for line in (pair.source, f"  {coder.text(row.tokens)}", f"  (reference: {pair.target})")
    ]
    assert lines[-1] == f"Next: fatdeploy eval {out / 'bundle'} {out / 'validation.tsv'}"


def test_without_jieba_it_says_what_to_type(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    message = r"--segment jieba needs jieba \(.*\): pip install 'fatdeploy\[segment\]', or pass --segment none"
    with pytest.raises(SystemExit, match=message):
        run_example(monkeypatch, pairs, "--out", tmp_path / "out", "--segment", "jieba")
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"none.tsv does not exist, expected a file of pairs"):
        run_example(monkeypatch, tmp_path / "none.tsv", "--out", tmp_path / "out")
