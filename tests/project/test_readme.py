"""The README: its numbers come from the results, its commands exist, its example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fatdeploy.cli import COMMANDS
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.bundles import bundle_of, model_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_its_numbers_are_those_of_the_committed_results() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.readme.run", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_its_first_screen_has_the_two_commands() -> None:
    screen = README.splitlines()[:25]
    assert any(line.startswith("make demo") for line in screen)
    assert any(line.startswith("make test") for line in screen)


def test_every_command_it_names_exists() -> None:
    named = set(re.findall(r"`?fatdeploy ([a-z]+)", README)) - {"is"}
    assert named <= set(COMMANDS)
    assert named


def test_the_decoding_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(next(example for example in EXAMPLES if "EagerEngine" in example), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"\((\d+, ){11}\d+\) length", line) for line in lines)


def run_on_a_bundle(example: str) -> None:
    exec(compile(example.replace("fat.bundle", str(bundle_of("fat-tiny").path)), "README.md", "exec"), {})


def test_the_example_of_beams_and_streams_gives_the_references_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_a_bundle(next(example for example in EXAMPLES if "model.stream" in example))
    beams, *events = capsys.readouterr().out.splitlines()
    engine = EagerEngine(model_of("fat-tiny"))
    best = decode(engine, [[17, 42, 9]], DecodeOptions(num_beams=4, num_return_sequences=2))[0]
    assert beams.endswith(f" {best.tokens} {best.alternatives[0].tokens}")
    assert float(beams.split()[0]) == pytest.approx(best.score, abs=1e-4)
    streamed = [int(token) for event in events for token in re.findall(r"\d+", event)]
    assert tuple(streamed) == decode(engine, [[17, 42, 9]], DecodeOptions(max_new_tokens=12))[0].tokens


def test_the_device_example_gives_the_references_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_a_bundle(next(example for example in EXAMPLES if "model.generate([[17" in example))
    expected = decode(EagerEngine(model_of("fat-tiny")), [[17, 42, 9], [7, 8]], DecodeOptions(max_new_tokens=12))
    assert capsys.readouterr().out == f"{expected}\n"


def test_nothing_in_the_repository_names_this_machine() -> None:
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    private = re.compile(r"/(work|root|home)/\w|pypi\.org|files\.pythonhosted")
    found = [
        f"{name}: {match.group()}"
        for name in files
        if (ROOT / name).is_file() and name != "tests/project/test_readme.py"
        for match in private.finditer((ROOT / name).read_text(errors="replace"))
    ]
    assert not found
