"""The demonstration, as a user sees it."""

import json
import re

import pytest
from click.testing import CliRunner, Result

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.export.commands.demo import demo as demo_command
from fatdeploy.export.g2p.demo import Pronounced, picture_lines
from fatdeploy.manifest import MANIFEST
from tests.support.bundles import bundle_of
from tests.support.pages import PAGES
from tests.support.quantized import quantized_g2p
from tests.support.words import g2p_bundle


def demo(*arguments: str, bundle: Bundle | None = None) -> Result:
    path = (bundle or quantized_g2p("int8")).path
    return CliRunner().invoke(main, ["demo", *arguments, "--bundle", str(path)])


def test_the_demonstration_shows_words_alternatives_letters_latency_parity_and_how_close_integers_come() -> None:
    run = demo("Station", "kit")
    assert run.exit_code == 0, run.output
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["word", "best", "second", "third"]
    assert lines[1].startswith("station  S T EY1 SH AH0 N  (-0.")
    assert lines[2].startswith("kit      K IH1 T  (-0.")
    assert lines[4] == "Which letters of 'station' each phoneme was read from:"
    assert lines[5] == "      s t a t i o n"
    assert [line.split()[0] for line in lines[6:12]] == ["S", "T", "EY1", "SH", "AH0", "N"]
    assert lines[13].startswith("latency per word, greedy, 1 thread: p50 ")
    assert "rows are the reference's; chosen logits within" in lines[14]
    assert re.match(
        r"int8: (99\.\d+|100\.00)% of 3\d{3} tokens and 4\d\d of 500 words are the reference's; rows", lines[15]
    )


def test_the_demonstration_as_json_has_all_of_it() -> None:
    shown = json.loads(demo("kit", "--json").stdout)
    assert shown["words"][0]["word"] == "kit"
    assert len(shown["words"][0]["best"]) == 3
    assert shown["words"][0]["greedy"] == "K IH1 T"
    assert [len(row) for row in shown["words"][0]["letters"]] == [3, 3, 3]
    assert 0 < shown["p50_ms"] <= shown["p95_ms"]


def test_words_with_anything_but_letters_are_refused_together() -> None:
    run = demo("kit", "Zürich", "two words")
    assert (run.exit_code, run.stdout) == (1, "")
    message = "a word is letters from a to z and apostrophes, found 'zürich', 'two words': leave them out"
    assert message in run.stderr


def test_a_bundle_that_is_not_the_demonstrations_is_neither_shown_nor_replaced() -> None:
    for bundle, message in [
        (g2p_bundle(), "is not a bundle of the demonstration: precision is fp32, expected int8; name a new folder"),
        (bundle_of("fat-tiny"), "model is fat-tiny, expected g2p; licence is None, expected Apache-2.0; trained on"),
        (bundle_of("fat-tiny"), "precision is fp32, expected int8; attention is None, expected 0; name a new folder"),
    ]:
        before = (bundle.path / MANIFEST).read_bytes()
        run = demo("kit", bundle=bundle)
        assert (run.exit_code, run.stdout) == (1, "")
        assert message in run.stderr
        assert (bundle.path / MANIFEST).read_bytes() == before


def test_no_command_of_a_page_writes_where_the_demonstration_puts_its_bundle() -> None:
    [default] = [option.default for option in demo_command.params if option.name == "bundle"]
    assert not [str(path) for path in PAGES if f"--out {default}" in path.read_text()]


@pytest.mark.parametrize(("weights", "drawn"), [([0.9, 0.1, 0.0], "█    "), ([0.2, 0.4, 0.1], "▒ █ ░")])
def test_letters_that_are_read_more_are_darker(weights: list[float], drawn: str) -> None:
    assert picture_lines(Pronounced("abc", [], "K", [weights])) == ["      a b c", f"    K {drawn}"]
