"""Tokenizers from pairs: ids are ranks, texts come back, the same pairs give the same file."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from fatdeploy import ConfigError
from fatdeploy.errors import CheckpointError
from fatdeploy.export.training.tokenizers import Kind, TextCoder, built_tokenizer, loaded_tokenizer
from tests.support.text.texts import ANY_TEXT, in_package

ROOT = Path(__file__).parents[3]
KINDS: tuple[Kind, ...] = get_args(Kind)
SPELLED: list[tuple[str, str]] = [
    ("hello", "HH AH0 L OW1"),
    ("ahoy hello", "AH0 HH OY1  HH AH0 L OW1"),
    ("e\u0301\té \N{GRINNING FACE}\n<eos>", "IY1\tB"),
]


def tokens_of(coder: TextCoder) -> list[str]:
    """Return the vocabulary in the order of ids."""
    vocabulary: dict[str, int] = in_package(coder).get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    return sorted(vocabulary, key=vocabulary.__getitem__)


def test_ids_of_characters_are_ranks_in_targets_then_in_sources_then_by_spelling() -> None:
    coder = built_tokenizer([("xzzy b", "bba"), ("yw", "a ab")], "characters")
    # Targets: a 3, b 3, blank 1; b and the blank are also in the sources once. Only in sources: y 2, z 2, w, x.
    assert tokens_of(coder) == ["<pad>", "<bos>", "<eos>", "<unk>", "b", "a", " ", "y", "z", "w", "x"]
    assert (coder.n_tokens, coder.pad_id, coder.bos_id, coder.eos_id, coder.unk_id) == (11, 0, 1, 2, 3)
    assert coder.source_ids("by?z a") == [4, 7, 3, 8, 6, 5]
    assert coder.target_ids("ab a!") == [5, 4, 6, 5, 3]
    assert coder.text([1, 5, 4, 3, 6, 0, 5, 99, 2]) == "ab a"


def test_symbols_are_split_at_blanks_in_targets_and_sources_into_characters() -> None:
    coder = built_tokenizer(SPELLED[:2], "symbols")
    # A source letter and a symbol with the same spelling would be one token; there are none here.
    assert tokens_of(coder)[4:] == [*("AH0", "HH", "L", "OW1", "OY1"), *("l", "h", "o", "e", " ", "a", "y")]
    assert coder.source_ids("hey L!") == [10, 12, 15, 13, 6, 3]
    assert coder.target_ids(" L  AH0\nXX HH") == [6, 4, 3, 5]
    assert coder.text([1, 6, 4, 0, 5, 3, 2, 0]) == "L AH0 HH"


def test_ids_of_bpe_are_ranks_of_counts_in_the_pairs() -> None:
    pairs = [("low lower lowest " * 3, "new newer newest low"), ("wide wider", "new é\N{GRINNING FACE}")] * 4
    coder = built_tokenizer(pairs, "bpe", vocab_size=280)
    names, package = tokens_of(coder), in_package(coder)
    assert names[:3] == ["<pad>", "<bos>", "<eos>"]
    assert (coder.n_tokens, coder.unk_id) == (280, None)
    targets = Counter(token for _, target in pairs for token in package.encode(target).tokens)
    sources = Counter(token for source, _ in pairs for token in package.encode(source).tokens)
    assert names[3:] == sorted(names[3:], key=lambda token: (-targets[token], -sources[token], token))
    # In the targets: new 8 times, the others 4 times. Then those of the sources, 12 times each.
    assert names[3:12] == ["new", "Ġlow", "ðŁ", "Ġnewer", "Ġnewest", "ĠÃ©", "ĺĢ", "Ġlower", "Ġlowest"]
    assert coder.target_ids("new newer low") == [3, 6, 4]


def test_other_ids_do_not_change_how_bpe_splits_a_text() -> None:
    texts = [" ".join(pair) for pair in SPELLED] * 3
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=297, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    package = in_package(built_tokenizer([(text, "") for text in texts], "bpe", vocab_size=300))
    for text in texts:
        assert package.encode(text).tokens == learner.encode(text).tokens
        assert package.encode(text).ids != learner.encode(text).ids


def test_bpe_never_exceeds_its_number_of_tokens() -> None:
    assert built_tokenizer([("a", "b")], "bpe").n_tokens == 259
    assert built_tokenizer([("abcdefgh " * 2, "ijklmn " * 2)], "bpe", vocab_size=262).n_tokens == 262


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_pairs_give_the_same_file_in_another_process(kind: Kind, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from fatdeploy.export.training.tokenizers import built_tokenizer
pairs = [(f"wort{{n % 97}} zahl {{n}}", f"word{{n % 89}} number {{n * 7}}") for n in range(2000)]
built_tokenizer(pairs, {kind!r}).save(Path(sys.argv[1]))
"""
    for name, seed, parallel in (("one", "1", "true"), ("other", "2", "false")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel}
        subprocess.run([sys.executable, "-c", code, tmp_path / name], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_the_same_when_it_is_loaded(kind: Kind, tmp_path: Path) -> None:
    coder = built_tokenizer(SPELLED, kind)
    coder.save(tmp_path / "tokenizer.json")
    loaded = loaded_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.n_tokens, loaded.unk_id) == (kind, coder.n_tokens, coder.unk_id)
    assert [loaded.target_ids(target) for _, target in SPELLED] == [coder.target_ids(target) for _, target in SPELLED]
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_as_the_package_would_write_it(kind: Kind, tmp_path: Path) -> None:
    coder = built_tokenizer(SPELLED, kind)
    coder.save(tmp_path / "tokenizer.json")
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    assert json.loads(in_package(coder).to_str()) == written
    in_package(coder).save(str(tmp_path / "tokenizer.json"))
    assert loaded_tokenizer(tmp_path / "tokenizer.json").kind == kind


