"""``fatdeploy eval``: an exported bundle on pairs with known scores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.pairs import Pair, read_pairs
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.evaluation.evaluate import EvaluationSource, examples_from_pairs
from fatdeploy.runtimes.evaluation.metrics import bleu, chrf
from tests.support.bundles import bundle_of, model_of
from tests.support.terminal import on_a_terminal
from tests.support.text.texts import bundle_with_text, words

TINY = "transformer-tiny"
SOURCES = [[9, 30, 12], [19, 21], [20, 33, 8, 50], [11]]
STEPS = 6


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_with_text(tmp_path_factory.mktemp("text") / "bundle")


def reference_tokens(sources: list[list[int]], **options: Any) -> list[list[int]]:
    """Return the tokens of the reference, which the bundle must return too."""
    results = decode(EagerEngine(model_of(TINY)), sources, DecodeOptions(max_new_tokens=STEPS, **options))
    return [list(result.tokens) for result in results]


def reference_texts(**options: Any) -> list[str]:
    """Return the reference's words for the sources with the EOS that the tokenizer adds."""
    return [words(row) for row in reference_tokens([[*row, 2] for row in SOURCES], **options)]


def file_of(folder: Path, lines: list[str]) -> Path:
    path = folder / "pairs.tsv"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def evaluate(bundle: Bundle, pairs: Path, *arguments: str, steps: int = STEPS) -> Result:
    options = ["--max-new-tokens", str(steps), "--threads", "1"]
    return CliRunner().invoke(main, ["eval", str(bundle.path), str(pairs), *options, *arguments])


def report(result: Result) -> dict[str, Any]:
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def ids(row: list[int]) -> str:
    return " ".join(map(str, row))


def known_pairs(folder: Path) -> Path:
    """Write four sources: right, right by the second reference, with one symbol replaced, with one added."""
    right = reference_texts()
    assert all(len(text.split()) == STEPS for text in right)
    texts = [words(row) for row in SOURCES]
    replaced = " ".join([*right[2].split()[:-1], "other"])
    shorter = " ".join(right[3].split()[:-1])
    targets = [(0, right[0]), (1, "quite another"), (2, replaced), (1, right[1]), (3, shorter), (0, right[0])]
    return file_of(folder, [f"{texts[index]}\t{target}" for index, target in targets])


def test_error_rates_of_known_pairs_are_those_worked_out_by_hand(text_bundle: Bundle, tmp_path: Path) -> None:
    values = report(evaluate(text_bundle, known_pairs(tmp_path), "--json"))
    # Edits 0, 0, 1, 1 of 6, 6, 6, 5 symbols.
    assert values["metrics"]["token_error_rate"] == 100 * 2 / 23
    assert values["metrics"]["sequence_error_rate"] == 50.0
    assert values["metrics"]["exact_match"] == 50.0
    assert values["details"]["token_error_rate"] == "2 edits of 23 symbols"
    # A repeated line is one reference.
    assert (values["sources"], values["references"], values["tokens"]) == (4, 5, 24)
    assert values["finish"] == {"length": 4}
    assert values["sources_per_s"] == pytest.approx(4 / values["seconds"])
    assert values["tokens_per_s"] == pytest.approx(24 / values["seconds"])


def test_bleu_and_chrf_are_those_of_the_reference(text_bundle: Bundle, tmp_path: Path) -> None:
    path = known_pairs(tmp_path)
    values = report(evaluate(text_bundle, path, "--json"))
    references = [list(example.references) for example in examples_from_pairs(read_pairs(path))]
    assert [len(row) for row in references] == [1, 2, 1, 1]
    # Examples are in the order of the first appearance of their sources in the file.
    for name, metric in {"bleu": bleu, "chrf": chrf}.items():
        expected = metric(reference_texts(), references)
        assert (values["metrics"][name], values["details"][name]) == expected
        assert 50 < expected.value < 100


