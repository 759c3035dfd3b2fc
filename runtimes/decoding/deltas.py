"""What of a growing target may be told already: pieces that together are exactly its tokens and its text."""

from collections.abc import Sequence
from typing import TypeVar

from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.text.tokenizer import Tokenizer

# What a decoder writes for bytes that are no character, or not yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Piece = tuple[tuple[int, ...], str | None]
Some = TypeVar("Some", str, tuple[int, ...])


class Deltas:
    """Cuts a target into pieces while it grows. What was told is never taken back, so what may change is held back.

    Of the tokens that is the beginning of a stop sequence. Of the text it is the beginning of a stop text, blanks at
    the end, which some decoders remove before punctuation, and characters that are not complete. A decoder that
    changes text that was told already, which none of the usual ones does, is waited for until it agrees again.
    """

    def __init__(self, stops: Sequence[Sequence[int] | str], tokenizer: Tokenizer | None) -> None:
        self._stop_ids = [tuple(stop) for stop in stops if not isinstance(stop, str)]
        self._stop_texts = [stop for stop in stops if isinstance(stop, str)]
        self._tokenizer = tokenizer
        self._n_told = 0
        self._told = ""

    def grown(self, said: tuple[int, ...]) -> Piece:
        """Return what is new and certain in what was said so far."""
        certain = said[: len(said) - _begun(said, self._stop_ids)]
        return self._new_tokens(certain), self._new_text(self._certain_text(certain))

    def rest(self, found: Hypothesis) -> Piece:
        """Return what was not told yet of the complete target."""
        return self._new_tokens(found.tokens), self._new_text(found.text)

    def _certain_text(self, tokens: tuple[int, ...]) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.text(tokens[: self._tokenizer.n_certain(tokens)])
        end = len(text)
        while end and (text[end - 1].isspace() or text[end - 1] == REPLACEMENT):
            end -= 1
        return text[: end - _begun(text[:end], self._stop_texts)]

    def _new_tokens(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        new = tokens[self._n_told :]
        self._n_told += len(new)
        return new

    def _new_text(self, text: str | None) -> str | None:
        if text is None:
            return None
        if not text.startswith(self._told):
            return ""
        new = text[len(self._told) :]
        self._told = text
        return new


def _begun(said: Some, stops: Sequence[Some]) -> int:
    """Return the length of the longest end of what was said that a stop begins with."""
    longest = min(len(said), max(map(len, stops), default=0))
    return next((n for n in range(longest, 0, -1) if any(said[-n:] == stop[:n] for stop in stops)), 0)
