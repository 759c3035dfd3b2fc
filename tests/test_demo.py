"""The demonstration, as a user sees it."""

import json
import re

import pytest
from click.testing import CliRunner

from fatdeploy.cli import main
from fatdeploy.export.demo import Pronounced, picture_lines
from tests.bundles import bundle_of
from tests.quantized import quantized_g2p
from tests.words import g2p_bundle


def test_the_demonstration_shows_words_alternatives_letters_latency_and_parity() -> None:
    run = CliRunner().invoke(main, ["demo", "nation", "kit", "--bundle", str(g2p_bundle().path)])
    assert run.exit_code == 0, run.output
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["word", "best", "second", "third"]
    assert lines[1].startswith("nation  N EY1 SH AH0 N  (-0.")
    assert lines[2].startswith("kit     K IH1 T  (-0.")
    assert lines[4] == "Which letters of 'nation' each phoneme was read from:"
    assert lines[5] == "      n a t i o n"
    assert [line.split()[0] for line in lines[6:11]] == ["N", "EY1", "SH", "AH0", "N"]
    assert lines[12].startswith("latency of a word, greedy, 1 thread: p50 ")
    assert "rows are the reference's" in lines[13]


def test_the_demonstration_of_integers_says_how_close_they_come() -> None:
    run = CliRunner().invoke(main, ["demo", "kit", "--bundle", str(quantized_g2p("int8").path)])
    assert run.exit_code == 0, run.output
    lines = run.stdout.splitlines()
    assert lines[1].startswith("kit   K IH1 T  (-0.")
    assert "rows are the reference's; chosen logits within" in lines[-3]
    assert re.match(
        r"int8: (99\.\d+|100\.00)% of 3\d{3} tokens and 4\d\d of 500 words are the reference's; a row", lines[-2]
    )


def test_the_demonstration_as_json_has_all_of_it() -> None:
    run = CliRunner().invoke(main, ["-q", "demo", "kit", "--json", "--bundle", str(g2p_bundle().path)])
    shown = json.loads(run.output)
    assert shown["words"][0]["word"] == "kit"
    assert len(shown["words"][0]["best"]) == 3
    assert shown["words"][0]["greedy"] == "K IH1 T"
    assert [len(row) for row in shown["words"][0]["letters"]] == [3, 3, 3]
    assert 0 < shown["p50_ms"] <= shown["p95_ms"]


def test_a_bundle_of_another_model_is_not_replaced() -> None:
    other = bundle_of("fat-tiny").path
    run = CliRunner().invoke(main, ["demo", "--bundle", str(other)])
    assert run.exit_code == 1
    assert "is a bundle of fat-tiny: name another with --bundle" in run.stderr


@pytest.mark.parametrize(("weights", "drawn"), [([0.9, 0.1, 0.0], "█    "), ([0.2, 0.4, 0.1], "▒ █ ░")])
def test_letters_are_the_darker_the_more_they_were_read(weights: list[float], drawn: str) -> None:
    assert picture_lines(Pronounced("abc", [], "K", [weights])) == ["      a b c", f"    K {drawn}"]
