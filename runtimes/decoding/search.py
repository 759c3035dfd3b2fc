"""What every search does: it turns an engine's output into tokens and rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import RawTarget
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.prompts import Prompt
from fatdeploy.runtimes.decoding.stops import Stops
from fatdeploy.runtimes.engines.protocol import Rows, StepOut, Want
from fatdeploy.runtimes.shortlist.lists import SourceLists
from fatdeploy.spec import ModelSpec, Tokens

# Rows of the engine: all of them, or their indices.
ALL = slice(None)
Selection = slice | NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """The next call: the tokens that each row reads, and which old row each continues if any row moved."""

    tokens: Tokens  # [R, t]
    parents: Rows | None = None


class Search(Protocol):
    """Turns the output of an engine into tokens until every target is complete."""

    @property
    def want(self) -> Want:
        """What a step must compute for this search."""
        ...

    def start(self) -> Move:
        """Return the first tokens to read."""
        ...

    def advance(self, out: StepOut) -> Move | None:
        """Choose the next tokens; None when every target is complete."""
        ...

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the new tokens of a source's first target so far."""
        ...

    def results(self) -> list[list[RawTarget]]:
        """Return the targets of each source, best first; unfinished ones are cancelled."""
        ...


@dataclass(frozen=True)
class Task:
    """The input of a search: options, and the sources with their prompts."""

    options: DecodeOptions
    spec: ModelSpec
    sources: Sequence[NDArray[np.generic]]
    prompts: Sequence[Prompt]
    stops: Stops
    table: SourceLists | None = None  # for shortlist="auto"

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """The number of tokens in each source's prompt: where its own choices begin."""
        return np.array([len(prompt.tokens) for prompt in self.prompts])

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The number of tokens, including the prompt, at which each source's targets are cut."""
        return np.array([prompt.end for prompt in self.prompts])

    def first_tokens(self) -> Tokens:
        """Return the first tokens to read [B, t]: as many as the shortest prompt has, one row per source."""
        length = int(self.begins.min())
        return np.array([prompt.tokens[:length] for prompt in self.prompts], np.int64)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a target."""
        return self.options.end_ids(self.spec)


def stays(alive: NDArray[np.bool_]) -> bool:
    """Whether all sources stay in the batch: removing some costs a copy, which pays once half of them are finished."""
    return bool(2 * np.count_nonzero(alive) > len(alive))
