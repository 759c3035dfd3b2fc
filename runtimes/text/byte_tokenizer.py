"""Text as bytes: one token per byte, after the special tokens. It needs no package."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fatdeploy.runtimes.text.added_tokens import AddedTokens
from fatdeploy.runtimes.text.tokenizer import Encoded, valid_unicode
from fatdeploy.text import TextRecord

# The special tokens before the first byte: padding, end and unknown.
OFFSET = 3


class ByteTokenizer:
    """ByT5's tokenizer."""

    def __init__(self, record: TextRecord) -> None:
        self._added = AddedTokens(record.added)
        self._after = record.after
        self.n_tokens = max([256 + OFFSET, *(token.id + 1 for token in record.added.values())])
        special = set(record.special)
        self._names = {token.id: name.encode() for name, token in record.added.items() if token.id not in special}

    def encoded(self, text: str) -> Encoded:
        """Return one token per byte and the one that ends a source, unless the text spells it."""
        ids = self.plain_ids(text)
        after = () if ids[-len(self._after) :] == self._after else self._after
        return Encoded(np.array([*ids, *after], np.int64), len(after))

    def text(self, tokens: ArrayLike) -> str:
        """Return the text of tokens; bytes that are not a character are not written."""
        return b"".join(self._bytes(token) for token in np.asarray(tokens, np.int64).tolist()).decode(errors="ignore")

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target, without the one that ends it."""
        ids: list[int] = []
        for part in self._added.split(valid_unicode(text)):
            ids += [part] if isinstance(part, int) else [byte + OFFSET for byte in part.encode()]
        return tuple(ids)

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens: incomplete characters are not written, and later bytes change none before."""
        return len(tokens)

    def _bytes(self, token: int) -> bytes:
        if OFFSET <= token < 256 + OFFSET:
            return bytes([token - OFFSET])
        return self._names.get(token, b"")