@given(pairs=st.lists(st.tuples(ANY_TEXT, ANY_TEXT), min_size=1))
def test_every_text_of_characters_comes_back(pairs: list[tuple[str, str]]) -> None:
    coder = built_tokenizer(pairs, "characters")
    for source, target in pairs:
        assert coder.text(coder.source_ids(source)) == source
        assert coder.text([1, *coder.target_ids(target), 2]) == target
        assert 3 not in coder.source_ids(source) + coder.target_ids(target)


@pytest.fixture(scope="module")
def learned() -> TextCoder:
    return built_tokenizer([(source, target) for source, target in SPELLED * 20], "bpe")


@given(text=ANY_TEXT)
def test_every_text_comes_back_from_bpe(learned: TextCoder, text: str) -> None:
    ids = learned.target_ids(text)
    assert learned.text([1, *ids, 2, 0]) == text
    assert learned.source_ids(text) == ids
    assert not {0, 1, 2} & set(ids)


def test_names_of_special_tokens_are_learned_by_bpe_as_any_other_text() -> None:
    coder = built_tokenizer([("<pad><eos> <pad>", "<bos>")] * 50, "bpe")
    assert tokens_of(coder).count("<pad>") == 1
    assert coder.text(coder.target_ids("<pad><bos>")) == "<pad><bos>"


def test_unknown_characters_and_symbols_are_counted() -> None:
    pairs = [("hollow", "HH AA1 L OW1"), ("<pad>hello", "ZH <pad> ZH")]
    unknown = built_tokenizer(SPELLED[:2], "symbols").unknown(pairs)
    assert unknown == {"AA1": 1, "ZH": 2, "<pad>": 1, "w": 1, "<": 1, "p": 1, "d": 1, ">": 1}
    assert built_tokenizer(SPELLED, "characters").unknown([("hq", "Lq")]) == {"q": 2}
    assert built_tokenizer(SPELLED, "bpe").unknown(pairs) == {}


@pytest.mark.parametrize(
    ("pairs", "kind", "size", "reason"),
    [
        ([], "characters", 300, "no tokenizer: there are no pairs; vocab_size is for bpe, characters keep"),
        ([("a", "b")], "symbols", 300, "vocab_size is for bpe, symbols keep everything that occurs; leave it out"),
        ([("a", "b")], "bpe", 258, "vocab_size must be at least 259, one for each byte and special token, found 258"),
        ([("a", "b"), ("\udc80", "b")], "bpe", None, "texts must be valid Unicode, those of pairs 1 are not"),
        ([("\udc80", "")] * 8, "characters", None, "those of pairs 0, 1, 2, 3, 4 and 3 more are not"),
        (
            [("a", "X <unk>"), ("b", "<eos> Y")],
            "symbols",
            None,
            "the symbol <eos> is the name of a special token; rename it; the symbol <unk> is the name",
        ),
    ],
    ids=str,
)
def test_pairs_that_no_tokenizer_can_be_built_from_are_refused(
    pairs: list[tuple[str, str]], kind: Kind, size: int | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        built_tokenizer(pairs, kind, vocab_size=size)


def test_a_file_that_is_not_our_tokenizer_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(CheckpointError, match=r"cannot read the tokenizer .*No such file.*; train again"):
        loaded_tokenizer(path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(CheckpointError, match=r"json: expected characters, symbols or bpe as fatdeploy train"):
        loaded_tokenizer(path)
    for content in (b'{"version": "1.0", ', b"\xff\xfe{", b"[" * 100_000, b"[]"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cannot read the tokenizer .*tokenizer\.json: .*; train again"):
            loaded_tokenizer(path)
