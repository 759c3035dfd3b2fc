"""Tokens that a text can spell, such as ``</s>``: they are cut out before the rest is tokenised."""

import re
from collections.abc import Iterator, Mapping

from fatdeploy.text import AddedToken


class AddedTokens:
    """Cuts a text at the added tokens of a tokenizer, as transformers does."""

    def __init__(self, tokens: Mapping[str, AddedToken]) -> None:
        self._tokens = tokens
        # The longest first: of two tokens that begin alike the longer counts.
        names = sorted((name for name in tokens if name), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a text: an id for each added token, and the texts between them that are not empty."""
        parts = [text] if self._pattern is None else self._pattern.split(text)
        for index in range(1, len(parts), 2):
            token = self._tokens[parts[index]]
            if token.left:
                parts[index - 1] = parts[index - 1].rstrip()
            if token.right:
                parts[index + 1] = parts[index + 1].lstrip()
        for index, part in enumerate(parts):
            if index % 2:
                yield self._tokens[part].id
            elif part:
                yield part
