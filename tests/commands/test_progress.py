"""Stages and progress bars of commands, and which modules may import a command."""

import ast
import logging
from pathlib import Path

import pytest

from fatdeploy.runtimes.commands.progress import progress_bar, show_stage

ROOT = Path(__file__).parents[2]
COMMANDS = "fatdeploy.runtimes.commands"


@pytest.mark.parametrize(("level", "expected"), [(logging.WARNING, "tracing …\n"), (logging.ERROR, "")])
def test_a_stage_is_shown_on_standard_error_unless_quiet(
    level: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("fatdeploy")
    before = log.level
    try:
        log.setLevel(level)
        show_stage("tracing")
    finally:
        log.setLevel(before)
    assert capsys.readouterr() == ("", expected)


def test_a_bar_away_from_a_terminal_yields_its_items_and_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar([4, 5, 6], "comparing") as bar:
        assert list(bar) == [4, 5, 6]
    assert capsys.readouterr() == ("", "")


def importers_of_commands(root: Path) -> set[str]:
    """Return the folders whose modules import a command of a device, anywhere in a file."""
    return {
        path.parent.relative_to(root).as_posix()
        for folder in ("runtimes", "export", "fatdeploy")
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(COMMANDS))
        or (isinstance(node, ast.Import) and any(alias.name.startswith(COMMANDS) for alias in node.names))
    }


def test_only_commands_import_commands(tmp_path: Path) -> None:
    assert {folder for folder in importers_of_commands(ROOT) if not folder.startswith("fatdeploy/")} == {
        "runtimes/commands",
        "export/commands",
    }
    planted = tmp_path / "runtimes" / "evaluation"
    planted.mkdir(parents=True)
    (planted / "evaluate.py").write_text(f"def decoded():\n    from {COMMANDS}.run_output import Output\n")
    assert importers_of_commands(tmp_path) == {"runtimes/evaluation"}
