"""Text by sentencepiece and by bytes: the ids and texts of transformers, on texts with anything in them."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from fatdeploy import BundleError, SpecMismatch
from fatdeploy.export.models.hugging_face.text.folder_text import text_of_folder
from fatdeploy.runtimes.text.reading import tokenizer_from_record
from fatdeploy.runtimes.text.tokenizer import Tokenizer
from fatdeploy.text import TextRecord
from tests.support.text.piece_folders import (
    ALONE,
    alone_folder,
    m2m_folder,
    marian_folder,
    pieces_of,
    texts,
    trained_pieces,
    write_json,
)

ROOT = Path(__file__).parents[2]
TEXTS = [
    *texts(1500),
    ">>fra<< Hello",
    ">>xxx<<Hello >>deu<<",
    ">>fra Hello",
    "<extra_id_0> hi <extra_id_5>x",
    "ends with </s>",
    "__de__ __en__x",
]


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of them recommends a package
        return AutoTokenizer.from_pretrained(folder)


def ours(folder: Path) -> Tokenizer:
    files = text_of_folder(folder)
    assert files is not None
    return files.tokenizer()


def different(expected: Any, tokenizer: Tokenizer, samples: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts with other ids, and those whose ids are written differently."""
    rows = {text: expected(text).input_ids for text in samples}
    ids = [text for text, row in rows.items() if tokenizer.encoded(text).ids.tolist() != row]
    written = [
        text for text, row in rows.items() if tokenizer.text(row) != expected.decode(row, skip_special_tokens=True)
    ]
    return ids, written


def byt5_folder(folder: Path) -> Path:
    folder.mkdir()
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})
    write_json(folder / "config.json", {"model_type": "t5"})
    return folder


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")
@pytest.mark.parametrize("name", ["marian", "marian-bpe", "marian-codes", "marian-clean", "m2m100", "plbart", "byt5"])
def test_ids_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = {
        "marian": lambda path: marian_folder(path),
        "marian-bpe": lambda path: marian_folder(path, "bpe"),
        "marian-codes": lambda path: marian_folder(path, codes=("deu", "fra")),
        "marian-clean": lambda path: marian_folder(path, clean_up_tokenization_spaces=True),
        "m2m100": m2m_folder,
        "plbart": lambda path: alone_folder(path, "PLBartTokenizer"),
        "byt5": byt5_folder,
    }[name](tmp_path / name)
    assert different(theirs(folder), ours(folder), TEXTS) == ([], [])


def test_two_vocabularies_read_sources_and_write_targets(tmp_path: Path) -> None:
    folder = marian_folder(tmp_path, separate_vocabs=True)
    tokens = ["</s>", "<unk>", *reversed(pieces_of(trained_pieces("unigram", 500, 1))[3:]), "<pad>"]
    write_json(folder / "target_vocab.json", {token: index for index, token in enumerate(tokens)})
    expected, tokenizer = theirs(folder), ours(folder)
    for text in TEXTS:
        assert tokenizer.encoded(text).ids.tolist() == expected(text).input_ids
        row = expected(text_target=text).input_ids
        assert [*tokenizer.plain_ids(text), 0] == row
        assert tokenizer.text(row) == expected.decode(row, skip_special_tokens=True)


def test_t5_differs_from_transformers_only_in_blanks_at_the_ends_of_a_written_text(tmp_path: Path) -> None:
    folder = alone_folder(tmp_path, "T5Tokenizer")
    expected, tokenizer = theirs(folder), ours(folder)
    ids, written = different(expected, tokenizer, TEXTS)
    assert ids == []
    for text in written:
        row = expected(text).input_ids
        assert tokenizer.text(row) == expected.decode(row, skip_special_tokens=True).strip()


