"""Options of ``fatdeploy run`` that say how to decode and what to write."""

import json
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.runtimes.commands.decode_options import NOT_TYPED, SPELLINGS
from fatdeploy.runtimes.commands.run_output import Output
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import OPTIONS, DecodeOptions
from fatdeploy.runtimes.decoding.streaming import Event
from tests.support.bundles import bundle_of, model_of, shared_bundle
from tests.support.text.texts import bundle_with_text, words

TINY = "transformer-tiny"
SOURCES = [[9, 30, 12], [40, 41], [20, 33, 8, 50]]


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_with_text(tmp_path_factory.mktemp("text") / "bundle")


def run(bundle: Bundle, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", str(bundle.path), "--max-new-tokens", "12", *arguments])


def line(tokens: list[int] | tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))


def expected(**values: object) -> list[Hypothesis]:
    return decode(EagerEngine(model_of(TINY)), SOURCES, DecodeOptions(**{"max_new_tokens": 12, **values}))


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--beams 4", {"num_beams": 4}),
        (
            "--num-beams 3 --length-penalty 0.4 --early-stopping never",
            {"num_beams": 3, "length_penalty": 0.4, "early_stopping": "never"},
        ),
        ("--beams 2 --early-stopping yes", {"num_beams": 2, "early_stopping": True}),
        ("--min-new-tokens 9 --suppress 2 --beams 2", {"min_new_tokens": 9, "suppress_tokens": [2], "num_beams": 2}),
        (
            "--sample --temperature 0.7 --top-k 9 --top-p 0.9 --min-p 0.01 --seed 4",
            {"sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 4},
        ),
        ("--prefix|7 8 9", {"prefix": [7, 8, 9]}),
        ("--repetition-penalty 1.5 --no-repeat-ngram 2", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
        (
            "--sample --typical-p 0.6 --epsilon-cutoff 0.01 --eta-cutoff 0.02",
            {"sample": True, "typical_p": 0.6, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
        ),
        (
            "--encoder-repetition-penalty 4 --encoder-no-repeat-ngram 2",
            {"encoder_repetition_penalty": 4.0, "encoder_no_repeat_ngram_size": 2},
        ),
        (
            "--forced-bos 9 --forced-eos 2 --begin-suppress 30 --begin-suppress 31",
            {"forced_bos_id": 9, "forced_eos_id": 2, "begin_suppress_tokens": [30, 31]},
        ),
        ("--sequence-bias|30 12|-9.5|--sequence-bias|12|9", {"sequence_bias": [([30, 12], -9.5), ([12], 9.0)]}),
        ("--exponential-decay 2 1.9", {"exponential_decay_length_penalty": (2, 1.9)}),
        (
            "--beams 3 --renormalize --suppress 12 --suppress 30",
            {"num_beams": 3, "renormalize": True, "suppress_tokens": [12, 30]},
        ),
        ("--force 0 9 --force 2 11 --min-new-tokens 4", {"forced_tokens": [(0, 9), (2, 11)], "min_new_tokens": 4}),
    ],
    ids=str,
)
def test_a_command_line_option_sets_the_decode_option_of_the_same_name(arguments: str, values: dict) -> None:
    options = arguments.split("|") if "|" in arguments else arguments.split()
    result = run(bundle_of(TINY), "--ids", *options, *map(line, SOURCES))
    assert result.stdout.splitlines() == [line(hypothesis.tokens) for hypothesis in expected(**values)], result.output
    assert expected(**values) != expected()


def test_forbidden_tokens_never_appear(tmp_path: Path) -> None:
    plain = [token for hypothesis in expected() for token in hypothesis.tokens]
    first, pair = plain[0], line(plain[1:3])
    values = {"suppress_tokens": [first], "bad_words": [plain[1:3]], "stop": [plain[5:6]]}
    result = run(
        *(bundle_of(TINY), "--ids", "--suppress", str(first), "--bad-word", pair, "--stop", str(plain[5])),
        *map(line, SOURCES),
    )
    assert result.stdout.splitlines() == [line(hypothesis.tokens) for hypothesis in expected(**values)]
    listed = tmp_path / "ids.txt"
    listed.write_text("\n".join(map(str, range(20, 40))))
    result = run(bundle_of(TINY), "--ids", "--shortlist", str(listed), *map(line, SOURCES))
    assert result.stdout.splitlines() == [line(hypothesis.tokens) for hypothesis in expected(shortlist=range(20, 40))]


def test_a_target_ends_with_any_of_several_tokens() -> None:
    plain = [hypothesis.tokens for hypothesis in expected()]
    ends = [plain[0][4], plain[1][2]]
    result = run(bundle_of(TINY), "--ids", *(f"--eos={token}" for token in ends), *map(line, SOURCES))
    lines = [line(hypothesis.tokens) for hypothesis in expected(eos_ids=ends)]
    assert result.stdout.splitlines() == lines != list(map(line, plain))


def test_several_targets_are_one_line_each_with_source_number_and_score() -> None:
    result = run(bundle_of(TINY), "--ids", "--beams", "3", "--n-best", "2", "--scores", *map(line, SOURCES))
    results = [
        hypothesis
        for best in expected(num_beams=3, num_return_sequences=2)
        for hypothesis in (best, *best.alternatives)
    ]
    columns = [row.split("\t") for row in result.stdout.splitlines()]
    assert [(number, tokens) for number, _, tokens in columns] == [
        (str(index // 2), line(hypothesis.tokens)) for index, hypothesis in enumerate(results)
    ]
    assert [float(score) for _, score, _ in columns] == pytest.approx(
        [hypothesis.score for hypothesis in results], abs=2e-4
    )


def test_json_has_scores_log_probabilities_and_alternatives(text_bundle: Bundle) -> None:
    text = words(SOURCES[0])
    [value] = map(
        json.loads, run(text_bundle, "--json", "--scores", "--beams", "3", "--n-best", "3", text).stdout.splitlines()
    )
    assert set(value) == {"source", "tokens", "text", "finish", "dropped", "score", "log_probs", "alternatives"}
    assert len(value["log_probs"]) == len(value["tokens"])
    assert [words(alternative["tokens"]) for alternative in value["alternatives"]] == [
        alternative["text"] for alternative in value["alternatives"]
    ]
    scores = [value["score"], *(alternative["score"] for alternative in value["alternatives"])]
    assert scores == sorted(scores, reverse=True)


def test_a_stream_ends_up_as_the_same_line(text_bundle: Bundle) -> None:
    texts = [words(source) for source in SOURCES]
    assert run(text_bundle, "--stream", *texts).stdout == run(text_bundle, *texts).stdout
    ids = list(map(line, SOURCES))
    assert run(bundle_of(TINY), "--ids", "--stream", *ids).stdout == run(bundle_of(TINY), "--ids", *ids).stdout


def test_a_json_stream_has_one_event_per_line(text_bundle: Bundle) -> None:
    text = words(SOURCES[0])
    *events, last = map(json.loads, run(text_bundle, "--stream", "--json", text).stdout.splitlines())
    whole = json.loads(run(text_bundle, "--json", text).stdout)
    assert last["result"] == {name: value for name, value in whole.items() if name != "source"}
    assert "".join(event["text"] for event in [*events, last]) == whole["text"]
    assert [token for event in [*events, last] for token in event["tokens"]] == whole["tokens"]
    assert len(events) > 5


def test_a_prefix_and_a_stop_are_text_where_there_is_a_tokenizer(text_bundle: Bundle) -> None:
    text = words(SOURCES[0])
    plain = run(text_bundle, text).stdout
    # Tokens repeat: a stop ends the target where it first occurs.
    stop = " ".join(plain.split()[3:5])
    before = plain[: plain.index(stop)]
    assert run(text_bundle, "--stop", stop, text).stdout.split() == before.split() != []
    assert run(text_bundle, "--prefix", "w7 w8", text).stdout.split()[:2] == ["w7", "w8"]


def test_alignments_are_pairs_of_places_and_whole_in_json() -> None:
    exportable = exportable_model(model_of(TINY), Choices(attention_layer=1, max_target=32))
    bundle = shared_bundle(
        "aligned",
        lambda folder: write_bundle(exportable, folder, origin=Origin(name=TINY)),
    )
    source = line(SOURCES[0])
    tokens, pairs = run(bundle, "--ids", "--alignments", source).stdout.rstrip("\n").split("\t")
    value = json.loads(run(bundle, "--ids", "--alignments", "--json", source).stdout)
    assert tokens == line(value["tokens"])
    weights = value["alignments"]
    assert [len(row) for row in weights] == [3] * len(value["tokens"])
    assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in weights)
    assert pairs.split() == [f"{row.index(max(row))}-{place}" for place, row in enumerate(weights)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--alignments"], "has no alignments: export it again with --attention LAYER"),
        (["--stream", "--beams", "2"], "num_beams"),
        (["--n-best", "2"], "num_return_sequences must lie in 1…1 (num_beams), found 2"),
        (["--max-new-tokens", "999"], "max_new_tokens must lie in 1…256"),
        (["--bad-word", "a b"], "--bad-word: expected token ids with blanks between them, found 'a b'"),
        (["--sequence-bias", "a", "1"], "--sequence-bias: expected token ids with blanks between them, found 'a'"),
        (["--sequence-bias", "3", "inf"], "sequence_bias must be pairs: token ids, number to add, found [([3], inf)]"),
        (["--eos", "64"], "eos_ids must be ids in 0…63, found 64"),
        (["--shortlist", "nowhere.txt"], "cannot read --shortlist nowhere.txt"),
        (["--suppress", "64"], "suppress_tokens must be ids in 0…63, found 64"),
    ],
    ids=str,
)
def test_an_impossible_request_is_one_line_and_exit_code_1(arguments: list[str], reason: str) -> None:
    result = run(bundle_of(TINY), "--ids", *arguments, "9 30 12")
    assert (result.exit_code, result.stdout) == (1, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_decode_option_is_on_the_command_line() -> None:
    names = {field.name for field in fields(DecodeOptions)}
    assert {*NOT_TYPED} == {"scores", "processors"} < names
    typed = {option.name: option for option in main.get_command(click.Context(main), "run").params}
    assert typed.keys() >= names - {"processors"}
    assert {*SPELLINGS} < names
    for name, spellings in SPELLINGS.items():
        assert typed[name].opts == list(spellings)


def test_command_line_ranges_match_the_decode_options() -> None:
    typed = {option.name: option for option in main.get_command(click.Context(main), "run").params}
    whole = ("max_new_tokens", "min_new_tokens", "num_beams", "num_return_sequences", "top_k", "seed")
    assert [typed[name].type.min for name in whole] == [1, 0, 1, 1, 0, 0]
    numbers = {name: typed[name].type for name in ("temperature", "top_p", "min_p", "timeout_s", "length_penalty")}
    assert {name: (kind.min, kind.min_open, kind.max, kind.max_open) for name, kind in numbers.items()} == {
        "temperature": (0, True, None, False),
        "top_p": (0, True, 1, False),
        "min_p": (0, False, 1, True),
        "timeout_s": (0, True, None, False),
        "length_penalty": (-8, False, 8, False),
    }
    plain, shown = DecodeOptions(), (*whole[1:], "top_p", "min_p", "length_penalty")
    assert [typed[name].show_default for name in shown] == [f"bundle's or {getattr(plain, name)}" for name in shown]


def test_an_option_that_is_not_typed_has_no_value_of_its_own() -> None:
    command = main.get_command(click.Context(main), "run")
    assert isinstance(command, click.Command)
    with command.make_context("run", ["bundle", "text"]) as context:
        values = {name: context.params[name] for name in {*OPTIONS} - {*NOT_TYPED}}
    assert {name for name, value in values.items() if value not in (None, ())} == set()


def test_a_parallel_model_tries_several_lengths() -> None:
    bundle, lengths = bundle_of("transformer-nat-tiny"), ["--length-candidates", "3", "--scores"]
    options = DecodeOptions(max_new_tokens=12, length_candidates=3, scores=True)
    columns = [row.split("\t") for row in run(bundle, "--ids", *lengths, *map(line, SOURCES)).stdout.splitlines()]
    results = decode(EagerEngine(model_of("transformer-nat-tiny")), SOURCES, options)
    assert [tokens for _, tokens in columns] == [line(hypothesis.tokens) for hypothesis in results]
    assert [float(score) for score, _ in columns] == pytest.approx(
        [hypothesis.score for hypothesis in results], abs=2e-4
    )


@pytest.mark.parametrize("way", [[], ["--stream"]], ids=str)
def test_a_target_cut_off_by_a_timeout_is_reported(way: list[str]) -> None:
    result = run(bundle_of(TINY), "--ids", "--timeout", "1e-9", *way, *map(line, SOURCES))
    assert (result.exit_code, result.stdout) == (0, "\n\n\n")
    assert result.stderr == "WARNING 3 of 3 targets are incomplete: --timeout 1e-09 expired\n"
    assert run(bundle_of(TINY), "--ids", "--timeout", "600", *way, line(SOURCES[0])).stderr == ""


def test_a_stream_prints_the_same_line_whatever_line_ends_it_contains(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = ["a\r", "\nb", "\u2028", "c\n"]
    events = [Event((5,), piece) for piece in pieces]
    whole = Hypothesis((5, 5, 5, 5), "eos", "".join(pieces))
    assert Output().write_stream("x", iter([*events, Event((), "", whole)])) == "eos"  # type: ignore[arg-type]
    streamed = capsys.readouterr().out
    assert streamed == "a  b c \n"
    assert [*Output().lines(0, "x", whole)] == [streamed[:-1]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--exponential-decay", "3", "0"],
        ["--forced-bos", "-1"],
        ["--top-p", "0"],
        ["--beams", "0"],
        ["--early-stopping", "maybe"],
        ["--scores", "--stream"],
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_as_usage(arguments: list[str]) -> None:
    result = run(bundle_of(TINY), "--ids", *arguments, "9 30 12")
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
