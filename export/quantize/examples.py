"""Sources to calibrate and judge a quantization with: lines of a file, or random ones for random weights."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError
from fatdeploy.pairs import error_of_lines, read_sources
from fatdeploy.runtimes.decoding.sources import wrong_source
from fatdeploy.runtimes.text.token_ids import ids_from_text
from fatdeploy.runtimes.text.tokenizer import Tokenizer
from fatdeploy.spec import ModelSpec, Tokens

# How many random sources, and their greatest length: longer ones cost much and show nothing new.
RANDOM, LONGEST_RANDOM = 32, 32


@dataclass(frozen=True)
class Example:
    """The tokens of a source and its accepted targets; none if the file has none."""

    source: Tokens
    references: tuple[str, ...] = ()


def examples_from_file(path: Path, spec: ModelSpec, tokenizer: Tokenizer | None) -> list[Example]:
    """Return each source of a file once, with all its targets; one error lists every line the model cannot read."""
    lines, wrong = read_sources(path), []
    sources: dict[str, Tokens] = {}
    targets: dict[str, list[str]] = {}
    for number, (text, target) in enumerate(lines, 1):
        if text not in sources:
            ids = _ids(text, tokenizer)
            reason = _wrong(ids, spec)
            if reason:
                wrong.append(f"source {reason} at line {number}")
                continue
            sources[text] = ids.astype(np.int64)
        targets.setdefault(text, []).extend([] if target is None else [target])
    if wrong:
        raise error_of_lines(path, wrong, f"{len(lines)} lines", "the model must be able to read every source")
    return [Example(ids, tuple(dict.fromkeys(targets[text]))) for text, ids in sources.items()]


def _ids(text: str, tokenizer: Tokenizer | None) -> NDArray[np.generic]:
    """Return the tokens of a line: those of its text or, without a tokenizer, the ids written there."""
    if tokenizer is not None:
        return tokenizer.encoded(text).ids
    try:
        return np.array(ids_from_text("source", text))
    except ConfigError:
        return np.array(text.split())


def _wrong(ids: NDArray[np.generic], spec: ModelSpec) -> str:
    """Return why a source cannot be used; empty if it can. A long one is refused: cutting it would be silent."""
    if ids.ndim == 1 and ids.size > spec.max_source:
        return f"has {ids.size} tokens, more than max_source = {spec.max_source}"
    if ids.dtype.kind == "U":
        return "is not a row of token ids separated by blanks, and the model has no tokenizer"
    return wrong_source(ids, spec)


def random_examples(spec: ModelSpec, seed: int) -> list[Example]:
    """Return random sources of random lengths."""
    draw = np.random.default_rng(seed)
    ordinary = np.array(spec.ordinary_ids())
    lengths = draw.integers(1, min(spec.max_source, LONGEST_RANDOM) + 1, RANDOM)
    return [Example(draw.choice(ordinary, length)) for length in lengths.tolist()]
