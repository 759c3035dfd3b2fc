"""Text on a device: characters and symbols are read as with the tokenizers package, but without it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_letters, ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fatdeploy
from fatdeploy import BackendUnavailable, BundleError, DecodeOptions, SpecMismatch
from fatdeploy.export.training.tokenizers import Kind, built_tokenizer
from fatdeploy.runtimes.text.tokenizer import CharacterTokenizer, PackageTokenizer, tokenizer_from_file
from tests.support.text.texts import ANY_TEXT, bundle_with_coder, in_package

ROOT = Path(__file__).parents[2]
PAIRS = [("hello", "HH AH0 L OW1"), ("ahoy hello", "AH0 HH OY1 HH AH0 L OW1")]
Content = dict[str, Any]


@given(
    kind=st.sampled_from(["characters", "symbols"]),
    pairs=st.lists(st.tuples(ANY_TEXT, st.text("ab \n\té\N{GRINNING FACE}")), min_size=1),
    text=ANY_TEXT,
    data=st.data(),
)
def test_a_device_reads_and_writes_what_the_package_does(
    kind: Kind, pairs: list[tuple[str, str]], text: str, data: st.DataObject
) -> None:
    coder = built_tokenizer(pairs, kind)
    with TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        coder.save(path)
        device, package = tokenizer_from_file(path), PackageTokenizer(path.read_text(encoding="utf-8"), path)
    assert isinstance(device, CharacterTokenizer)
    assert device.n_tokens == package.n_tokens == coder.n_tokens
    # Past the last token: ids that a model may return and its tokenizer does not know.
    ids = data.draw(st.lists(st.integers(0, coder.n_tokens + 1)))
    assert device.text(ids) == package.text(ids) == coder.text(ids)
    assert device.n_certain(ids) == package.n_certain(ids) == len(ids)
    for sample in (text, *(side for pair in pairs for side in pair)):
        encoded, expected = device.encoded(sample), package.encoded(sample)
        assert encoded.ids.tolist() == expected.ids.tolist() == coder.source_ids(sample)
        assert (encoded.ids.dtype, encoded.closing) == (expected.ids.dtype, expected.closing)
        if kind == "characters":
            assert device.plain_ids(sample) == package.plain_ids(sample)


def test_a_part_of_a_target_is_split_as_targets_are(tmp_path: Path) -> None:
    coder = built_tokenizer(PAIRS, "symbols")
    coder.save(tmp_path / "tokenizer.json")
    device = tokenizer_from_file(tmp_path / "tokenizer.json")
    assert device.plain_ids("L  AH0 <eos>") == (*coder.target_ids("L AH0"), 3) == (6, 4, 3)
    assert device.encoded("L AH").ids.tolist() == coder.source_ids("L AH") == [6, 13, 3, 3]


def test_a_text_that_is_not_valid_unicode_is_refused_without_the_package_too(tmp_path: Path) -> None:
    built_tokenizer(PAIRS, "characters").save(tmp_path / "tokenizer.json")
    device = tokenizer_from_file(tmp_path / "tokenizer.json")
    for refusing in (device.encoded, device.plain_ids):
        with pytest.raises(SpecMismatch, match=r"a text must be valid Unicode, found 'he\\udc80'"):
            refusing("he\udc80")


WITHOUT_PACKAGE = """
import json, sys
sys.modules["tokenizers"] = None
from pathlib import Path
from fatdeploy.runtimes.text.tokenizer import tokenizer_from_file
read = tokenizer_from_file(Path(sys.argv[1]))
print(json.dumps([read.n_tokens, read.encoded("ahoy?").ids.tolist(), read.text([1, 5, 4, 2])]))
"""


def read_without_package(path: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("characters", [19, [17, 14, 15, 18, 3], "H "]), ("symbols", [16, [14, 10, 11, 15, 3], "HH AH0"])],
)
def test_characters_and_symbols_are_read_where_the_package_cannot_be_imported(
    kind: Kind, expected: list[object], tmp_path: Path
) -> None:
    coder = built_tokenizer(PAIRS, kind)
    coder.save(tmp_path / "tokenizer.json")
    run = read_without_package(tmp_path / "tokenizer.json")
    assert run.stderr == ""
    package = in_package(coder)
    values = json.loads(run.stdout)
    assert values == [package.get_vocab_size(), package.encode("ahoy?").ids, package.decode([1, 5, 4, 2])] == expected


def test_other_files_need_the_package_and_say_so_where_it_cannot_be_imported(tmp_path: Path) -> None:
    built_tokenizer(PAIRS, "bpe").save(tmp_path / "tokenizer.json")
    run = read_without_package(tmp_path / "tokenizer.json")
    assert "BackendUnavailable: text of " in run.stderr
    assert "tokenizer.json needs tokenizers (import of tokenizers halted" in run.stderr
    assert "pip install 'fatdeploy[text]'" in run.stderr


def with_another_id(content: Content) -> None:
    content["model"]["vocab"]["a"] = 99


def with_special_tokens_elsewhere(content: Content) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["<bos>"], vocabulary["<eos>"] = vocabulary["<eos>"], vocabulary["<bos>"]


def with_lower_case(content: Content) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def with_another_unknown_token(content: Content) -> None:
    content["model"]["unk_token"] = "a"


def with_an_end(content: Content) -> None:
    sequence = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}]
    special = {"<eos>": {"id": "<eos>", "ids": [2], "tokens": ["<eos>"]}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": special
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [with_another_id, with_special_tokens_elsewhere, with_lower_case, with_another_unknown_token, with_an_end],
)
def test_a_file_that_differs_from_our_kinds_is_read_by_the_package(
    change: Callable[[Content], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    built_tokenizer(PAIRS, "characters").save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert isinstance(tokenizer_from_file(path), PackageTokenizer)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BackendUnavailable, match=r"tokenizer\.json needs tokenizers .*pip install 'fatdeploy\[text\]'"):
        tokenizer_from_file(path)


@pytest.mark.parametrize(
    "content", [b'{"version": "1.0", ', b"\xff\xfe{", b"[" * 100_000], ids=["cut", "bytes", "deep"]
)
def test_a_damaged_file_is_a_bundle_error_with_or_without_the_package(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"cannot read .*tokenizer\.json: .*; export the bundle again"):
        tokenizer_from_file(tmp_path / "tokenizer.json")


# A charsmap that is no charsmap makes the package panic, which is no Exception: while it is read, or at the first text.
@pytest.mark.parametrize(("charsmap", "is_read"), [("/////wAA", False), ("BAAAAP///38AAAAA", True)])
def test_a_panic_of_the_package_is_our_error(charsmap: str, is_read: bool, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    built_tokenizer(PAIRS, "characters").save(path)
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    path.write_text(json.dumps(content))
    if is_read:
        with pytest.raises(SpecMismatch, match="the tokenizer cannot read 'hello'"):
            tokenizer_from_file(path).encoded("hello")
    else:
        with pytest.raises(BundleError, match=r"cannot read .*tokenizer\.json: .*; export the bundle again"):
            tokenizer_from_file(path)


def test_half_a_character_is_not_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    built_tokenizer([("a", "b")], "characters").save(path)
    path.write_text(path.read_text().replace('"a"', r'"\ud83d"'))
    with pytest.raises(BundleError, match=r"cannot read .*tokenizer\.json: .*; export the bundle again"):
        tokenizer_from_file(path)


# All 64 tokens of the model have a text.
ALL_TOKENS: dict[Kind, tuple[str, str, str]] = {
    "characters": (f"{ascii_letters} .,!?-'e\u0301", "", "why? "),
    "symbols": (ascii_lowercase, " ".join(f"S{number}" for number in range(34)), "S7 S30"),
}


@pytest.mark.parametrize("kind", ["characters", "symbols"])
def test_a_model_takes_and_gives_text_without_the_package(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, prefix = ALL_TOKENS[kind]
    coder = built_tokenizer([(source, target)], kind)
    assert coder.n_tokens == 64
    bundle = bundle_with_coder(coder, tmp_path / "bundle")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    short = DecodeOptions(max_new_tokens=12)
    with fatdeploy.load(bundle.path) as model:
        [result] = model.generate(["hello"], short)
        assert model.generate([coder.source_ids("hello")], short) == [result]
        assert result.text == coder.text(result.tokens)
        assert len(result.text) >= 10
        events = list(model.stream("hello", short))
        assert "".join(event.text or "" for event in events) == result.text
        assert len([event for event in events if event.text]) > 3
        # Inside the text, and for symbols inside tokens.
        stop = result.text[5:8]
        [stopped] = model.generate(["hello"], replace(short, stop=[stop]))
        assert (stopped.finish, stopped.text) == ("stop", result.text[: result.text.index(stop)])
        [begun] = model.generate(["hello"], replace(short, prefix=prefix))
        assert (begun.text or "").startswith(prefix)
        assert model.generate(["hello"], replace(short, prefix=coder.target_ids(prefix))) == [begun]
        [cut] = model.generate(["hello" * 60], short, truncate=True)
        assert replace(cut, dropped=0) == model.generate([("hello" * 60)[:256]], short)[0]