def test_the_table_shows_two_digits(text_bundle: Bundle, tmp_path: Path) -> None:
    result = evaluate(text_bundle, known_pairs(tmp_path))
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == [
        "bleu",
        "chrf",
        "token_error_rate",
        "sequence_error_rate",
        "exact_match",
    ]
    assert lines[2:6] == [
        "token_error_rate       8.70  2 edits of 23 symbols",
        "sequence_error_rate   50.00  2 of 4 sources",
        "exact_match           50.00  2 of 4 sources",
        "4 sources, 5 references, 4 targets cut at the length limit",
    ]
    assert lines[6].startswith("24 tokens in ")
    assert lines[6].endswith(" tokens/s, 1 beam")
    assert (result.exit_code, result.stderr, len(lines)) == (0, "", 7)


@pytest.mark.parametrize("names", [["bleu"], ["chrf,exact_match"], ["exact_match, bleu", "bleu"]], ids=str)
def test_only_the_requested_metrics_are_computed(text_bundle: Bundle, tmp_path: Path, names: list[str]) -> None:
    options = [part for name in names for part in ("--metric", name)]
    values = report(evaluate(text_bundle, known_pairs(tmp_path), "--json", *options))
    expected = {"exact_match, bleu": ["exact_match", "bleu"]}.get(names[0], names[0].split(","))
    assert list(values["metrics"]) == expected


def test_an_unknown_metric_is_a_usage_error_that_names_all(text_bundle: Bundle, tmp_path: Path) -> None:
    result = evaluate(text_bundle, known_pairs(tmp_path), "--metric", "bleu,wer,")
    assert result.exit_code == 2
    shown = " ".join(result.stderr.split())
    assert "there is no 'wer', ''; there are bleu, chrf, token_error_rate, sequence_error_rate, exact_match" in shown


def test_beams_and_batches_reach_the_decoder(text_bundle: Bundle, tmp_path: Path) -> None:
    greedy, beams = reference_texts(), reference_texts(num_beams=4)
    assert greedy != beams
    path = file_of(tmp_path, [f"{words(row)}\t{text}" for row, text in zip(SOURCES, beams, strict=True)])
    for batch in ("1", "60", "8192"):
        values = report(evaluate(text_bundle, path, "--json", "--beams", "4", "--batch-tokens", batch))
        assert (values["metrics"]["exact_match"], values["beams"]) == (100.0, 4)
    assert report(evaluate(text_bundle, path, "--json"))["metrics"]["exact_match"] < 100


def test_the_length_penalty_reaches_the_decoder(text_bundle: Bundle, tmp_path: Path) -> None:
    path = known_pairs(tmp_path)
    result = evaluate(text_bundle, path, "--beams", "2", "--length-penalty", "nan")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "length_penalty" in result.stderr


def test_ignored_text_is_removed_from_targets_and_references(text_bundle: Bundle, tmp_path: Path) -> None:
    right = reference_texts()
    # Without digits every word is a w: only the number of words can still be wrong.
    path = file_of(tmp_path, [f"{words(SOURCES[0])}\tw1 w2 w3 w4 w5", f"{words(SOURCES[1])}\t{right[1]}"])
    values = report(evaluate(text_bundle, path, "--json", "--ignore", "[0-9]"))
    assert (values["metrics"]["token_error_rate"], values["ignore"]) == (100 / 11, "[0-9]")
    assert report(evaluate(text_bundle, path, "--json"))["metrics"]["token_error_rate"] > 100 / 11
    result = evaluate(text_bundle, path, "--ignore", ".*", "--metric", "token_error_rate")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: the references contain no symbols")


@pytest.mark.parametrize("pattern", ["[0-2", "a{99999999999}", "(?P<x"])
def test_an_invalid_regular_expression_is_a_usage_error(text_bundle: Bundle, tmp_path: Path, pattern: str) -> None:
    result = evaluate(text_bundle, known_pairs(tmp_path), "--ignore", pattern)
    assert result.exit_code == 2
    assert f"Invalid value for '--ignore': {pattern!r} is not a regular expression: " in result.stderr


def test_a_limit_takes_the_first_sources_with_all_their_references(text_bundle: Bundle, tmp_path: Path) -> None:
    values = report(evaluate(text_bundle, known_pairs(tmp_path), "--json", "--limit", "2"))
    # The second source's matching reference comes after the third source.
    assert (values["sources"], values["references"], values["metrics"]["exact_match"]) == (2, 3, 100.0)


