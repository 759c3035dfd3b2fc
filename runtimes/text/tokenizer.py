"""Text to tokens and back, as a bundle's tokenizer.json says; the package that some kinds need is imported on use."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fatdeploy.errors import BackendUnavailable, BundleError, SpecMismatch
from fatdeploy.runtimes.text.tokenizer_json import SPECIAL, UNK, TokenizerFile, file_from_json, is_unicode


@dataclass(frozen=True)
class Encoded:
    """A source's tokens, of which the last ``closing`` stay where they are when it is cut.

    ``unknown`` are characters that there is no token for, in the order of the text.
    """

    ids: NDArray[np.generic]
    closing: int = 0
    unknown: tuple[str, ...] = ()

    def cut(self, most: int) -> NDArray[np.generic]:
        """Return at most so many tokens: the first ones, and those that close every source."""
        if self.ids.ndim != 1 or len(self.ids) <= most:
            return self.ids
        closing = min(self.closing, most)
        return np.concatenate([self.ids[: most - closing], self.ids[len(self.ids) - closing :]])


class Tokenizer(Protocol):
    """Reads and writes the text of one bundle."""

    @property
    def n_tokens(self) -> int:
        """How many tokens it knows."""

    def encoded(self, text: str) -> Encoded:
        """Return a text's tokens, with the special ones around it that the model was trained with."""

    def text(self, tokens: ArrayLike) -> str:
        """Return what tokens say, special ones left out."""

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target: none are put around it."""

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first, have said what they say whatever follows them."""


def tokenizer_from_file(path: Path) -> Tokenizer:
    """Return the tokenizer of a file; characters and symbols of ours need no package, all others do."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    return tokenizer_from_json(content, path)


def tokenizer_from_json(content: str, path: Path) -> Tokenizer:
    """Return the tokenizer that the content of a file describes; errors name the file."""
    try:
        own = file_from_json(content)
    except ValueError as error:
        raise _unreadable(path, error) from error
    if own is None or own.kind == "bpe":
        return PackageTokenizer(content, path)
    return CharacterTokenizer(own)


class CharacterTokenizer:
    """Reads sources character by character; targets are characters, too, or symbols with blanks between them."""

    def __init__(self, file: TokenizerFile) -> None:
        self.n_tokens = len(file.tokens)
        self._unknown = file.tokens.index(UNK)
        # Without the special ones: a text that spells their names does not mean them.
        self._ids = {token: index for index, token in enumerate(file.tokens) if token not in SPECIAL[file.kind]}
        self._tokens = {index: token for token, index in self._ids.items()}
        self._has_symbols = file.kind == "symbols"

    def encoded(self, text: str) -> Encoded:
        """Return a token for each character; none are around them."""
        found = self._found(_checked(text))
        # Nobody but who has unknown characters pays for looking them up.
        unknown = tuple(one for one in text if one not in self._ids) if self._unknown in found else ()
        return Encoded(np.array(found, np.int64), unknown=unknown)

    def text(self, tokens: ArrayLike) -> str:
        """Return what tokens say, special ones left out."""
        ids, known = np.asarray(tokens, np.int64).tolist(), self._tokens
        return (" " if self._has_symbols else "").join(known[one] for one in ids if one in known)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target, one for each character or symbol."""
        return self._found(_checked(text).split() if self._has_symbols else _checked(text))

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return how many tokens there are: what one says does not depend on others."""
        return len(tokens)

    def _found(self, tokens: Sequence[str]) -> tuple[int, ...]:
        return tuple(self._ids.get(token, self._unknown) for token in tokens)


class PackageTokenizer:
    """What the tokenizers package makes of a file."""

    def __init__(self, content: str, path: Path) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise BackendUnavailable(
                f"text of {path} needs tokenizers ({error}): pip install 'fatdeploy[text]'"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the package raises nothing more special
            raise _unreadable(path, error) from error
        # What the file says of these would drop tokens without a word, or add some.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._byte_ids = {self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token for token, one in added.items() if one.special}

    @property
    def n_tokens(self) -> int:
        """How many tokens it knows."""
        return int(self._tokenizer.get_vocab_size())

    def encoded(self, text: str) -> Encoded:
        """Return a text's tokens, with the special ones around it that the model was trained with."""
        found = self._encoding(text, special=True)
        closing = sum(takewhile(bool, reversed(found.special_tokens_mask)))
        return Encoded(np.array(found.ids, np.int64), closing)

    def text(self, tokens: ArrayLike) -> str:
        """Return what tokens say, special ones left out."""
        return str(self._tokenizer.decode(np.asarray(tokens, np.int64).tolist()))

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target: none are put around it."""
        return tuple(self._encoding(text, special=False).ids)

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first, have said what they say whatever follows them.

        Tokens that stand for single bytes become characters only if all bytes of a run are valid together: one more
        byte can change what the run was before. Tokens that are not written do not end a run.
        """
        end = len(tokens)
        while self._byte_ids and end and (tokens[end - 1] in self._byte_ids or self._is_unwritten(tokens[end - 1])):
            end -= 1
        return end

    def _is_unwritten(self, token: int) -> bool:
        return token in self._special_ids or self._tokenizer.id_to_token(token) is None

    def _encoding(self, text: str, *, special: bool) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=special)
        except TypeError as error:  # what no UTF-8 can say
            raise _not_unicode(text) from error


def _unreadable(path: Path, error: Exception) -> BundleError:
    return BundleError(f"cannot read {path}: {' '.join(str(error).split())}; export the bundle again")


def _checked(text: str) -> str:
    if not is_unicode(text):
        raise _not_unicode(text)
    return text


def _not_unicode(text: str) -> SpecMismatch:
    return SpecMismatch(f"a text must be valid Unicode, found {text[:40]!r}")
