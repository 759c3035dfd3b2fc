"""Text to tokens and back by a bundle's tokenizer.json; the package that some kinds need is imported on use."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fatdeploy.errors import BackendUnavailable, BundleError, SpecMismatch
from fatdeploy.runtimes.text.clean_up import cleaned, may_change
from fatdeploy.runtimes.text.tokenizer_json import SPECIAL, UNK, TokenizerFile, file_from_json, is_unicode


@dataclass(frozen=True)
class Encoded:
    """A source's tokens; a cut keeps the last ``closing`` ones.

    ``unknown`` are the characters without a token, in the order of the text.
    """

    ids: NDArray[np.generic]
    closing: int = 0
    unknown: tuple[str, ...] = ()

    def cut(self, most: int) -> NDArray[np.generic]:
        """Return at most ``most`` tokens: the first ones, and those that close every source."""
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
        """Return a text's tokens, with the special tokens around it that the model was trained with."""

    def text(self, tokens: ArrayLike) -> str:
        """Return the text of tokens, without special ones."""

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target, without special tokens around it."""

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first, have a text that no later token changes."""


def tokenizer_from_file(path: Path, *, clean_up: bool = False) -> Tokenizer:
    """Return the tokenizer of a file; our own characters and symbols need no package, all other kinds do.

    ``clean_up`` removes blanks before punctuation from what it writes; our own files do not ask for that.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    return tokenizer_from_json(content, path, clean_up=clean_up)


def tokenizer_from_json(content: str, path: Path, *, clean_up: bool = False) -> Tokenizer:
    """Return the tokenizer that the content of a file describes; errors name the file."""
    try:
        own = file_from_json(content)
    except ValueError as error:
        raise unreadable(path, error) from error
    if own is None or own.kind == "bpe":
        return PackageTokenizer(content, path, clean_up=clean_up)
    return CharacterTokenizer(own)


class CharacterTokenizer:
    """Reads sources character by character; targets are characters as well, or symbols separated by blanks."""

    def __init__(self, file: TokenizerFile) -> None:
        self.n_tokens = len(file.tokens)
        self._unknown = file.tokens.index(UNK)
        # Without special tokens: a text that spells their names does not mean them.
        self._ids = {token: index for index, token in enumerate(file.tokens) if token not in SPECIAL[file.kind]}
        self._tokens = {index: token for token, index in self._ids.items()}
        self._has_symbols = file.kind == "symbols"

    def encoded(self, text: str) -> Encoded:
        """Return one token per character and no special ones."""
        ids = self._looked_up(valid_unicode(text))
        # The search for unknown characters costs time, so only texts that have some pay for it.
        unknown = tuple(character for character in text if character not in self._ids) if self._unknown in ids else ()
        return Encoded(np.array(ids, np.int64), unknown=unknown)

    def text(self, tokens: ArrayLike) -> str:
        """Return the text of tokens, without special ones."""
        ids, texts = np.asarray(tokens, np.int64).tolist(), self._tokens
        return (" " if self._has_symbols else "").join(texts[token] for token in ids if token in texts)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target, one for each character or symbol."""
        return self._looked_up(valid_unicode(text).split() if self._has_symbols else valid_unicode(text))

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens: the text of one does not depend on others."""
        return len(tokens)

    def _looked_up(self, tokens: Sequence[str]) -> tuple[int, ...]:
        return tuple(self._ids.get(token, self._unknown) for token in tokens)


class PackageTokenizer:
    """A tokenizer of the tokenizers package."""

    def __init__(self, content: str, path: Path, *, clean_up: bool = False) -> None:
        self._clean_up = clean_up
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise BackendUnavailable(
                f"text of {path} needs tokenizers ({error}): pip install 'fatdeploy[text]'"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except BaseException as error:
            if not _is_of_package(error):
                raise
            raise unreadable(path, error) from error
        # These settings of the file would silently drop tokens or add some.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._byte_ids = {self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token for token, settings in added.items() if settings.special}

    @property
    def n_tokens(self) -> int:
        """How many tokens it knows."""
        return int(self._tokenizer.get_vocab_size())

    def encoded(self, text: str) -> Encoded:
        """Return a text's tokens, with the special tokens around it that the model was trained with."""
        encoding = self._encoding(text, special=True)
        closing = sum(takewhile(bool, reversed(encoding.special_tokens_mask)))
        return Encoded(np.array(encoding.ids, np.int64), closing)

    def text(self, tokens: ArrayLike) -> str:
        """Return the text of tokens, without special ones."""
        text = self._raw_text(np.asarray(tokens, np.int64).tolist())
        return cleaned(text) if self._clean_up else text

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target, without special tokens around it."""
        return tuple(self._encoding(text, special=False).ids)

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first, have a text that no later token changes.

        Tokens for single bytes become characters only if all bytes of a run are valid together, so one more byte can
        change the text of the whole run. Tokens that are not written do not end a run. Cleaning up removes blanks
        only when it sees what follows them.
        """
        end = len(tokens)
        while self._byte_ids and end and (tokens[end - 1] in self._byte_ids or self._is_unwritten(tokens[end - 1])):
            end -= 1
        while self._clean_up and end and may_change(self._raw_text(tokens[:end])):
            end -= 1
        return end

    def _raw_text(self, tokens: Sequence[int]) -> str:
        with _own_errors(f"write the tokens {str(list(tokens))[:40]}"):
            return str(self._tokenizer.decode(list(tokens)))

    def _is_unwritten(self, token: int) -> bool:
        return token in self._special_ids or self._tokenizer.id_to_token(token) is None

    def _encoding(self, text: str, *, special: bool) -> Any:
        with _own_errors(f"read {text[:40]!r}"):
            return self._tokenizer.encode(valid_unicode(text), add_special_tokens=special)


@contextmanager
def _own_errors(action: str) -> Iterator[None]:
    """Raise our error in place of the package's: bare exceptions, as without an unknown token, and panics."""
    try:
        yield
    except SpecMismatch:
        raise
    except BaseException as error:
        if not _is_of_package(error):
            raise
        raise SpecMismatch(f"the tokenizer cannot {action}: {' '.join(str(error).split())}") from error


def _is_of_package(error: BaseException) -> bool:
    """Whether the package raised an error: its panics are no Exception, and their class cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def unreadable(path: Path, error: BaseException) -> BundleError:
    """Return the error for a file of a tokenizer that cannot be read."""
    return BundleError(f"cannot read {path}: {' '.join(str(error).split())}; export the bundle again")


def valid_unicode(text: str) -> str:
    """Return a text; raise if it contains halves of surrogate pairs."""
    if not is_unicode(text):
        raise SpecMismatch(f"a text must be valid Unicode, found {text[:40]!r}")
    return text
