"""Stop sequences: token ids, or text that may begin and end inside of tokens."""

from collections.abc import Callable, Sequence

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.options import DecodeOptions

TextOf = Callable[[Sequence[int]], str]


class Stops:
    """Says where a target ends that says one of them."""

    def __init__(self, options: DecodeOptions, text_of: TextOf | None) -> None:
        self.ids = [tuple(one) for one in options.stop if not isinstance(one, str)]
        self.texts = [one for one in options.stop if isinstance(one, str)]
        self._text_of = text_of
        if self.texts and text_of is None:
            raise ConfigError("stop refused: text needs a tokenizer, and here is none; pass token ids")

    def __bool__(self) -> bool:
        return bool(self.ids or self.texts)

    def kept(self, tokens: Sequence[int]) -> int | None:
        """Return how many tokens a target that just said the last one keeps, if that ends it.

        Stop ids are left out. A stop text may end inside of a token, so all tokens stay and the text is cut.
        """
        for stop in self.ids:
            if tuple(tokens[-len(stop) :]) == stop:
                return len(tokens) - len(stop)
        if self.texts and self._text_of is not None:
            text = self._text_of(tokens)
            if any(stop in text for stop in self.texts):
                return len(tokens)
        return None


def cut_text(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the stops in it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