# transformers 5 rebuilds these with another package, which reads blanks at the ends of a text, and before a special
# token, as a piece; its mBART has no normaliser at all. Sentencepiece is what the models were trained with.
@pytest.mark.parametrize("name", ["PegasusTokenizer", "MBart50Tokenizer", "MBartTokenizer"])
def test_the_pieces_are_those_of_sentencepiece_with_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    folder = alone_folder(tmp_path, name)
    expected, tokenizer = theirs(folder), ours(folder)
    file, _, _ = ALONE[name]
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / file))
    vocabulary = expected.get_vocab()
    before, after = {"PegasusTokenizer": (0, 1), "MBart50Tokenizer": (1, 1), "MBartTokenizer": (0, 2)}[name]
    around = expected("").input_ids
    for text in TEXTS:
        if "<" in text:
            continue
        middle = [vocabulary.get(piece, expected.unk_token_id) for piece in pieces.encode(text, out_type=str)]
        row = [*around[:before], *middle, *around[before:]]
        assert tokenizer.encoded(text).ids.tolist() == row
        assert tokenizer.encoded(text).closing == after
    plain = [text for text in TEXTS if text == text.strip() and "▁" not in text and "<" not in text and text.isascii()]
    assert len(plain) > 900
    assert different(expected, tokenizer, plain) == ([], [])


def test_codes_are_read_at_the_beginning_alone(tmp_path: Path) -> None:
    tokenizer = ours(marian_folder(tmp_path, codes=("deu",)))
    code = tokenizer.encoded(">>deu<< a").ids[0]
    assert tokenizer.text([code]) == ">>deu<<"
    assert tokenizer.encoded(">>xyz<< a").ids[0] == 1
    assert code not in tokenizer.encoded("a >>deu<<").ids


def test_a_text_that_is_cleaned_up_grows_by_whole_words_alone(tmp_path: Path) -> None:
    tokenizer = ours(marian_folder(tmp_path, gaps=False, clean_up_tokenization_spaces=True))
    for text in ["I do n't , you 're . He 's !", "a ' b ' c .", *texts(60)]:
        tokens = tokenizer.plain_ids(text)
        sent = ""
        for end in range(len(tokens) + 1):
            certain = tokenizer.text(tokens[: tokenizer.n_certain(tokens[:end])]).rstrip()
            assert certain.startswith(sent)
            sent = certain
        assert tokenizer.text(tokens).startswith(sent)


def test_bytes_that_are_not_a_character_yet_are_not_written(tmp_path: Path) -> None:
    tokenizer = ours(byt5_folder(tmp_path / "byt5"))
    tokens = tokenizer.encoded("é😀").ids.tolist()
    assert tokens == [byte + 3 for byte in "é😀".encode()] + [1]
    assert [tokenizer.text(tokens[:end]) for end in range(8)] == ["", "", "é", "é", "é", "é", "é😀", "é😀"]
    assert (tokenizer.text([0, 100, 2, 300, 9999]), tokenizer.n_certain(tokens)) == ("a", 7)


def test_a_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    for tokenizer in (ours(marian_folder(tmp_path / "marian")), ours(byt5_folder(tmp_path / "byt5"))):
        with pytest.raises(SpecMismatch, match=r"a text must be valid Unicode, found 'he\\udc80'"):
            tokenizer.encoded("he\udc80")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    files = text_of_folder(marian_folder(tmp_path / "folder"))
    assert files is not None
    files.write(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": -1}')
    with pytest.raises(BundleError, match=r"cannot read .*vocab.json: expected an object of ids by piece; export the"):
        tokenizer_from_record(tmp_path, files.record)
    (tmp_path / "source.spm").write_bytes(b"not a model")
    with pytest.raises(BundleError, match=r"cannot read .*source.spm: .*; export the bundle again"):
        tokenizer_from_record(tmp_path, files.record)


WITHOUT_PACKAGE = """
import sys
sys.modules["sentencepiece"] = None
from pathlib import Path
from fatdeploy.runtimes.text.piece_tokenizer import piece_model
piece_model(Path("source.spm"))
"""


def test_without_the_package_the_error_says_what_to_install() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGE], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "text of source.spm needs sentencepiece (" in run.stderr
    assert "pip install 'fatdeploy[sentencepiece]'" in run.stderr


def test_a_record_of_pieces_needs_an_unknown_id() -> None:
    with pytest.raises(ValueError, match="sentencepiece has an unk_id and no other kind has, found sentencepiece and"):
        TextRecord("sentencepiece", ())
