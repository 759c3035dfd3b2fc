"""README and docs: code blocks run, commands parse, links resolve, and tables match the code."""

import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fatdeploy.cli import COMMANDS, main
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.presets import PRESETS, SIZES
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.bundles import bundle_of, model_of
from tests.support.pages import PAGES, ROOT, Block, anchors, blocks, commands, links, prose, section
from tests.support.words import g2p_bundle

# Options of every command, and of other programs.
FOREIGN = {"--help", "--check", "--strict", "--model", "--quantization"}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a bundle under the name that the examples use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fat.bundle").symlink_to(bundle_of("fat-tiny").path)
    return tmp_path


def run_python(block: Block) -> dict[str, object]:
    """Run a block; return the names that it defines."""
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(block.code, str(block), "exec"), names)
    return {name: value for name, value in names.items() if not name.startswith("__")}


def example(name: str, words: str) -> Block:
    """Return the Python block of a page that contains these words."""
    [block] = [block for block in blocks("python") if block.page == ROOT / name and words in block.code]
    return block


def command(name: str) -> click.Command:
    subcommand = main.get_command(click.Context(main), name)
    assert subcommand is not None, name
    return subcommand


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_every_python_block_runs(block: Block, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sys.argv" in block.code:
        monkeypatch.setattr(sys, "argv", ["example.py", str(g2p_bundle().path), "station"])
    assert run_python(block), "the block defines nothing"


def test_the_example_of_engines_prints_targets(capsys: pytest.CaptureFixture[str]) -> None:
    run_python(example("docs/adding-an-engine.md", "EagerEngine"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"\((\d+, ){11}\d+\) length", line) for line in lines)


def test_the_example_of_beams_and_streams_gives_the_references_tokens(
    workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_python(example("docs/decoding.md", "model.stream"))
    beams, *events = capsys.readouterr().out.splitlines()
    engine = EagerEngine(model_of("fat-tiny"))
    best = decode(engine, [[17, 42, 9]], DecodeOptions(num_beams=4, num_return_sequences=2))[0]
    assert beams.endswith(f" {best.tokens} {best.alternatives[0].tokens}")
    assert float(beams.split()[0]) == pytest.approx(best.score, abs=1e-4)
    streamed = [int(token) for event in events for token in re.findall(r"\d+", event)]
    assert tuple(streamed) == decode(engine, [[17, 42, 9]], DecodeOptions(max_new_tokens=12))[0].tokens


def test_the_device_example_gives_the_references_tokens(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python(example("docs/decoding.md", "model.generate([[17, 42, 9], [7, 8]]"))
    expected = decode(EagerEngine(model_of("fat-tiny")), [[17, 42, 9], [7, 8]], DecodeOptions(max_new_tokens=12))
    assert capsys.readouterr().out == f"{expected}\n"


CALLS = [(str(block), call) for block in blocks("sh") for call in commands(block)]


@pytest.mark.parametrize(("place", "call"), CALLS, ids=[f"{place} {' '.join(call[:2])}" for place, call in CALLS])
def test_every_command_in_a_shell_block_parses(
    place: str, call: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with command(call[0]).make_context(call[0], call[1:]) as context:
        assert context.params, place


def test_a_command_with_an_unknown_option_would_be_noticed() -> None:
    with pytest.raises(click.NoSuchOption, match="--beam"):
        command("run").make_context("run", ["fat.bundle", "--beamz", "4"])


@pytest.mark.parametrize("call", [call for _, call in CALLS if call[:2] == ["run", "fat.bundle"]], ids=" ".join)
def test_every_run_of_the_small_bundle_prints_tokens(call: list[str], workshop: Path) -> None:
    result = CliRunner().invoke(main, call)
    assert result.exit_code == 0, result.output
    assert re.search(r"\d+ \d+", result.stdout)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_and_option_in_prose_exists(path: Path) -> None:
    text = prose(path)
    assert set(re.findall(r"`fatdeploy ([a-z]+)", text)) <= set(COMMANDS)
    options = {
        option for name in COMMANDS for param in command(name).params for option in (*param.opts, *param.secondary_opts)
    }
    named = {option for span in re.findall(r"`([^`\n]+)`", text) for option in re.findall(r"--[a-z][a-z-]*", span)}
    assert named - FOREIGN <= options


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_relative_link_and_anchor_leads_somewhere(path: Path) -> None:
    wrong = []
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or not target.is_relative_to(ROOT):
            wrong.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading; there are {sorted(anchors(target))}")
    assert not wrong


def test_the_readme_leads_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_presets_is_that_of_the_code() -> None:
    rows = [cells(line) for line in section("docs/models.md", "Presets").splitlines() if line.startswith("| `")]
    values = {row[0].strip("`"): dict(re.findall(r"`(\w+)=([\w.]+)`", row[1])) for row in rows if len(row) == 2}
    assert values == {name: {key: str(value) for key, value in preset.items()} for name, preset in PRESETS.items()}


def test_the_table_of_sizes_is_that_of_the_code() -> None:
    rows = [cells(line) for line in section("docs/models.md", "Presets").splitlines() if line.startswith("|")]
    [names] = [row[1:] for row in rows if row[0] == "size"]
    sizes = {row[0].strip("`"): dict(zip(names, map(int, row[1:]), strict=True)) for row in rows if row[1].isdigit()}
    assert sizes == SIZES


def test_the_page_on_models_has_a_section_per_preset() -> None:
    assert set(PRESETS) <= anchors(ROOT / "docs" / "models.md")
    assert "stand-in" in section("docs/models.md", "at-linear")


def test_every_file_of_the_floor_plan_exists() -> None:
    plan = section("CONTRIBUTING.md", "The floor plan")
    named = set()
    for folder, _, rooms in (cells(line) for line in plan.splitlines() if line.startswith("| `")):
        within = re.findall(r"`([\w/]+(?:\.py|/))`", rooms)
        named |= {name if name.startswith("tests/") else folder.strip("`") + name for name in within}
    changes = section("CONTRIBUTING.md", "Where do I change …")
    named |= set(re.findall(r"`((?:fatdeploy|runtimes|export|benchmarks)/[\w/*]+(?:\.py|/))`", changes))
    assert not {name for name in named if not any(ROOT.glob(name))}


def test_no_page_speaks_of_what_does_not_exist_yet_as_if_it_did() -> None:
    assert "serving.md" not in "".join(path.read_text() for path in PAGES)
