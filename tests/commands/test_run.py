"""``fatdeploy run``: sources from the command line or standard input, results in order, errors with their place."""

import json
import os
import pty
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.commands.run import batches, waiting_lines
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.bundles import bundle_of, model_of
from tests.support.terminal import on_a_terminal
from tests.support.text.texts import bundle_with_text, words

TINY = "transformer-tiny"
ROOT = Path(__file__).parents[2]
SOURCES = [[9, 30, 12], [40, 41], [20, 33, 8, 50], [11], [17, 42, 9]]


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_with_text(tmp_path_factory.mktemp("text") / "bundle")


def run(bundle: Bundle, *arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["run", str(bundle.path), "--max-new-tokens", "12", *arguments], input=stdin)


def lines(sources: list[list[int]]) -> list[str]:
    return [" ".join(map(str, row)) for row in sources]


def expected_tokens(sources: list[list[int]]) -> list[list[int]]:
    results = decode(EagerEngine(model_of(TINY)), sources, DecodeOptions(max_new_tokens=12))
    return [list(result.tokens) for result in results]


def test_ids_on_the_command_line_give_one_line_each() -> None:
    result = run(bundle_of(TINY), "--ids", *lines(SOURCES))
    assert result.stdout.splitlines() == lines(expected_tokens(SOURCES))
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("size", ["1", "2", "5", "8"])
def test_lines_of_standard_input_keep_their_order_in_batches_of_any_size(size: str) -> None:
    stdin = "\n".join(lines(SOURCES))
    result = run(bundle_of(TINY), "--ids", "--batch-size", size, stdin=stdin)
    assert result.stdout.splitlines() == lines(expected_tokens(SOURCES))


def test_text_goes_in_and_comes_out_whatever_ends_its_lines(text_bundle: Bundle) -> None:
    expected = [words(row) for row in expected_tokens([[*row, 2] for row in SOURCES])]
    texts = [words(row) for row in SOURCES]
    assert run(text_bundle, *texts).stdout.splitlines() == expected
    assert run(text_bundle, stdin="\r\n".join(texts) + "\r\n").stdout.splitlines() == expected


def test_json_has_source_tokens_text_finish_and_what_was_dropped(text_bundle: Bundle) -> None:
    [row] = expected_tokens([[9, 30, 12, 2]])
    values = {"tokens": row, "text": words(row), "finish": "length", "dropped": 0}
    assert json.loads(run(text_bundle, "--json", "w9 w30 w12").stdout) == {"source": "w9 w30 w12", **values}
    by_ids = run(text_bundle, "--json", "--ids", "9 30 12 2").stdout
    assert json.loads(by_ids) == {"source": [9, 30, 12, 2], **values}


