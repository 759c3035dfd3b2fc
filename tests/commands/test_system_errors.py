"""What the system refuses or ends: one line and nothing left behind, never a traceback."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fatdeploy.cli import main
from fatdeploy.export import pipeline
from tests.support.bundles import bundle_of

FATDEPLOY = (sys.executable, "-m", "fatdeploy")


def test_a_full_disk_is_one_line_on_standard_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = [*FATDEPLOY, "run", bundle_of("transformer-tiny").path, "--ids", "--max-new-tokens", "3", "9 30"]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (
        1,
        "Error: No space left on device; free some space and run the same again\n",
    )


def test_a_reader_that_has_seen_enough_ends_a_run_silently() -> None:
    command = [*FATDEPLOY, "run", bundle_of("transformer-tiny").path, "--ids", "--max-new-tokens", "3", "9 30", "40"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.close()
    _, errors = run.communicate()
    assert (run.returncode, errors) == (0, b"")


def test_a_write_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "weights.bin"))

    monkeypatch.setattr(pipeline, "write_graphs", refused)
    result = CliRunner().invoke(main, ["-q", "export", "transformer-tiny", "--out", str(tmp_path / "bundle")])
    assert result.exit_code == 1
    expected = f"Error: {tmp_path}/weights.bin: No space left on device; free some space and run the same again"
    assert result.stderr.splitlines()[-1] == expected
    assert list(tmp_path.iterdir()) == []


def test_sigterm_removes_what_an_export_was_writing(tmp_path: Path) -> None:
    command = [*FATDEPLOY, "-q", "export", "transformer-tiny", "--out", tmp_path / "bundle"]
    export = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not list(tmp_path.iterdir()) and export.poll() is None:
        time.sleep(0.01)
    export.send_signal(signal.SIGTERM)
    _, errors = export.communicate()
    assert (export.returncode, b"Traceback" in errors) == (128 + signal.SIGTERM, False)
    assert list(tmp_path.iterdir()) == []
