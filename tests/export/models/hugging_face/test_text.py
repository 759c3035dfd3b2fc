"""Tokenizers of Hugging Face folders on their way into a bundle: files, languages, conversions and refusals."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fatdeploy import CheckpointError, ConfigError, DecodeOptions, SpecMismatch, load
from fatdeploy.export.models.hugging_face.text.convert import converted
from fatdeploy.export.models.hugging_face.text.folder_text import text_of_folder
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.weights import random_model
from fatdeploy.export.text_files import TextFiles
from fatdeploy.spec import ModelSpec
from fatdeploy.targets import Precision
from fatdeploy.text import TextRecord
from tests.support.bundles import model_of
from tests.support.text.piece_folders import alone_folder, m2m_folder, marian_folder, sample_lines, texts, write_json

TEXTS = texts(800)


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(folder)


def files_of(folder: Path) -> TextFiles:
    files = text_of_folder(folder)
    assert files is not None
    return files


def check_equal(folder: Path) -> TextFiles:
    expected, files = theirs(folder), files_of(folder)
    tokenizer = files.tokenizer()
    for text in TEXTS:
        row = expected(text).input_ids
        assert tokenizer.encoded(text).ids.tolist() == row
        assert tokenizer.text(row) == expected.decode(row, skip_special_tokens=True)
    return files


def bart_folder(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sample_lines()[:500], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    folder.mkdir(parents=True)
    write_json(folder / "vocab.json", {**model["vocab"], "<mask>": len(model["vocab"])})
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    write_json(folder / "config.json", {"model_type": "bart"})
    return folder


def bert_folder(folder: Path, **config: object) -> Path:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        sample_lines()[:500], trainers.WordPieceTrainer(vocab_size=400, special_tokens=special)
    )
    vocabulary = tokenizer.get_vocab()
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text(
        "\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n", encoding="utf-8"
    )
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **config})
    write_json(folder / "config.json", {"model_type": "bert"})
    return folder


def test_plain_files_of_bart_become_a_tokenizer_json(tmp_path: Path) -> None:
    assert check_equal(bart_folder(tmp_path / "bart")).record.files == ("tokenizer.json",)


@pytest.mark.parametrize("lower", [True, False])
def test_plain_files_of_bert_become_a_tokenizer_json(tmp_path: Path, lower: bool) -> None:
    check_equal(bert_folder(tmp_path / "bert", do_lower_case=lower))


@pytest.mark.parametrize("clean_up", [True, False])
@pytest.mark.parametrize("kind", ["bart", "bert", "t5"])
def test_a_tokenizer_json_reads_and_writes_as_in_transformers(kind: str, clean_up: bool, tmp_path: Path) -> None:
    make = {"bart": bart_folder, "bert": bert_folder, "t5": lambda path: alone_folder(path, "T5Tokenizer")}[kind]
    expected = theirs(make(tmp_path / "plain"))
    expected.clean_up_tokenization_spaces = clean_up
    folder = tmp_path / "folder"
    expected.save_pretrained(folder)
    write_json(folder / "config.json", {"model_type": kind})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": clean_up})
    files = check_equal(folder)
    assert files.contents["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert files.record.clean_up == (clean_up and kind != "bart")


def test_special_tokens_that_only_the_settings_name_are_not_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<x>": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>", "additional_special_tokens": ["<x>"]})
    read = files_of(tmp_path).tokenizer()
    assert (read.text([0, 1, 2, 0]), read.plain_ids("a<x>a")) == ("a a", (0, 2, 0))


CODES = ["eng_Latn", "deu_Latn", "fra_Latn"]


def nllb_folder(folder: Path, **config: object) -> Path:
    from transformers import NllbTokenizer

    vocabulary = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a"])}
    merges = [("▁", "a")]
    NllbTokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=CODES).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**settings, **config})
    write_json(folder / "config.json", {"model_type": "m2m_100"})
    return folder


@pytest.mark.parametrize("legacy", [False, True])
def test_nllb_has_the_ids_of_transformers_in_every_language(tmp_path: Path, legacy: bool) -> None:
    folder = nllb_folder(tmp_path / "nllb", legacy_behaviour=legacy)
    expected, record = theirs(folder), files_of(folder).record
    languages = record.languages
    assert languages is not None
    assert languages.ids == {code: expected.convert_tokens_to_ids(code) for code in CODES}
    assert (languages.source, languages.target) == ("suffix" if legacy else "prefix", "forced_bos")
    assert (languages.default_source, languages.default_target, languages.end_id) == ("eng_Latn", None, 2)
    for code in CODES:
        expected.src_lang = code
        files = TextFiles(
            "", replace(record, languages=replace(languages, default_source=code)), files_of(folder).contents
        )
        assert files.tokenizer().encoded("a b aab").ids.tolist() == expected("a b aab").input_ids


def test_the_generation_config_may_have_the_target_language(tmp_path: Path) -> None:
    folder = m2m_folder(tmp_path / "m2m")
    ids = files_of(folder).record.languages
    assert ids is not None
    write_json(folder / "generation_config.json", {"forced_bos_token_id": ids.ids["cs"]})
    languages = files_of(folder).record.languages
    assert languages is not None
    assert (languages.default_target, languages.needs_target, languages.default_source) == ("cs", False, "en")
    mbart = alone_folder(tmp_path / "mbart", "MBartTokenizer", src_lang="de_DE")
    write_json(mbart / "config.json", {"model_type": "mbart", "decoder_start_token_id": 620})
    languages = files_of(mbart).record.languages
    assert languages is not None
    assert (languages.target, languages.default_target, languages.default_source) == ("start", "ro_RO", "de_DE")


def test_m2m100_has_the_ids_of_transformers_in_every_language(tmp_path: Path) -> None:
    folder = m2m_folder(tmp_path)
    expected, files = theirs(folder), files_of(folder)
    languages = files.record.languages
    assert languages is not None
    assert languages.ids == expected.lang_code_to_id
    for code in ("en", "zh"):
        expected.src_lang = code
        tokenizer = replace(files, record=replace(files.record, languages=replace(languages, default_source=code)))
        assert tokenizer.tokenizer().encoded("a text").ids.tolist() == expected("a text").input_ids


@pytest.mark.parametrize("make", [marian_folder, m2m_folder])
def test_a_conversion_counts_its_differences(make: Any, tmp_path: Path) -> None:
    exact = files_of(make(tmp_path))
    new = converted(exact, TEXTS)
    conversion = new.record.conversion
    assert conversion is not None
    ours, other = exact.tokenizer(), new.tokenizer()
    rows = [(ours.encoded(text).ids.tolist(), other.encoded(text).ids.tolist()) for text in TEXTS]
    assert conversion.texts == len(TEXTS)
    assert conversion.different_ids == sum(left != right for left, right in rows) < len(TEXTS) // 3
    assert conversion.different_texts == 0
    assert (new.record.kind, new.record.languages) == ("tokenizer_json", exact.record.languages)
    assert max(max(row) for _, row in rows) < ours.n_tokens


def test_a_conversion_of_complete_vocabularies_differs_rarely(tmp_path: Path) -> None:
    new = converted(files_of(marian_folder(tmp_path, gaps=False)), TEXTS)
    assert new.record.conversion is not None
    # Mostly unknown characters of the source that are pieces of the target.
    assert new.record.conversion.different_ids < len(TEXTS) // 20


def test_only_sentencepiece_can_be_converted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer convert: .* has nothing to convert; only sentencepiece models"):
        converted(files_of(bart_folder(tmp_path / "bart")), [])


def spec_of(size: int) -> ModelSpec:
    return replace(model_of("transformer-tiny").spec, vocab_size=size)


def test_a_model_may_lack_a_token_that_only_its_name_produces(tmp_path: Path) -> None:
    files = files_of(bart_folder(tmp_path / "bart"))
    read = files.tokenizer()
    files.check(spec_of(read.n_tokens - 1))
    assert read.encoded("a <mask>").ids[-2] == read.n_tokens - 1
    with pytest.raises(
        CheckpointError, match=r"the model has 499 tokens, tokenizer.json has .* with id 499: it belongs"
    ):
        files.check(spec_of(read.n_tokens - 2))
    marian = files_of(marian_folder(tmp_path / "marian"))
    size = marian.tokenizer().n_tokens
    marian.check(spec_of(size - 1))
    with pytest.raises(CheckpointError, match=r"vocab.json has .*: it belongs to another model"):
        marian.check(spec_of(size - 2))


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "bart"})
    assert text_of_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["NllbTokenizer", "BlenderbotSmallTokenizer", "SomebodysTokenizer"])
def test_files_that_are_not_known_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{name} has no tokenizer.json here, .*AutoTokenizer.from_pretrained\("):
        text_of_folder(tmp_path)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    folder = marian_folder(tmp_path / "marian")
    (folder / "target.spm").unlink()
    with pytest.raises(CheckpointError, match=r"has no target.spm: MarianTokenizer needs it"):
        text_of_folder(folder)
    write_json(folder / "vocab.json", [1])
    (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    with pytest.raises(CheckpointError, match=r"cannot read .*vocab.json: expected an object, found list"):
        text_of_folder(folder)
    write_json(folder / "vocab.json", {"a": 0})
    with pytest.raises(CheckpointError, match=r"the vocabulary has no '</s>', its eos_token"):
        text_of_folder(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer.json \(.*\): write it with transformers: "):
        text_of_folder(folder)
    m2m = m2m_folder(tmp_path / "m2m")
    write_json(m2m / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer", "language_codes": "all"})
    with pytest.raises(CheckpointError, match="language_codes must be one of m2m100, wmt21, found 'all'"):
        text_of_folder(m2m)


def test_what_the_package_cannot_read_is_our_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 1}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Strip(" ", 3, 3)
    files = TextFiles(
        "", TextRecord("tokenizer_json", ("tokenizer.json",)), {"tokenizer.json": tokenizer.to_str().encode()}
    )
    read = files.tokenizer()
    with pytest.raises(SpecMismatch, match="the tokenizer cannot read 'b': "):
        read.encoded("b")
    with pytest.raises(SpecMismatch, match=r"the tokenizer cannot write the tokens \[1\]: "):
        read.text([1])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_bundle_reads_and_writes_text_without_a_tokenizer_json(precision: Precision, tmp_path: Path) -> None:
    files = files_of(marian_folder(tmp_path / "marian", codes=("deu", "fra")))
    tokenizer = files.tokenizer()
    size = tokenizer.n_tokens
    choices = {"vocab_size": size, "pad_id": size - 1, "bos_id": size - 1, "eos_id": 0, "max_source": 32}
    model = random_model(replace(config_from_preset("transformer-tiny"), **choices, max_target=32))
    origin = Origin(name="marian", text=files, random=True)
    bundle = write_bundle(model, tmp_path / "bundle", origin=origin, precision=precision)
    assert bundle.manifest.text == files.record
    assert {"source.spm", "target.spm", "vocab.json"} <= bundle.manifest.files.keys()
    assert "tokenizer.json" not in bundle.manifest.files
    options = DecodeOptions(max_new_tokens=8)
    with load(bundle.path) as loaded:
        [text] = loaded.generate(["A first text."], options, target_language="fra")
        [ids] = loaded.generate([tokenizer.encoded(">>fra<< A first text.").ids], options)
    assert text == ids
    assert text.text == tokenizer.text(text.tokens) != ""


def test_a_tokenizer_of_another_model_is_refused_before_anything_is_traced(tmp_path: Path) -> None:
    origin = Origin(name="marian", text=files_of(marian_folder(tmp_path / "marian")))
    with pytest.raises(
        CheckpointError, match=r"the model has 64 tokens, vocab.json has .* it belongs to another model"
    ):
        write_bundle(model_of("transformer-tiny"), tmp_path / "bundle", origin=origin)


@pytest.mark.parametrize("has_end", [True, False])
def test_the_end_of_a_source_is_looked_up_in_the_vocabulary_and_never_guessed(tmp_path: Path, has_end: bool) -> None:
    words = ["<unk>", "a", "eng_Latn", "fra_Latn", *(["</s>"] if has_end else [])]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["eng_Latn", "fra_Latn"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "NllbTokenizer"})
    write_json(tmp_path / "config.json", {"model_type": "m2m_100"})
    if not has_end:
        with pytest.raises(CheckpointError, match="has no token '</s>', which ends a source in a language"):
            text_of_folder(tmp_path)
        return
    files = text_of_folder(tmp_path)
    assert files is not None
    assert files.record.languages is not None
    assert files.record.languages.end_id == 4
