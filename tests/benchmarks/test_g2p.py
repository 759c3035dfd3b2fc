"""The benchmark of the bundled model: which bundle it measures, its targets, and its lines in the README."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.g2p import run as g2p
from benchmarks.g2p.targets import OURS, targets
from benchmarks.readme.other_tables import g2p_lines
from fatdeploy.export.g2p import CHECKPOINT, NAME

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "g2p.json"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the source and precision of each export, without running any."""
    requests: list[tuple[str, str]] = []

    def run(command: list[Any], *, check: bool) -> None:
        assert (command[1:4], check) == (["-m", "fatdeploy", "export"], True)
        source, _, precision, _, folder = command[4:]
        requests.append((source, precision))
        Path(folder).mkdir()

    monkeypatch.setattr(subprocess, "run", run)
    return requests


def test_a_bundle_is_reused_only_for_the_same_weights(
    tmp_path: Path, exports: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's own checkpoint, in a folder with the bundled model's name.
    other = Path(shutil.copytree(CHECKPOINT, tmp_path / "mine" / NAME))
    folders = [g2p.exported(NAME, NAME, precision, tmp_path) for precision in ("fp32", "int8", "fp32")]
    assert folders[0] == folders[2] != folders[1]
    assert exports == [(NAME, "fp32"), (NAME, "int8")]
    compared = g2p.exported(g2p.COMPARED, str(other), "fp32", tmp_path)
    assert compared not in folders
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    again = g2p.exported(g2p.COMPARED, str(other), "fp32", tmp_path)
    assert again != compared
    assert g2p.exported(g2p.COMPARED, str(other), "fp32", tmp_path) == again
    assert exports[2:] == [(str(other), "fp32")] * 2
    monkeypatch.setattr(g2p, "CHECKPOINT", other)
    assert g2p.exported(NAME, NAME, "fp32", tmp_path) not in (*folders, again)
    monkeypatch.setattr(g2p, "code_digest", lambda *folders: "of other code")
    assert g2p.exported(g2p.COMPARED, str(other), "fp32", tmp_path) != again
    assert len(exports) == 6


def row(errors: tuple[float, float, float], **fields: Any) -> dict[str, Any]:
    names = "wer", "per", "wer_without_stress"
    common = {"engine": NAME, "precision": "fp32", "beams": 1, "batch": 1, "times_peer": 1.0}
    return {**common, "errors": dict(zip(names, errors, strict=True)), **fields}


def test_targets_are_those_of_the_rows() -> None:
    assert OURS == NAME
    rows = [
        row((30.0, 8.75, 31.0), times_peer=2.5),
        row((30.0, 8.75, 31.0), batch=32, times_peer=9.0),
        row((30.25, 9.25, 30.0), precision="int8", times_peer=3.0),
        row((30.5, 8.75, 30.0), beams=5, times_peer=99.0),
        row((10.0, 1.0, 10.0), engine="g2p-en"),
        row((10.0, 1.0, 10.0), engine="transformer", times_peer=99.0),
    ]
    verdicts = [
        (target["target"], target["found"], target.get("at_most", target.get("at_least")), target["met"])
        for target in targets(rows)
    ]
    assert verdicts == [
        ("words wrong with stress, %", 30.0, 36.0, True),
        ("phonemes wrong with stress, %", 8.75, 8.5, False),
        ("words wrong without stress, %", 31.0, 31.0, True),
        ("words wrong with 5 beams, points above greedy", 0.5, 0.3, False),
        ("phonemes wrong with 5 beams, points above greedy", 0.0, 0.3, True),
        ("phonemes wrong in int8, points above fp32", 0.5, 0.3, False),
        ("words a second, 1 at once, times g2p-en's: the faster precision", 3.0, 3.0, True),
        ("words a second, 32 at once, times g2p-en's: the faster precision", 9.0, 10.0, False),
    ]
    assert [(target["found"], target["met"]) for target in targets([])] == [(None, None)] * 8


def test_the_readme_says_of_each_target_whether_it_is_met() -> None:
    result = json.loads(RESULT.read_text())
    verdicts = targets(result["results"])
    lines = g2p_lines(result).splitlines()
    start = lines.index(f"| {sum(target['met'] for target in verdicts)} of 8 targets are met | |")
    for target, line in zip(verdicts, lines[start + 2 :], strict=False):
        verdict = "met" if target["met"] else "NOT MET"
        assert line.startswith(f"| {target['target']} | {target['found']:.2f}, {verdict}: at ")
    assert lines[start + 2 + len(verdicts)] == ""