def test_sources_keep_their_first_line_and_references_their_order() -> None:
    pairs = [Pair("a", "x"), Pair("b", "y"), Pair("a", "w"), Pair("a", "x")]
    assert examples_from_pairs(pairs) == [EvaluationSource("a", ("x", "w"), 1), EvaluationSource("b", ("y",), 2)]
    by_ids = examples_from_pairs([Pair("7 8", "9")], as_ids=True)
    assert by_ids == [EvaluationSource([7, 8], ("9",), 1)]


def test_targets_are_written_as_pairs_in_the_order_of_the_sources(text_bundle: Bundle, tmp_path: Path) -> None:
    output = tmp_path / "targets.tsv"
    result = evaluate(text_bundle, known_pairs(tmp_path), "--output", str(output))
    assert result.exit_code == 0
    expected = [Pair(words(row), text) for row, text in zip(SOURCES, reference_texts(), strict=True)]
    assert read_pairs(output) == expected


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_decoded(
    text_bundle: Bundle, tmp_path: Path
) -> None:
    path = known_pairs(tmp_path)
    before = path.read_bytes()
    for output, code, reason in (
        (tmp_path / "none" / "targets.tsv", 1, "there is no folder "),
        (path, 1, "is the file of pairs itself: choose another"),
        (tmp_path, 2, "is a directory"),
    ):
        result = evaluate(text_bundle, path, "--output", str(output))
        assert (result.exit_code, result.stdout) == (code, "")
        assert reason in result.stderr
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device here that is always full")
def test_a_full_disk_loses_no_figure(text_bundle: Bundle, tmp_path: Path) -> None:
    result = evaluate(text_bundle, known_pairs(tmp_path), "--json", "--output", "/dev/full")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["sources"] == 4
    assert result.stderr == "Error: cannot write --output /dev/full: No space left on device\n"


def test_all_bad_lines_are_reported_and_nothing_is_decoded(text_bundle: Bundle, tmp_path: Path) -> None:
    result = evaluate(text_bundle, file_of(tmp_path, ["w5", "w5\tw6", "w5\tw6\tw7", ""]))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no TAB at line 1; has 2 TABs at line 3; is blank at line 4; a line is a source" in result.stderr


def test_all_sources_that_are_too_long_are_reported_or_cut_with_truncate(text_bundle: Bundle, tmp_path: Path) -> None:
    long = words([9] * 300)
    path = file_of(tmp_path, ["w5\tw6", f"{long}\tw6", f"{long}\tw7", f"w8 {long}\tw7"])
    refused = evaluate(text_bundle, path)
    assert (refused.exit_code, refused.stdout) == (1, "")
    reason = "more than max_source = 256 (truncate=True, --truncate: cut it)"
    assert f"source has 301 tokens, {reason} at line 2; source has 302 tokens, {reason} at line 4;" in refused.stderr
    assert "2 of 3 sources cannot be used" in refused.stderr
    cut = evaluate(text_bundle, path, "--truncate", "--json")
    assert (cut.exit_code, json.loads(cut.stdout)["sources"]) == (0, 3)
    assert cut.stderr.startswith("WARNING sources cut to max_source = 256")


def test_ids_are_compared_as_ids_without_a_tokenizer(tmp_path: Path) -> None:
    right = reference_tokens(SOURCES)
    wrong = [*right[1][:-1], (right[1][-1] + 1) % 60 + 3]
    rows = [(SOURCES[0], right[0]), (SOURCES[1], wrong), (SOURCES[2], right[2])]
    path = file_of(tmp_path, [f"{ids(source)}\t {ids(target).replace(' ', '  ')}" for source, target in rows])
    output = tmp_path / "targets.tsv"
    values = report(evaluate(bundle_of(TINY), path, "--ids", "--json", "--output", str(output)))
    n = sum(map(len, right[:3]))
    assert values["metrics"] == {
        "token_error_rate": 100 / n,
        "sequence_error_rate": 100 / 3,
        "exact_match": 200 / 3,
    }
    assert read_pairs(output) == [Pair(ids(row), ids(target)) for row, target in zip(SOURCES[:3], right, strict=False)]


