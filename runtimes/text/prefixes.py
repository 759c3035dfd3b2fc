"""Prefixes of targets: token ids in the order of generation, or text."""

from collections.abc import Callable

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.prompts import PrefixIds
from fatdeploy.runtimes.text.tokenizer import Tokenizer
from fatdeploy.spec import ModelSpec

Prefix = str | PrefixIds


def ids_of_prefix(prefix: Prefix, spec: ModelSpec, needed_tokenizer: Callable[[], Tokenizer]) -> PrefixIds:
    """Return a prefix as token ids, which nobody has checked yet."""
    if not isinstance(prefix, str):
        return prefix
    if not prefix:
        return ()
    tokenizer = needed_tokenizer()
    check_reading_order("prefix", spec)
    return tokenizer.plain_ids(prefix)


def check_reading_order(texts: str, spec: ModelSpec) -> None:
    """Refuse texts where they cannot be written as they are read."""
    if spec.target_order == "right_to_left":
        raise ConfigError(
            f"{texts} refused: this model writes from right to left, but text is read from left to right; pass token "
            "ids in the order of generation"
        )