def test_a_source_that_is_too_long_is_an_error_or_cut_with_truncate() -> None:
    long = lines([SOURCES[2] * 70])
    refused = run(bundle_of(TINY), "--ids", *long)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith(
        "Error: text 1: has 280 tokens, more than max_source = 256 (truncate=True, --trunc"
    )
    cut = run(bundle_of(TINY), "--ids", "--truncate", "--json", *long)
    assert cut.exit_code == 0
    assert json.loads(cut.stdout)["dropped"] == 24
    assert [json.loads(cut.stdout)["tokens"]] == expected_tokens([(SOURCES[2] * 70)[:256]])
    assert cut.stderr == "WARNING sources cut to max_source = 256: tokens dropped [24]\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"7 x 8", "expected token ids with blanks between them, found '7 x 8'"),
        (b"7 \xff", "expected UTF-8, found byte 0xff"),
        (b"", "is empty"),
        (b"7 64", "ids must lie in 0…63, found 64"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_by_its_number(line: bytes, reason: str) -> None:
    result = run(bundle_of(TINY), "--ids", "--batch-size", "2", stdin=b"9 30 12\n40 41\n20\n" + line + b"\n5\n")
    assert (result.exit_code, result.stderr) == (1, f"Error: line 4: {reason}\n")
    # All lines before it are answered, though their last batch is not full.
    assert result.stdout.splitlines() == lines(expected_tokens([[9, 30, 12], [40, 41], [20]]))


def test_a_file_is_read_in_larger_parts_than_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "sources.txt"
    file.write_text("9 30 12\n")
    with file.open() as stream:
        assert waiting_lines(stream) == 1024
    reading, writing = os.pipe()
    with os.fdopen(reading) as stream, os.fdopen(writing, "w"):
        assert waiting_lines(stream) == 64
    assert waiting_lines(StringIO("9 30 12\n")) == 64
    first, second = pty.openpty()
    with os.fdopen(second) as stream, os.fdopen(first, "w"):
        assert waiting_lines(stream) == 1


def test_text_for_a_bundle_without_a_tokenizer_asks_for_ids() -> None:
    result = run(bundle_of(TINY), "hello")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("has no tokenizer.json: pass token ids, not text (fatdeploy run --ids)\n")


def test_json_lines_have_a_prefix_of_their_own_and_results_repeat_them() -> None:
    prefixes: list[list[int] | None] = [[5, 6, 7], None, [], [8], [9, 10]]
    objects = [
        {"source": source} if prefix is None else {"source": source, "prefix": prefix}
        for source, prefix in zip(SOURCES, prefixes, strict=True)
    ]
    stdin = "\n".join(map(json.dumps, objects))
    result = run(bundle_of(TINY), "--json-lines", "--json", "--ids", "--prefix", "11", stdin=stdin)
    options = DecodeOptions(max_new_tokens=12, prefix=[11])
    expected = decode(EagerEngine(model_of(TINY)), SOURCES, options, prefixes=prefixes)
    values = [json.loads(line) for line in result.stdout.splitlines()]
    assert [value["tokens"] for value in values] == [list(one.tokens) for one in expected]
    assert [{key: value[key] for key in ("source", "prefix") if key in value} for value in values] == objects
    assert [value["tokens"][:1] for value in values[:2]] == [[5], [11]]
    streamed = run(bundle_of(TINY), "--json-lines", "--ids", "--prefix", "11", "--stream", stdin=stdin)
    assert streamed.stdout.splitlines() == lines([list(one.tokens) for one in expected])


def test_json_lines_of_text_are_read_as_text_and_with_ids_as_ids(text_bundle: Bundle) -> None:
    as_text = run(text_bundle, "--json-lines", stdin='{"source": "w9 w30 w12", "prefix": "w5 w6"}')
    as_ids = run(text_bundle, "--json-lines", "--ids", stdin='{"source": "9 30 12 2", "prefix": "5 6"}')
    as_lists = run(text_bundle, "--json-lines", stdin='{"source": [9, 30, 12, 2], "prefix": [5, 6]}')
    assert as_text.stdout == as_ids.stdout == as_lists.stdout
    assert as_text.stdout.startswith("w5 w6 ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("9 30", "expected a JSON object, found '9 30'"),
        ("[9, 30]", "expected a JSON object with source and prefix, found [9, 30]"),
        ('{"prefix": [5]}', "source is missing"),
        (
            '{"source": [9], "prefx": [5], "prefix": 5}',
            "unknown key 'prefx', expected source, prefix, source_language, target_language; "
            "prefix must be a text or a list of token ids, found 5",
        ),
        ('{"source": [9, true]}', "source must be a text or a list of token ids, found [9, True]"),
        ('{"source": null}', "source must be a text or a list of token ids, found None"),
        ('{"source": [9], "prefix": [64]}', "prefix must be ids in 0…63, found 64"),
        ('{"source": []}', "is empty"),
    ],
)
def test_a_json_line_that_cannot_be_read_is_named_by_its_number(line: str, reason: str) -> None:
    result = run(bundle_of(TINY), "--json-lines", stdin='{"source": [9]}\n' + line)
    assert (result.exit_code, result.stderr) == (1, f"Error: line 2: {reason}\n")


def test_json_lines_and_texts_exclude_each_other() -> None:
    result = run(bundle_of(TINY), "--json-lines", "--ids", "9 30")
    assert result.exit_code == 2
    assert "--json-lines reads standard input: leave out the texts, or the option" in result.stderr


def test_no_source_at_all_is_an_error() -> None:
    result = run(bundle_of(TINY), "--ids", stdin="")
    assert result.stderr == "Error: no source given: pass texts, or one per line on standard input\n"
    assert result.exit_code == 1


def test_engine_options_reach_the_engine() -> None:
    for command in (["run", "--ids", str(bundle_of(TINY).path), "5"], ["verify", str(bundle_of(TINY).path)]):
        result = CliRunner().invoke(main, [*command, "--threads", "1", "--no-spinning", "--provider", "cuda"])
        assert result.exit_code == 1
        assert "has no ['CUDAExecutionProvider']" in result.stderr
        assert CliRunner().invoke(main, [*command, "--threads", "1", "--no-spinning"]).exit_code == 0


def test_a_batch_is_yielded_before_the_next_is_read() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for number in range(5):
            read.append(number)
            yield number

    groups = batches(source(), 2)
    assert (next(groups), read) == ([0, 1], [0, 1])
    assert list(groups) == [[2, 3], [4]]


@pytest.mark.parametrize(
    ("before", "count", "shows"), [([], 5, True), ([], 1, False), (["--quiet"], 5, False)], ids=str
)
def test_progress_is_shown_on_a_terminal_when_there_is_more_than_one_source(
    before: list[str], count: int, shows: bool
) -> None:
    sources = SOURCES[:count]
    options = ["--ids", "--max-new-tokens", "12"]
    out, shown = on_a_terminal(*before, "run", str(bundle_of(TINY).path), *options, *lines(sources))
    assert out.splitlines() == lines(expected_tokens(sources))
    assert ("5/5" in shown) == shows
    assert bool(shown) == shows
