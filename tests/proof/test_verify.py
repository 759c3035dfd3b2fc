"""The parity certificate: what it records, what it catches, and that checking it needs no torch."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from fatdeploy.bundle import read_bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.errors import BundleError, ExportFailed, ParityFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.proof.draw_probes import drawn_probes
from fatdeploy.export.reference.checkpoint import save_checkpoint
from fatdeploy.manifest import PARITY, PROBES
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.proof.lockstep import SAFE_MARGINS
from fatdeploy.runtimes.proof.probes import read_probes, verified
from tests.support.bundles import bundle_of, model_of
from tests.support.choices import tiny

TINY = "transformer-tiny"


def test_probes_cover_the_lengths_and_batches_and_one_row_to_the_end() -> None:
    probes = read_probes(bundle_of(TINY).file(PROBES))
    assert [probe.tokens.shape for probe in probes] == [(1, 48), (3, 48), (8, 48), (1, 256)]
    assert [probe.mask.sum(1).tolist() for probe in probes[:3]] == [[7], [1, 31, 256], [1, 2, 7, 31, 2, 7, 31, 1]]


@pytest.mark.parametrize("preset", [TINY, "fat-tiny", "transformer-nat-tiny"])
def test_every_step_of_every_probe_is_decided_by_ten_times_the_noise(preset: str) -> None:
    engine = EagerEngine(model_of(preset))
    for probe in read_probes(bundle_of(preset).file(PROBES)):
        assert (probe.margins >= SAFE_MARGINS * probe.bounds).all()
    assert verified(engine, read_probes(bundle_of(preset).file(PROBES))).largest_difference <= 1e-5


def test_the_certificate_says_what_was_compared_where_and_with_what() -> None:
    bundle = bundle_of(TINY)
    certificate = json.loads(bundle.file(PARITY).read_text())
    assert certificate["parity"]["tokens"] == 12 * 48 + 256
    assert certificate["parity"]["largest_difference"] <= certificate["parity"]["bound"]
    assert certificate["versions"]["torch"] == torch.__version__
    assert certificate["machine"]["cores"] >= 1


def test_a_token_that_differs_is_named_with_its_probe_row_and_step() -> None:
    bundle = bundle_of(TINY)
    probes = read_probes(bundle.file(PROBES))
    tokens = probes[1].tokens.copy()
    tokens[2, 5] = (tokens[2, 5] + 1) % 64
    with pytest.raises(ParityFailed, match="probe 1, row 2, step 5: the reference says token"):
        verified(OrtEngine(bundle), [probes[0], replace(probes[1], tokens=tokens)])


def test_a_logit_that_is_off_by_more_than_the_bound_is_named() -> None:
    bundle = bundle_of(TINY)
    probe = read_probes(bundle.file(PROBES))[2]
    best = probe.best.copy()
    best[7, 47] += 3 * probe.bounds[7]
    with pytest.raises(ParityFailed, match=r"probe 0, row 7, step 47: the logit of token .* differs by"):
        verified(OrtEngine(bundle), [replace(probe, best=best)])


def test_other_weights_are_a_miss() -> None:
    other = bundle_of("at-tiny")
    with pytest.raises(ParityFailed, match="the reference says token"):
        verified(OrtEngine(other), read_probes(bundle_of(TINY).file(PROBES)))


def test_weights_that_decide_by_chance_are_refused() -> None:
    model = tiny({"max_source": 8, "max_target": 4})
    with torch.no_grad():
        model.output.weight.zero_()
    with pytest.raises(
        ExportFailed,
        match="none of 104 random sources of length 7 keeps a safe margin between the best and the next token for 4",
    ):
        drawn_probes(EagerEngine(model))


@pytest.mark.parametrize("damage", [b"", b"not a zip", b"PK\x03\x04 cut"])
def test_a_damaged_probe_file_is_a_bundle_error(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / PROBES).write_bytes(damage)
    with pytest.raises(BundleError, match=r"cannot read .*probes\.npz"):
        read_probes(tmp_path / PROBES)


def test_probes_that_hold_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / PROBES, **{"0.source": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(BundleError, match="cannot read"):
        read_probes(tmp_path / PROBES)


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "onnx", "onnxsim", "onnxscript"}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from fatdeploy.cli import main
main(["verify", sys.argv[1]])
"""


def test_verify_runs_where_torch_and_onnx_cannot_be_imported() -> None:
    bundle = bundle_of("fat-tiny")
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(bundle.path)], capture_output=True, text=True, check=False
    )
    assert "832 tokens of 13 rows are the reference's" in run.stdout, run.stderr


def test_verify_prints_one_line_and_exits_with_1_on_a_miss(tmp_path: Path) -> None:
    shutil.copytree(bundle_of(TINY).path, tmp_path / "wrong")
    shutil.copy(bundle_of("fat-tiny").file(PROBES), tmp_path / "wrong" / PROBES)
    write_manifest(tmp_path / "wrong", bundle_of(TINY).manifest)
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "wrong")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: probe 0, row 0, step 0: the reference says token")
    assert result.stderr.count("\n") == 1


def test_export_of_a_checkpoint_names_its_stages_and_shows_the_parity(tmp_path: Path) -> None:
    save_checkpoint(
        tiny({"encoder_layers": 1, "decoder_layers": 1, "max_source": 40, "max_target": 50}), tmp_path / "mine"
    )
    out = tmp_path / "bundle"
    result = CliRunner().invoke(main, ["export", str(tmp_path / "mine"), "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    assert "626 tokens of 13 rows are the reference's" in result.stdout  # 12 rows of 48 and one of 50
    assert result.stderr.splitlines() == [
        "tracing the encoder …",
        "tracing the decoder …",
        "simplifying …",
        "drawing probes from the reference …",
        "comparing the graphs with the reference …",
    ]
    assert read_bundle(out).manifest.source.name == "mine"
    quiet = CliRunner().invoke(main, ["-q", "export", str(tmp_path / "mine"), "--out", str(out), "--force"])
    assert (quiet.exit_code, quiet.stderr, quiet.stdout) == (0, "", result.stdout)
    again = CliRunner().invoke(main, ["export", str(tmp_path / "mine"), "--out", str(out)])
    assert again.exit_code == 1
    assert "exists; choose another folder or pass --force" in again.stderr


def test_export_of_something_that_is_not_there_says_what_a_source_is(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "a checkpoint folder (no such folder) or package.module:factory" in result.stderr
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from fatdeploy.export.pipeline import Origin, write_bundle
from tests.support.choices import tiny
def stage(name):
    if name.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
model = tiny({"encoder_layers": 1, "decoder_layers": 1, "max_source": 8, "max_target": 8})
write_bundle(model, Path(sys.argv[1]), origin=Origin(name="other"), force=True, stage=stage)
"""


@pytest.mark.parametrize("moment", ["tracing the decoder", "comparing"])
def test_an_export_that_is_killed_leaves_the_old_bundle(tmp_path: Path, moment: str) -> None:
    shutil.copytree(bundle_of(TINY).path, tmp_path / "bundle")
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "bundle"), moment], cwd=Path(__file__).parents[2], check=False
    )
    assert run.returncode == -9
    assert read_bundle(tmp_path / "bundle").digest == bundle_of(TINY).digest
