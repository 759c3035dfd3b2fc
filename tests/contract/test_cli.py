"""The command line's frame, run as a user runs it: in a process of its own."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fatdeploy import __version__, cli

REPOSITORY = Path(__file__).parents[2]
# What only a command may import, never the help.
HEAVY = (
    "torch",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "onnxsim",
    "tensorrt",
    "tensorrt_rtx",
    "tokenizers",
    "safetensors",
    "sacrebleu",
)
BLOCKED = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
"""
LISTED = f"""
import atexit, sys
atexit.register(lambda: print("imported:", sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr))
"""
FAILING = """
import sys, types
import click
from fatdeploy import cli
from fatdeploy.errors import BundleError
@click.command()
def fail():
    raise BundleError("weights.bin is missing:\\n  expected 10 bytes,\\n  found none. Export again")
sys.modules["failing"] = types.SimpleNamespace(fail=fail)
cli.COMMANDS["fail"] = "failing"
"""
WITH_TABLE = FAILING.replace('again")', 'again", table=["  output   4.2e-04", "  encoder  1.0e-05"])')


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{before}\nfrom fatdeploy.cli import main\nmain()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_the_version_is_printed() -> None:
    ran = run("--version")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"fatdeploy, version {__version__}\n", "")


def test_the_package_is_a_program_too() -> None:
    command = [sys.executable, "-m", "fatdeploy", "--version"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ran.stdout == f"fatdeploy, version {__version__}\n"


def test_the_help_lists_every_command_where_no_runtime_is_installed() -> None:
    ran = run("--help", before=BLOCKED)
    assert (ran.returncode, ran.stderr) == (0, "")
    commands = ran.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in commands] == cli.main.list_commands(click.Context(cli.main))
    assert {"demo", "doctor", "presets"} <= {line.split()[0] for line in commands}


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_each_command_explains_itself_where_no_runtime_is_installed(command: str) -> None:
    ran = run(command, "--help", before=BLOCKED)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f" {command} [OPTIONS]" in ran.stdout


def test_the_help_imports_nothing_heavy() -> None:
    assert run("--help", before=LISTED).stderr == "imported: []\n"


def test_the_doctor_imports_onnxruntime_and_nothing_else_heavy() -> None:
    assert run("doctor", before=LISTED).stderr == "imported: ['onnxruntime']\n"


def test_the_doctor_shows_this_machine() -> None:
    ran = run("doctor")
    assert (ran.returncode, ran.stderr) == (0, "")
    headings = [line for line in ran.stdout.splitlines() if line and not line.startswith(" ")]
    assert headings[:3] == ["Machine", "Packages", "CUDA"]


def test_the_doctor_s_json_has_the_versions_that_are_installed() -> None:
    report = json.loads(run("doctor", "--json").stdout)
    versions = {part["name"]: part["version"] for part in report["parts"]}
    assert versions["onnxruntime"] == importlib.metadata.version("onnxruntime")
    assert versions["torch"] == importlib.metadata.version("torch")
    assert report["healthy"] is True


def test_verbose_and_quiet_exclude_each_other() -> None:
    ran = run("-v", "-q", "doctor")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.splitlines()[-1] == "Error: --verbose and --quiet exclude each other"


def test_an_unknown_command_is_a_usage_error() -> None:
    ran = run("doctr")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Error: No such command 'doctr'." in ran.stderr


def test_a_fatdeploy_error_is_one_line_and_exit_code_1() -> None:
    ran = run("fail", before=FAILING)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "Error: weights.bin is missing: expected 10 bytes, found none. Export again\n"


def test_a_table_is_printed_unchanged_below_the_error_line() -> None:
    ran = run("fail", before=WITH_TABLE)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines() == [
        "Error: weights.bin is missing: expected 10 bytes, found none. Export again",
        "  output   4.2e-04",
        "  encoder  1.0e-05",
    ]


def test_two_verbose_flags_show_the_traceback() -> None:
    lines = run("-vv", "fail", before=FAILING).stderr.splitlines()
    assert lines[:2] == ["DEBUG traceback of the error below", "Traceback (most recent call last):"]
    assert lines[-1] == "Error: weights.bin is missing: expected 10 bytes, found none. Export again"


def test_a_registered_name_without_a_command_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "VERSION", "fatdeploy._version")
    with pytest.raises(TypeError, match=r"^fatdeploy\._version\.VERSION is not a command$"):
        cli.main.get_command(click.Context(cli.main), "VERSION")
