"""Languages and sentences of a model: codes that are checked, tokens around sources, rows with their own languages."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import fatdeploy
from fatdeploy import ConfigError, DecodeOptions, SpecMismatch
from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.text.reading import PLAIN
from fatdeploy.text import Languages
from tests.support.bundles import model_of
from tests.support.text.texts import bundle_with_text, words

CODES = {"deu_Latn": 10, "eng_Latn": 11, "fra_Latn": 12}
PREFIX = Languages(CODES, "prefix", "forced_bos", end_id=2, default_source="eng_Latn")
SUFFIX = Languages(CODES, "suffix", "start", end_id=2, default_source="eng_Latn", default_target="fra_Latn")
LIMIT = DecodeOptions(max_new_tokens=6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_with_text(tmp_path_factory.mktemp("text") / "bundle")


@pytest.fixture
def folder(plain: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain.path, tmp_path / "bundle"))


def in_languages(folder: Path, languages: Languages) -> Bundle:
    manifest = replace(read_bundle(folder).manifest, text=replace(PLAIN, languages=languages))
    return write_manifest(folder, manifest)


def expected(row: list[int], **changes: int) -> tuple[int, ...]:
    [result] = decode(EagerEngine(model_of("transformer-tiny")), [row], replace(LIMIT, **changes))
    return result.tokens


def test_rows_with_languages_of_their_own_are_what_they_are_alone(folder: Path) -> None:
    with fatdeploy.load(in_languages(folder, PREFIX).path) as model:
        results = model.generate(
            ["w20 w21", "w30", "w20 w21", "w40 w41 w42"],
            LIMIT,
            source_language=["eng_Latn", "deu_Latn", "fra_Latn", "eng_Latn"],
            target_language=["fra_Latn", "eng_Latn", "deu_Latn", "fra_Latn"],
        )
    assert [result.tokens for result in results] == [
        expected([11, 20, 21, 2], forced_bos_id=12),
        expected([10, 30, 2], forced_bos_id=11),
        expected([12, 20, 21, 2], forced_bos_id=10),
        expected([11, 40, 41, 42, 2], forced_bos_id=12),
    ]
    assert [result.tokens[0] for result in results] == [12, 11, 10, 12]
    assert results[0].text == words(results[0].tokens)


def test_a_suffix_names_the_source_and_the_start_names_the_target(folder: Path) -> None:
    with fatdeploy.load(in_languages(folder, SUFFIX).path) as model:
        [by_default] = model.generate(["w20 w21"], LIMIT)
        [named] = model.generate(["w20 w21"], LIMIT, source_language="deu_Latn", target_language="deu_Latn")
        [ids] = model.generate([[20, 21, 2, 10]], LIMIT, target_language="deu_Latn")
        [event] = [
            event
            for event in model.stream("w20 w21", LIMIT, source_language="deu_Latn", target_language="deu_Latn")
            if event.hypothesis
        ]
        long = model.read(" ".join(["w20"] * 300), truncate=True, source_language="fra_Latn")
    assert by_default.tokens == expected([20, 21, 2, 11], start_id=12)
    assert named.tokens == ids.tokens == expected([20, 21, 2, 10], start_id=10)
    assert event.hypothesis is not None
    assert event.hypothesis.tokens == named.tokens
    assert (long.ids.tolist(), long.dropped) == ([20] * 254 + [2, 12], 46)


def test_an_option_of_the_caller_is_a_target_language_too(folder: Path) -> None:
    with fatdeploy.load(in_languages(folder, SUFFIX).path) as model:
        [result] = model.generate(["w20 w21"], replace(LIMIT, start_id=11))
    assert result.tokens == expected([20, 21, 2, 11], start_id=11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "this model needs the language of the target: target_language=CODE, --target-language CODE; it has deu_L"),
        ({"target_language": "fra"}, r"target_language 'fra' is unknown; near: fra_Latn"),
        ({"target_language": "qqq"}, r"target_language 'qqq' is unknown; it has deu_Latn, eng_Latn, fra_Latn"),
        (
            {"target_language": ["fra_Latn"], "source_language": "en"},
            r"source_language 'en' is unknown; .*; target_language must be a code, or one per source \(2\), found 1",
        ),
        ({"target_language": 7}, "target_language must be a code, or a list of codes, found 7"),
    ],
)
def test_languages_that_cannot_be_used_are_named(folder: Path, arguments: dict[str, object], message: str) -> None:
    with fatdeploy.load(in_languages(folder, PREFIX).path) as model, pytest.raises(ConfigError, match=message):
        model.generate(["w20", "w21"], LIMIT, **arguments)  # type: ignore[arg-type]


def test_a_model_without_languages_refuses_one(plain: Bundle) -> None:
    with (
        fatdeploy.load(plain.path) as model,
        pytest.raises(ConfigError, match="target_language has no meaning: this model has no languages, found 'fra'"),
    ):
        model.generate(["w20"], target_language="fra")


def test_ids_cannot_get_a_source_language_or_a_marker(folder: Path) -> None:
    refused = pytest.raises(ConfigError, match="source_language is part of the source's tokens here; pass text, not")
    with fatdeploy.load(in_languages(folder, SUFFIX).path) as model, refused:
        model.generate([[20, 2]], source_language="deu_Latn")
    markers = Languages({"fra": 12, "deu": 10}, "none", "marker", end_id=2)
    with fatdeploy.load(in_languages(folder, markers).path) as model:
        with pytest.raises(ConfigError, match="target_language is part of the source's tokens here; pass text, not"):
            model.generate([[20, 2]], target_language="fra")
        with pytest.raises(ConfigError, match="this model reads its source languages without a name, found 'fra'"):
            model.generate(["w20"], source_language="fra", target_language="fra")
        with pytest.raises(ConfigError, match="this model needs the language of the target"):
            model.generate(["w20"])
        with pytest.raises(ConfigError, match="the text's marker 'fr' is unknown; near: fra"):
            model.generate([">>fra<< w20", ">>fr<< w20"])
        with pytest.raises(
            ConfigError, match="the text already begins with >>deu<<: leave out the marker or target_la"
        ):
            model.generate([">>deu<< w20"], target_language="fra")
        assert model.read(">>fra<< w20").ids.tolist() == [3, 20, 2]
        assert model.read("w20", target_language="fra").ids.tolist() == [3, 20, 2]


def test_a_default_must_be_a_language() -> None:
    with pytest.raises(ValueError, match="default_target must be one of the languages, found 'xx'"):
        Languages(CODES, "prefix", "forced_bos", 2, default_target="xx")


DOCUMENT = "w20 w21! W\n\n  w31"


def test_a_document_is_its_sentences_joined(plain: Bundle) -> None:
    with fatdeploy.load(plain.path) as model:
        [document, empty] = model.generate([DOCUMENT, " \n"], LIMIT, split="sentences")
        parts = model.generate(["w20 w21!", "W", "w31"], LIMIT)
        [read] = model.generate([model.read_document(DOCUMENT)], LIMIT)
    assert document.text == f"{parts[0].text} {parts[1].text}\n\n  {parts[2].text}"
    assert document.tokens == tuple(token for part in parts for token in part.tokens)
    assert (document.finish, read) == ("length", document)
    assert (empty.tokens, empty.text, empty.finish) == ((), " \n", "eos")


def test_what_a_document_cannot_have_is_refused(plain: Bundle) -> None:
    with fatdeploy.load(plain.path) as model:
        with pytest.raises(ConfigError, match="split must be 'sentences' or None, found 'lines'"):
            model.generate(["w20"], split="lines")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"split refused: only a text has sentences, found \[20, 2\]"):
            model.generate([[20, 2]], split="sentences")
        with pytest.raises(ConfigError, match="num_return_sequences must be 1 for a document, found 2"):
            model.generate(["w20"], DecodeOptions(num_beams=2, num_return_sequences=2), split="sentences")
        with pytest.raises(SpecMismatch, match=r"sentence 'W W .*': has 301 tokens, more than max_source = 256"):
            model.generate(["w3. " + " ".join(["W"] * 300)], split="sentences")
        [cut] = model.generate(["w3! " + " ".join(["W"] * 300)], LIMIT, split="sentences", truncate=True)
        assert cut.dropped == 45


def test_a_prefix_begins_after_the_language_of_its_target(folder: Path) -> None:
    with fatdeploy.load(in_languages(folder, PREFIX).path) as model:
        call = {"target_language": "deu_Latn"}
        [own, other] = model.generate(["w20", "w20"], LIMIT, prefixes=["w30 w31", None], **call)
        [shared] = model.generate(["w20"], replace(LIMIT, prefix="w30 w31"), **call)
        [read] = model.generate([model.read("w20", prefix="w30 w31", **call)], LIMIT)
        with pytest.raises(ConfigError, match="split refused: prefixes have no meaning for a document, which has seve"):
            model.generate(["w20"], LIMIT, prefixes=["w30"], split="sentences", **call)
    [alone] = decode(EagerEngine(model_of("transformer-tiny")), [[11, 20, 2]], replace(LIMIT, prefix=(10, 30, 31)))
    assert own.tokens == shared.tokens == read.tokens == alone.tokens
    assert alone.tokens[:3] == (10, 30, 31)
    assert other.tokens == expected([11, 20, 2], forced_bos_id=10)


def test_an_evaluation_takes_languages(folder: Path, tmp_path: Path) -> None:
    bundle = in_languages(folder, PREFIX)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("w20 w21\tw12\n")
    call = ["eval", str(bundle.path), str(pairs), "--max-new-tokens", "6", "--metric", "exact_match", "--json"]
    refused = CliRunner().invoke(main, call)
    assert (refused.exit_code, "this model needs the language of the target" in refused.stderr) == (1, True)
    output = tmp_path / "targets.tsv"
    ran = CliRunner().invoke(main, [*call, "--target-language", "fra_Latn", "--output", str(output)])
    assert ran.exit_code == 0, ran.stderr
    assert output.read_text() == f"w20 w21\t{words(expected([11, 20, 21, 2], forced_bos_id=12))}\n"


def run(bundle: Bundle, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["run", str(bundle.path), "--max-new-tokens", "6", *arguments], input=stdin)


def test_languages_are_typed_and_listed(folder: Path) -> None:
    bundle = in_languages(folder, PREFIX)
    ran = run(bundle, "--source-language", "deu_Latn", "--target-language", "eng_Latn", "w20")
    assert ran.stdout == words(expected([10, 20, 2], forced_bos_id=11)) + "\n", ran.stderr
    streamed = run(bundle, "--stream", "--source-language", "deu_Latn", "--target-language", "eng_Latn", "w20")
    assert streamed.stdout == ran.stdout
    wrong = run(bundle, "--target-language", "ger_Latn", "w20")
    assert wrong.stderr.startswith("Error: languages refused: target_language 'ger_Latn' is unknown; near: ")
    assert wrong.exit_code == 1
    lines = CliRunner().invoke(main, ["inspect", str(bundle.path)]).stdout.splitlines()
    start = lines.index("Text")
    assert [" ".join(line.split()) for line in lines[start + 1 : start + 4]] == [
        "tokenizer tokenizer.json (tokenizer.json)",
        "defaults source eng_Latn, target none",
        "languages (3) deu_Latn eng_Latn fra_Latn",
    ]


def test_split_keeps_the_lines_of_standard_input_and_of_texts(plain: Bundle) -> None:
    first, second, third = run(plain, "w20 w21!", "W", "w31").stdout.splitlines()
    ran = run(plain, "--split", "sentences", stdin="w20 w21! W\n\n  w31\n")
    assert ran.stdout == f"{first} {second}\n\n  {third}\n", ran.stderr
    assert run(plain, "--split", "sentences", "w20 w21! W\n\n  w31").stdout == ran.stdout
    [line] = run(plain, "--split", "sentences", "--json", "w20 w21! W").stdout.splitlines()
    assert json.loads(line)["text"] == f"{first} {second}"


def test_what_split_cannot_be_combined_with_is_an_error(plain: Bundle) -> None:
    for option in ("--stream", "--scores", "--alignments", "--ids", "--json-lines"):
        result = run(plain, "--split", "sentences", option)
        assert (result.exit_code, "--split joins the texts of sentences: leave out" in result.stderr) == (2, True)
    long = run(plain, "--split", "sentences", "w3! " + "W " * 300)
    assert long.stderr.startswith("Error: text 1: sentence 'W W W")
