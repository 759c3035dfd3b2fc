"""Stop sequences: token ids, or text that may begin and end inside a token."""

from collections.abc import Callable, Sequence
from copy import copy

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.prompts import PrefixIds

TextOf = Callable[[Sequence[int]], str]


class Stops:
    """Finds the end of a target that contains a stop sequence; ``prefixes`` are the sources' own."""

    def __init__(
        self, options: DecodeOptions, text_of: TextOf | None, prefixes: Sequence[tuple[int, ...]] = ((),)
    ) -> None:
        self.ids = [list(stop) for stop in options.stop if not isinstance(stop, str)]
        self.texts = [stop for stop in options.stop if isinstance(stop, str)]
        self._text_of = text_of
        if self.texts and text_of is None:
            raise ConfigError("stop refused: text needs a tokenizer and there is none; pass token ids")
        self._prefix_lengths = [0] * len(prefixes)  # in characters, per source
        if self.texts and text_of is not None:
            lengths = {prefix: len(text_of(prefix)) if prefix else 0 for prefix in set(prefixes)}
            self._prefix_lengths = [lengths[prefix] for prefix in prefixes]

    def __bool__(self) -> bool:
        return bool(self.ids or self.texts)

    def part(self, sources: Sequence[int]) -> "Stops":
        """Return the same for some of the sources."""
        stops = copy(self)
        stops._prefix_lengths = [self._prefix_lengths[source] for source in sources]
        return stops

    @property
    def reach(self) -> int | None:
        """How many of the last tokens, including the prefix, ``cut`` needs; None if all of them."""
        return None if self.texts else max(map(len, self.ids), default=0)

    def cut(self, tokens: list[int], source: int) -> int | None:
        """Return how many of its last tokens a source's target loses if its newest ends it; None if it goes on.

        The tokens of stop ids are dropped. A stop text may end inside a token, so all tokens stay and the text is cut.
        """
        for stop in self.ids:
            if tokens[-len(stop) :] == stop:
                return len(stop)
        if self.texts and self._text_of is not None:
            text = self._text_of(tokens)
            return None if text_end(text, self.texts, self._prefix_lengths[source]) is None else 0
        return None


def text_of_result(text_of: TextOf, result: Hypothesis, stops: Sequence[str | Sequence[int]], prefix: PrefixIds) -> str:
    """Return the text of a result, which ends where a stop begins if one ended it."""
    text = text_of(result.tokens)
    if result.finish != "stop":
        return text
    return cut_text(text, [stop for stop in stops if isinstance(stop, str)], len(text_of(tuple(prefix))))


def cut_text(text: str, stops: Sequence[str], prefix_length: int = 0) -> str:
    """Return a text up to the first stop in it."""
    return text[: text_end(text, stops, prefix_length)]


def text_end(text: str, stops: Sequence[str], prefix_length: int = 0) -> int | None:
    """Return where the first stop begins in a text; None if there is none.

    A stop that lies within the first ``prefix_length`` characters, those of a prefix, does not count.
    """
    places = (text.find(stop, max(0, prefix_length + 1 - len(stop))) for stop in stops)
    return min((place for place in places if place >= 0), default=None)
