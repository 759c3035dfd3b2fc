"""Stop sequences: token ids, or text that may begin and end inside of tokens."""

from collections.abc import Callable, Sequence

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.options import DecodeOptions

TextOf = Callable[[Sequence[int]], str]


class Stops:
    """Says where a target ends that says one of them."""

    def __init__(self, options: DecodeOptions, text_of: TextOf | None) -> None:
        self.ids = [list(one) for one in options.stop if not isinstance(one, str)]
        self.texts = [one for one in options.stop if isinstance(one, str)]
        self._text_of = text_of
        if self.texts and text_of is None:
            raise ConfigError("stop refused: text needs a tokenizer, and here is none; pass token ids")
        self._n_given = len(text_of(options.prefix_ids)) if self.texts and text_of and options.prefix else 0

    def __bool__(self) -> bool:
        return bool(self.ids or self.texts)

    @property
    def reach(self) -> int | None:
        """How many of the last tokens of a target it must see, the prefix included; None if all of them."""
        return None if self.texts else max(map(len, self.ids), default=0)

    def cut(self, tokens: list[int]) -> int | None:
        """Return how many of the last tokens a target loses that just said the last one, if that ends it.

        Those of stop ids are left out. A stop text may end inside of a token, so all tokens stay and the text is cut.
        """
        for stop in self.ids:
            if tokens[-len(stop) :] == stop:
                return len(stop)
        if self.texts and self._text_of is not None:
            text = self._text_of(tokens)
            return None if text_end(text, self.texts, self._n_given) is None else 0
        return None


def cut_text(text: str, stops: Sequence[str], n_given: int = 0) -> str:
    """Return a text up to the first of the stops in it."""
    return text[: text_end(text, stops, n_given)]


def text_end(text: str, stops: Sequence[str], n_given: int = 0) -> int | None:
    """Return where a text ends that says one of the stops: before the first of them.

    What lies in the first ``n_given`` characters, those of a prefix, was said by nobody.
    """
    places = (text.find(stop, max(0, n_given + 1 - len(stop))) for stop in stops)
    return min((place for place in places if place >= 0), default=None)