def test_ids_of_a_bundle_with_a_tokenizer_are_ids_all_the_same(text_bundle: Bundle, tmp_path: Path) -> None:
    [right] = reference_tokens([SOURCES[0]])
    path = file_of(tmp_path, [f"{ids(SOURCES[0])}\t{ids(right)}"])
    assert report(evaluate(text_bundle, path, "--ids", "--json"))["metrics"]["exact_match"] == 100.0


def test_all_lines_that_are_not_ids_of_the_model_are_reported(tmp_path: Path) -> None:
    path = file_of(tmp_path, ["5 6\t7", "5 x\t7", "5\ty", "5\t64", "5\t7 2", "99\t7"])
    result = evaluate(bundle_of(TINY), path, "--ids")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "4 of 6 lines cannot be used: " in result.stderr
    for reason in (
        "source: expected token ids with blanks between them, found '5 x' at line 2",
        "target: expected token ids with blanks between them, found 'y' at line 3",
        "target ids must lie in 0…63, found 64 at line 4",
        "target has EOS (2), which no result contains at line 5; with --ids a line is token ids, one TAB and token ids",
    ):
        assert reason in result.stderr
    result = evaluate(bundle_of(TINY), file_of(tmp_path, ["99\t7"]), "--ids")
    assert "1 of 1 sources cannot be used: source ids must lie in 0…63, found 99 at line 1;" in result.stderr


def test_text_for_a_bundle_without_a_tokenizer_asks_for_ids(tmp_path: Path) -> None:
    result = evaluate(bundle_of(TINY), file_of(tmp_path, ["5\t7"]))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no tokenizer.json: pass a file with token ids in both columns, and --ids" in result.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--metric", "bleu,chrf,exact_match"], "--metric bleu, --metric chrf needs text"),
        (["--ignore", "7"], "--ignore needs text"),
    ],
)
def test_options_that_need_text_are_refused_with_ids(tmp_path: Path, options: list[str], reason: str) -> None:
    result = evaluate(bundle_of(TINY), file_of(tmp_path, ["5\t7"]), "--ids", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: --ids compares token ids, but {reason}: leave one out" in result.stderr


WITHOUT = """
import sys
sys.modules["sacrebleu"] = None
from fatdeploy.cli import main
main(sys.argv[1:])
"""


def test_without_sacrebleu_its_metrics_are_left_out_with_a_warning_and_refused_if_named(
    text_bundle: Bundle, tmp_path: Path
) -> None:
    path = known_pairs(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT, "eval", str(text_bundle.path), str(path), "--max-new-tokens", "6"]
        root = Path(__file__).parents[2]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=root, check=False)

    refused = run("--metric", "exact_match,chrf")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("Error: bleu and chrf need sacrebleu (")
    assert "pip install 'fatdeploy[eval]'" in refused.stderr
    result = run("--json")
    assert list(json.loads(result.stdout)["metrics"]) == ["token_error_rate", "sequence_error_rate", "exact_match"]
    assert (
        result.stderr == "WARNING bleu and chrf left out, sacrebleu is not installed: pip install 'fatdeploy[eval]'\n"
    )
    result = run("--metric", "exact_match", "--json")
    assert (json.loads(result.stdout)["metrics"], result.stderr) == ({"exact_match": 50.0}, "")


def test_engine_options_reach_the_engine(text_bundle: Bundle, tmp_path: Path) -> None:
    result = evaluate(text_bundle, known_pairs(tmp_path), "--provider", "cuda")
    assert result.exit_code == 1
    assert "has no ['CUDAExecutionProvider']" in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="there are no terminals to open")
@pytest.mark.parametrize(("before", "shows"), [([], True), (["--quiet"], False)], ids=str)
def test_progress_is_shown_on_a_terminal(text_bundle: Bundle, tmp_path: Path, before: list[str], shows: bool) -> None:
    path = known_pairs(tmp_path)
    out, shown = on_a_terminal(*before, "eval", str(text_bundle.path), str(path), "--max-new-tokens", "6")
    assert "exact_match           50.00" in out
    assert ("4/4" in shown) == shows
    assert bool(shown) == shows
