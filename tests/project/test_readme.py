"""The README: short, with numbers from the committed results and the proof as the command prints it."""

import re
import subprocess
import sys

from click.testing import CliRunner

from fatdeploy.cli import main
from tests.support.pages import ROOT, page
from tests.support.words import g2p_bundle

README = page("README.md")


def test_numbers_and_pictures_are_those_of_the_committed_results() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.readme.run", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 160
    assert lines.index("## Install by need") <= 45


def test_its_first_screen_has_the_two_commands() -> None:
    screen = README.splitlines()[:25]
    assert any(line.startswith("make demo") for line in screen)
    assert any(line.startswith("make test") for line in screen)


def test_its_only_table_of_speeds_has_five_engines() -> None:
    rows = re.findall(r"^\| (\w+).* \| \d+\.\d\d \| ", README, re.MULTILINE)
    assert rows == ["fatdeploy", "fatdeploy", "CTranslate2", "plain", "PyTorch"]


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.e%+-]*", "N", line)


def test_its_proof_is_in_the_words_of_verify() -> None:
    shown = next(line for line in README.splitlines() if line.startswith("g2p.bundle: "))
    result = CliRunner().invoke(main, ["verify", str(g2p_bundle().path)])
    assert result.exit_code == 0, result.output
    printed = result.stdout.strip().removeprefix(f"{g2p_bundle().path}: ")
    assert without_numbers(shown.removeprefix("g2p.bundle: ")) == without_numbers(printed)


def test_nothing_in_the_repository_names_this_machine() -> None:
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    private = re.compile(r"/(work|root|home)/\w|pypi\.org|files\.pythonhosted")
    matches = [
        f"{name}: {match.group()}"
        for name in files
        if (ROOT / name).is_file() and name != "tests/project/test_readme.py"
        for match in private.finditer((ROOT / name).read_text(errors="replace"))
    ]
    assert not matches
