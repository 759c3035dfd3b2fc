"""Small tokenizers, one per common way to spell text as tokens; their tokens are listed here."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as Written
from tokenizers import decoders, models, pre_tokenizers

from fatdeploy.runtimes.text.tokenizer import PackageTokenizer, tokenizer_from_file

SPECIAL = ["<pad>", "<bos>", "<eos>"]
# As byte-level BPE spells bytes: each has a printable character of its own.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_spelling(text: str) -> list[str]:
    """Return one token per byte of a text."""
    [(spelled, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(spelled)


def byte_spelling(text: str) -> list[str]:
    """Return the byte tokens of a text."""
    return [f"<0x{byte:02X}>" for byte in text.encode()]


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
PIECES = ["▁", "▁Hi", "▁a", "b", ",", ".", "é", "e", "\u0301", "▁▁", "\n", "\ufffd"]
WORDS = ["hello", "##s", "##ing", ",", ".", "?", "!", "'", "n't", "'m", "'s", "'ve", "'re", "do", "not", "##", "a"]

# Name: its tokens and what turns them into text.
KINDS: dict[str, tuple[list[str], decoders.Decoder | None]] = {
    "byte level": (
        [*ALPHABET, "Ġhe", "llo", *("".join(byte_level_spelling(text)) for text in ("é", " 😀"))],
        decoders.ByteLevel(),
    ),
    "metaspace": (PIECES, decoders.Metaspace()),
    "metaspace without a leading blank": (PIECES, decoders.Metaspace(prepend_scheme="never")),
    "byte fallback": ([*PIECES, *BYTES], LLAMA),
    "byte fallback that strips nothing": ([*PIECES, *BYTES], GEMMA),
    "word pieces": (WORDS, decoders.WordPiece("##", cleanup=True)),
    "word pieces as they are": (WORDS, decoders.WordPiece("##", cleanup=False)),
    "suffixes": (["he", "llo</w>", "w</w>", ".</w>", "</w>", "e", "\u0301</w>"], decoders.BPEDecoder("</w>")),
    "characters of speech": (["a", "b", "|", "'s", "."], decoders.CTC(pad_token="<pad>", word_delimiter_token="|")),
    "words": (["a", "b", ".", ","], None),
}


def tokenizer_of(tokens: Iterable[str], decoder: decoders.Decoder | None, folder: Path) -> PackageTokenizer:
    """Return a tokenizer with these tokens after the special ones, read from a file as a bundle's is."""
    vocabulary = dict.fromkeys([*SPECIAL, *tokens])
    written = Written(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="<pad>"))
    written.add_special_tokens(SPECIAL)
    if decoder is not None:
        written.decoder = decoder
    written.save(str(folder / "tokenizer.json"))
    read = tokenizer_from_file(folder / "tokenizer.json")
    assert isinstance(read, PackageTokenizer)
    return read


def ids_of(tokenizer: PackageTokenizer, tokens: Iterable[str]) -> tuple[int, ...]:
    """Return the ids of tokens by their spelling."""
    ids = tuple(tokenizer._tokenizer.token_to_id(token) for token in tokens)
    assert None not in ids
    return ids
