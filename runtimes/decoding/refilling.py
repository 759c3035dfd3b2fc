"""Finished sources of a batch are replaced by waiting ones, so that all rows of every step are worth their time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fatdeploy.runtimes.decoding.search import Move, Refillable
from fatdeploy.runtimes.engines.protocol import Refilling, Rows


@dataclass(frozen=True)
class Waiting:
    """Sources of a task that wait for the places of finished ones."""

    # Takes some sources, by index, no longer ones after shorter ones: at least the number that is asked for, fewer only
    # if no more will come. What is taken beyond that number is encoded with the others, and waits.
    take: Callable[[int], Sequence[int]]
    # How many places are free before sources join, as a share of all.
    share: float = 1 / 16


@dataclass
class _Encoded:
    """Sources that were encoded together; those before ``begin`` have joined."""

    state: Any
    sources: Sequence[int]
    begin: int = 0

    @property
    def n_left(self) -> int:
        return len(self.sources) - self.begin


class Refill:
    """Lets waiting sources join a batch of a number of places; ``encode`` makes a state of sources of the task.

    Sources are encoded before there are places for all of them: an encoder reads many at once in less time.
    """

    def __init__(
        self,
        engine: Refilling[Any],
        search: Refillable,
        waiting: Waiting,
        n_places: int,
        encode: Callable[[Sequence[int]], Any],
    ) -> None:
        self._engine, self._search, self._waiting, self._encode = engine, search, waiting, encode
        self._n_places = n_places
        self._awaits = True
        self._encoded: _Encoded | None = None

    def refilled(self, state: Any, move: Move) -> tuple[Move | None, Sequence[int]]:
        """Return the move of all rows, None if no source is left, and the sources that joined."""
        newcomers: list[int] = []
        if self._awaits:
            free = self._search.free_places()
            if len(free) >= max(1, self._waiting.share * self._n_places):
                newcomers = self._fill(state, free)
                if len(newcomers) < len(free):
                    self._awaits = False
                    self._search.expect_no_more()
                if not newcomers and len(free) == self._n_places:
                    return None, newcomers
                if newcomers:
                    move = self._search.join(move, free[: len(newcomers)], newcomers)
        if move.resting is not None and len(move.resting):
            self._engine.rest(state, move.resting)
        return move, newcomers

    def close(self) -> None:
        """Return the state of sources that never joined."""
        encoded, self._encoded = self._encoded, None
        if encoded is not None:
            self._engine.release(encoded.state)

    def _fill(self, state: Any, places: Rows) -> list[int]:
        """Let encoded sources take places; return them, fewer than places only if no more will come."""
        newcomers: list[int] = []
        while len(newcomers) < len(places):
            missing = places[len(newcomers) :]
            encoded = self._encoded or self._encoded_next(len(missing))
            if encoded is None:
                break
            count = min(encoded.n_left, len(missing))
            chosen = slice(encoded.begin, encoded.begin + count)
            self._engine.refill(state, missing[:count], encoded.state, chosen)
            newcomers += encoded.sources[chosen]
            encoded.begin += count
            if not encoded.n_left:
                self.close()
        return newcomers

    def _encoded_next(self, count: int) -> _Encoded | None:
        sources = self._waiting.take(count)
        if sources:
            self._encoded = _Encoded(self._encode(sources), sources)
        return self._encoded
