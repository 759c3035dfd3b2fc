"""Default options on the command line: what is typed overrides them, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.bundles import bundle_with_defaults, model_of

TINY = "transformer-tiny"

SOURCES = [[9, 30, 12], [40, 41]]
BEAMS = {
    "num_beams": 4,
    "num_return_sequences": 2,
    "max_new_tokens": 8,
    "suppress_tokens": [2, 31],
    "length_penalty": 0.6,
}
SAMPLES = {"sample": True, "temperature": 0.7, "top_k": 9, "seed": 3, "max_new_tokens": 8, "bad_words": [[5]]}
IGNORED = {"top_h": 0.5, "a key\nof two lines": {"x": [1]}}


@pytest.fixture(scope="module")
def beams(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_with_defaults(tmp_path_factory.mktemp("beams") / "bundle", BEAMS, IGNORED)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_with_defaults(tmp_path_factory.mktemp("samples") / "bundle", SAMPLES)


def ids(tokens: list[int] | tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))


def call(command: str, bundle: Bundle, *arguments: str) -> Result:
    return CliRunner().invoke(main, [command, str(bundle.path), *arguments])


def targets(bundle: Bundle, *arguments: str) -> list[list[str]]:
    """Return the targets of every source as ``run`` prints them."""
    result = call("run", bundle, "--ids", "--json", *arguments, *map(ids, SOURCES))
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return [[ids(entry["tokens"]) for entry in (line, *line.get("alternatives", []))] for line in lines]


def expected(**values: Any) -> list[list[str]]:
    results = decode(EagerEngine(model_of(TINY)), SOURCES, DecodeOptions(**values))
    return [[ids(entry.tokens) for entry in (result, *result.alternatives)] for result in results]


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], BEAMS),
        (["--max-new-tokens", "5"], {**BEAMS, "max_new_tokens": 5}),
        (["--length-penalty", "1.0"], {**BEAMS, "length_penalty": 1.0}),
        (["--suppress", "8"], {**BEAMS, "suppress_tokens": [8]}),
        (["--beams", "1"], without(BEAMS, "num_beams", "num_return_sequences")),
        (["--n-best", "1"], without(BEAMS, "num_return_sequences")),
        (["--no-defaults", "--max-new-tokens", "5"], {"max_new_tokens": 5}),
        (["--no-defaults", "--max-new-tokens", "5", "--beams", "2"], {"max_new_tokens": 5, "num_beams": 2}),
    ],
    ids=str,
)
def test_run_decodes_with_the_bundles_options_and_what_is_typed(
    beams: Bundle, arguments: list[str], options: dict[str, Any]
) -> None:
    assert targets(beams, *arguments) == expected(**options)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], SAMPLES),
        (["--seed", "0"], {**SAMPLES, "seed": 0}),
        (["--sample"], SAMPLES),
        (["--no-sample"], {"max_new_tokens": 8, "bad_words": [[5]]}),
        (["--no-sample", "--beams", "2"], {"max_new_tokens": 8, "bad_words": [[5]], "num_beams": 2}),
    ],
    ids=str,
)
def test_run_can_turn_off_what_the_bundle_turns_on(
    samples: Bundle, arguments: list[str], options: dict[str, Any]
) -> None:
    assert targets(samples, *arguments) == expected(**options)


def test_several_targets_of_the_bundle_are_numbered_lines(beams: Bundle) -> None:
    lines = call("run", beams, "--ids", *map(ids, SOURCES)).stdout.splitlines()
    assert lines == [f"{number}\t{target}" for number, row in enumerate(expected(**BEAMS)) for target in row]
    assert call("run", beams, "--ids", "--beams", "1", ids(SOURCES[0])).stdout.count("\t") == 0


def test_run_streams_only_one_beam(beams: Bundle) -> None:
    result = call("run", beams, "--ids", "--stream", ids(SOURCES[0]))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "found num_beams = 4, num_return_sequences = 2" in result.stderr
    assert "pass num_beams=1 (--beams 1)" in result.stderr
    streamed = call("run", beams, "--ids", "--stream", "--beams", "1", ids(SOURCES[0]))
    assert streamed.stdout.split() == targets(beams, "--beams", "1")[0][0].split()


def test_run_refuses_impossible_options_of_a_bundle_in_one_line(tmp_path: Path) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", {"num_beams": 0, "nobody": 1})
    for command in ("run", "eval", "bench"):
        arguments = {"run": ["--ids", "5 6"], "eval": [str(tmp_path / "pairs.tsv"), "--ids"], "bench": []}[command]
        (tmp_path / "pairs.tsv").write_text("5 6\t7\n")
        result = call(command, bundle, *arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert "there is no option nobody; num_beams must be a whole number from 1 up, found 0" in result.stderr


def test_eval_decodes_with_the_bundles_options_and_what_is_typed(beams: Bundle, tmp_path: Path) -> None:
    best = [row[0] for row in expected(**BEAMS)]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{ids(source)}\t{target}\n" for source, target in zip(SOURCES, best, strict=True)))
    arguments = [str(pairs), "--ids", "--json", "--metric", "exact_match"]
    report = json.loads(call("eval", beams, *arguments).stdout)
    assert (report["metrics"]["exact_match"], report["beams"], report["options"]) == (100.0, 4, BEAMS)
    greedy = json.loads(call("eval", beams, *arguments, "--beams", "1").stdout)
    assert greedy["options"] == without(BEAMS, "num_beams", "num_return_sequences")
    plain = json.loads(call("eval", beams, *arguments, "--no-defaults", "--max-new-tokens", "8").stdout)
    assert (plain["beams"], plain["options"]) == (1, {"max_new_tokens": 8})
    assert plain["metrics"]["exact_match"] == 0.0


def test_inspect_shows_the_options_and_what_was_ignored(beams: Bundle, tmp_path: Path) -> None:
    lines = [" ".join(line.split()) for line in call("inspect", beams).stdout.splitlines()]
    section = lines[lines.index("Default options") + 1 :]
    assert section[: section.index("")] == [
        "length_penalty 0.6",
        "max_new_tokens 8",
        "num_beams 4",
        "num_return_sequences 2",
        "suppress_tokens [2, 31]",
        "'a key\\nof two lines' {'x': [1]} ignored: not available in fatdeploy",
        "top_h 0.5 ignored: not available in fatdeploy",
    ]
    values = json.loads(call("inspect", beams, "--json").stdout)
    assert values["generation"] == {"options": BEAMS, "ignored": IGNORED}
    empty = bundle_with_defaults(tmp_path / "bundle", {})
    assert "Default options\n  none  greedy\n" in call("inspect", empty).stdout


@pytest.mark.parametrize("command", ["run", "eval", "bench"])
def test_help_says_where_options_come_from(command: str) -> None:
    text = " ".join(CliRunner().invoke(main, [command, "--help"]).stdout.split())
    assert "--no-defaults" in text
    assert "fatdeploy inspect shows them" in text
