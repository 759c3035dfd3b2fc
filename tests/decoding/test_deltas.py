"""Pieces of a growing target: together they are the whole; none is withdrawn, and no character is split."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.stops import cut_text
from fatdeploy.runtimes.decoding.streaming import REPLACEMENT, Deltas
from fatdeploy.runtimes.text.tokenizer import CharacterTokenizer, PackageTokenizer, Tokenizer
from fatdeploy.runtimes.text.tokenizer_json import SPECIAL, Kind, TokenizerFile
from tests.support.text.spellings import KINDS, byte_level_spelling, byte_spelling, ids_of, tokenizer_of

Stops = Sequence[Sequence[int] | str]


@cache
def tokenizer_named(kind: str) -> PackageTokenizer:
    with TemporaryDirectory() as folder:
        return tokenizer_of(*KINDS[kind], Path(folder))


# Blanks and a letter that combines among them, as characters or as symbols.
OWN: dict[str, Kind] = {"own characters": "characters", "own symbols": "symbols"}
OWN_TOKENS = ("a", "b", " ", "\n", ".", "e", "\u0301", "\N{GRINNING FACE}", REPLACEMENT)


def any_tokenizer(kind: str) -> Tokenizer:
    if kind in KINDS:
        return tokenizer_named(kind)
    return CharacterTokenizer(TokenizerFile(OWN[kind], (*SPECIAL[OWN[kind]], *OWN_TOKENS)))


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    """Return the texts of a target that grows one token at a time, until it contains a stop text."""
    deltas = Deltas(stops, tokenizer)
    texts = []
    for end in range(1, len(tokens) + 1):
        prefix = tuple(tokens[:end])
        text = tokenizer.text(prefix)
        if end == len(tokens) or any(stop in text for stop in stops):
            return [*texts, deltas.rest(Hypothesis(prefix, "stop", text=cut_text(text, stops)))[1] or ""]
        texts.append(deltas.grown(prefix)[1] or "")
    return texts


def pieces_of_spelling(kind: str, spelling: Sequence[str], stops: Sequence[str] = ()) -> list[str]:
    tokenizer = tokenizer_named(kind)
    return pieces(tokenizer, ids_of(tokenizer, spelling), stops)


@pytest.mark.parametrize("kind", [*KINDS, *OWN])
@given(data=st.data())
def test_all_pieces_together_are_the_text_for_any_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = any_tokenizer(kind)
    # Past the last token: ids that a model may return and its tokenizer does not know.
    tokens = data.draw(st.lists(st.integers(0, tokenizer.n_tokens + 1), min_size=1, max_size=12))
    *before, last = pieces(tokenizer, tokens)
    assert "".join([*before, last]) == tokenizer.text(tokens)
    assert not any(text.endswith(REPLACEMENT) or text[-1:].isspace() for text in before)


@pytest.mark.parametrize("kind", [*KINDS, *OWN])
@given(data=st.data())
def test_no_part_of_a_stop_text_is_ever_sent(kind: str, data: st.DataObject) -> None:
    tokenizer = any_tokenizer(kind)
    token = st.integers(3, tokenizer.n_tokens - 1)
    tokens = data.draw(st.lists(token, min_size=1, max_size=10))
    # Parts of the text, so that they do occur, and others that share their beginnings.
    text = tokenizer.text(tokens)
    begin = data.draw(st.integers(0, len(text)))
    stop = text[begin : begin + data.draw(st.integers(1, 4))]
    stops = [
        candidate
        for candidate in (stop, stop[:-1] + "~", data.draw(st.text("ab. \N{GRINNING FACE}", max_size=3)))
        if candidate
    ]
    texts = pieces(tokenizer, tokens, stops)
    ended = next((end for end in range(1, len(tokens)) if any(s in tokenizer.text(tokens[:end]) for s in stops)), None)
    assert "".join(texts) == cut_text(tokenizer.text(tokens[:ended]), stops)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_tokens_of_a_stop_sequence_are_never_sent(letters: list[str], words: list[str]) -> None:
    tokens = tuple(ord(letter) for letter in letters)
    stops = [tuple(ord(letter) for letter in word) for word in words]
    deltas, sent = Deltas(stops, None), []
    for end in range(1, len(tokens) + 1):
        stopped = next((stop for stop in stops if tokens[:end][-len(stop) :] == stop), None)
        if stopped is not None:
            final = tokens[: end - len(stopped)]
            break
        piece, text = deltas.grown(tokens[:end])
        assert text is None
        sent += piece
    else:
        final = tokens
    rest, text = deltas.rest(Hypothesis(final, "stop"))
    assert (*sent, *rest) == final
    assert text is None


def test_tokens_that_may_begin_a_stop_sequence_wait_until_it_is_ruled_out() -> None:
    deltas = Deltas([(7, 8, 9), (8, 5)], None)
    grown = [deltas.grown((6, 7, 8, 4, 7)[:end])[0] for end in range(1, 6)]
    assert grown == [(6,), (), (), (7, 8, 4), ()]
    assert deltas.rest(Hypothesis((6, 7, 8, 4, 7), "eos"))[0] == (7,)


def test_the_text_of_delayed_stop_sequence_tokens_is_not_sent_either() -> None:
    tokenizer = tokenizer_named("metaspace")
    hi, a, b = ids_of(tokenizer, ["▁Hi", "▁a", "b"])
    deltas = Deltas([(a, b)], tokenizer)
    assert deltas.grown((hi,)) == ((hi,), "Hi")
    assert deltas.grown((hi, a)) == ((), "")
    assert deltas.rest(Hypothesis((hi,), "stop", text="Hi")) == ((), "")


def test_an_emoji_of_four_tokens_is_sent_when_it_is_complete() -> None:
    texts = pieces_of_spelling("byte level", ["Ġhe", *byte_level_spelling("😀!"), "llo"])
    assert texts == [" he", "", "", "", "😀", "!", "llo"]


def test_bytes_that_never_form_a_character_are_sent_when_that_is_certain() -> None:
    broken = byte_level_spelling("😀")[:3]
    assert pieces_of_spelling("byte level", [*broken, "llo", "llo"]) == ["", "", "", "\ufffdllo", "llo"]
    assert pieces_of_spelling("byte level", ["llo", *broken]) == ["llo", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_is_sent_when_it_ends() -> None:
    # After the euro sign comes another character: until it is complete the decoder takes the first one back, too.
    spelling = ["▁Hi", *byte_spelling("€😀"), ",", "b"]
    assert pieces_of_spelling("byte fallback", spelling) == ["Hi", *[""] * 7, "€😀,", "b"]
    assert pieces_of_spelling("byte fallback", spelling[:6]) == ["Hi", "", "", "", "", "\ufffd" * 5]


def test_special_tokens_do_not_end_a_run_of_byte_tokens() -> None:
    first, *others = byte_spelling("€")
    assert pieces_of_spelling("byte fallback", [first, "<bos>", *others, ",", "b"]) == ["", "", "", "", "€,", "b"]


def test_special_tokens_have_no_text() -> None:
    assert pieces_of_spelling("metaspace", ["<bos>", "▁Hi", "<pad>", "b", "<eos>"]) == ["", "Hi", "", "b", ""]


def test_a_combining_character_follows_its_letter() -> None:
    assert pieces_of_spelling("metaspace", ["▁a", "e", "\u0301", "b"]) == ["a", "e", "\u0301", "b"]


def test_only_the_first_pieces_leading_blank_is_dropped() -> None:
    assert pieces_of_spelling("metaspace", ["▁Hi", "▁a", "b"]) == ["Hi", " a", "b"]
    assert pieces_of_spelling("metaspace", ["▁", "▁Hi", "▁", "▁"]) == ["", " Hi", "", "  "]


def test_word_pieces_are_sent_after_cleanup() -> None:
    spelling = ["hello", "##s", ",", "do", "n't", ".", "a"]
    assert pieces_of_spelling("word pieces", spelling) == ["hello", "s", ",", " do", "n't", ".", " a"]


def test_the_blank_of_a_words_suffix_comes_with_the_next_word() -> None:
    assert pieces_of_spelling("suffixes", ["he", "llo</w>", "w</w>", "he"]) == ["he", "llo", " w", " he"]


def test_blanks_wait_for_what_follows_them(tmp_path: Path) -> None:
    # A decoder that removes a blank before a full stop after the blank was written.
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")])
    tokenizer = tokenizer_of(["a", " ", "."], decoder, tmp_path)
    assert pieces(tokenizer, ids_of(tokenizer, ["a", " ", ".", "a", " ", "a"])) == ["a", "", ".", "a", "", " a"]


def test_text_that_the_decoder_changes_after_it_was_sent_is_waited_for(tmp_path: Path) -> None:
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz"), decoders.Replace("xyzc", "abc")])
    tokenizer = tokenizer_of(["a", "b", "c"], decoder, tmp_path)
    a, b, c = ids_of(tokenizer, "abc")
    assert [tokenizer.text((a, b, c)[:end]) for end in (1, 2, 3)] == ["a", "xyz", "abc"]
    assert pieces(tokenizer, (a, b, c, a)) == ["a", "", "bc", "a"]
    # It never agrees again: nothing more is sent, and the result has the right text.
    assert pieces(tokenizer, (a, b)) == ["a", ""]


def test_the_beginning_of_a_stop_text_waits_until_it_is_ruled_out() -> None:
    tokenizer = tokenizer_named("byte level")
    spelled = ids_of(tokenizer, byte_level_spelling("ab\n\ncd\nEND"))
    assert "".join(pieces(tokenizer, spelled, ["\nEND"])) == "ab\n\ncd"
    assert pieces(tokenizer, spelled, ["\nEND", "cdx"]) == ["a", "b", "", "", "\n\n", "", "", "cd", "", ""]


def test_a_stop_text_may_continue_after_an_incomplete_character() -> None:
    texts = pieces_of_spelling("byte level", byte_level_spelling("aSTÖPb"), ["STÖP"])
    assert texts == ["a", *[""] * 5]


def test_bytes_are_looked_for_only_where_there_are_byte_tokens() -> None:
    assert tokenizer_named("metaspace").n_certain((3, 4, 0, 1)) == 4
    tokenizer = tokenizer_named("byte fallback")
    lead, tail = ids_of(tokenizer, byte_spelling("é"))
    assert tokenizer.n_certain((3, lead, 4, lead, 2, tail, tokenizer.n_tokens)) == 3
    assert tokenizer.n_certain((lead, tail)) == 0
    assert tokenizer.n_certain(()) == 0
