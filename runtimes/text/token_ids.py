"""Token ids written as text, on the command line and in files. It needs no numpy: a command's help imports it."""

from fatdeploy.errors import ConfigError

# A source as a line holds it: text, or token ids.
PlainSource = str | list[int]


def ids_from_text(place: str, text: str) -> list[int]:
    """Return the token ids in a text; an error names the place where the text stands."""
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise ConfigError(f"{place}: expected token ids with blanks between them, found {text[:40]!r}") from error
