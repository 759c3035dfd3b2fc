"""What every search does: it turns an engine's output into tokens and rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

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
    """The next call: the tokens that each row reads, and which old row each continues if any row moved.

    ``resting`` are new rows whose targets have just become complete and that stay for now.
    """

    tokens: Tokens  # [R, t]
    parents: Rows | None = None
    resting: Rows | None = None


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
        """Return the targets of each source, best first, in the order in which the sources began.

        Unfinished ones are cancelled.
        """
        ...


@runtime_checkable
class Refillable(Search, Protocol):
    """A search whose finished sources are replaced by others, so that rows are at different places.

    It is made with the task of all sources that may come, and with those that begin. While others may come, finished
    sources keep their rows, and ``advance`` never returns None.
    """

    def expect_no_more(self) -> None:
        """Let finished sources leave from now on: no other will join."""
        ...

    def free_places(self) -> Rows:
        """Return the places, among the sources of the engine, whose targets are complete."""
        ...

    def join(self, move: Move, places: Rows, sources: Sequence[int]) -> Move:
        """Let sources of the task begin at free places; return the move with their first tokens.

        A source's tokens are read one per step, from position 0 on. Rows that are still free rest.
        """
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

    def part(self, sources: Sequence[int]) -> "Task":
        """Return the task of some of the sources."""
        own = [self.sources[source] for source in sources], [self.prompts[source] for source in sources]
        return Task(self.options, self.spec, *own, self.stops.part(sources), self.table)

    def first_move(self, sources: Sequence[int], rows_per_source: int) -> Move:
        """Return the first tokens to read: as many as the shortest prompt has, the same for all rows of a source.

        All rows of a source begin together, although they read the same: one row alone is rounded otherwise, and a
        source that joins later begins in all of its rows.
        """
        prompts = [self.prompts[source].tokens for source in sources]
        length = min(map(len, prompts))
        rows = np.repeat(np.arange(len(prompts)), rows_per_source)
        tokens = np.array([prompt[:length] for prompt in prompts], np.int64)[rows]
        return Move(tokens, rows if rows_per_source > 1 else None)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a target."""
        return self.options.end_ids(self.spec)


def stays(alive: NDArray[np.bool_]) -> bool:
    """Whether all sources stay in the batch: removing some costs a copy, which pays once half of them are finished."""
    return bool(2 * np.count_nonzero(alive) > len(alive))
