"""Text to tokens and back, as a bundle's tokenizer.json says; the package that reads it is imported on use."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fatdeploy.errors import BackendUnavailable, BundleError, SpecMismatch


@dataclass(frozen=True)
class Encoded:
    """A source's tokens, of which the last ``closing`` stay where they are when it is cut."""

    ids: NDArray[np.generic]
    closing: int = 0

    def cut(self, most: int) -> NDArray[np.generic]:
        """Return at most so many tokens: the first ones, and those that close every source."""
        if self.ids.ndim != 1 or len(self.ids) <= most:
            return self.ids
        closing = min(self.closing, most)
        return np.concatenate([self.ids[: most - closing], self.ids[len(self.ids) - closing :]])


class Tokenizer:
    """Reads and writes the text of one bundle."""

    def __init__(self, path: Path) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise BackendUnavailable(f"text needs tokenizers ({error}): pip install 'fatdeploy[text]'") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more special
            reason = " ".join(str(error).split())
            raise BundleError(f"cannot read {path}: {reason}; export the bundle again") from error
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
        """Return the tokens of a part of a text: none are put around it."""
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
            raise SpecMismatch(f"a text must be valid Unicode, found {text[:40]!r}") from error
