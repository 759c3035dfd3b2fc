"""Finished sources of a batch are replaced by waiting ones, so that all rows of every step are worth their time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fatdeploy.runtimes.decoding.search import Move, Refillable
from fatdeploy.runtimes.engines.protocol import Refilling


@dataclass(frozen=True)
class Waiting:
    """Sources of a task that wait for the places of finished ones."""

    # Takes up to a number of sources, by index, no longer ones after shorter ones; fewer only if no more will come.
    take: Callable[[int], Sequence[int]]
    # How many places are free before sources are encoded for them, as a share of all. Of 1/32 to 1/5 this was fastest
    # with 48, 64 and 96 rows: four sources are encoded almost as fast as sixteen, and every free row is computed.
    share: float = 1 / 16


class Refill:
    """Lets waiting sources join a batch of a number of places; ``encode`` makes a state of sources of the task."""

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

    def refilled(self, state: Any, move: Move) -> tuple[Move | None, Sequence[int]]:
        """Return the move of all rows, None if no source is left, and the sources that joined."""
        newcomers: Sequence[int] = ()
        if self._awaits:
            free = self._search.free_places()
            if len(free) >= max(1, self._waiting.share * self._n_places):
                newcomers = self._waiting.take(len(free))
                if len(newcomers) < len(free):
                    self._awaits = False
                    self._search.expect_no_more()
                if not newcomers and len(free) == self._n_places:
                    return None, newcomers
                if newcomers:
                    places = free[: len(newcomers)]
                    joining = self._encode(newcomers)
                    try:
                        self._engine.refill(state, places, joining)
                    finally:
                        self._engine.release(joining)
                    move = self._search.join(move, places, newcomers)
        if move.resting is not None and len(move.resting):
            self._engine.rest(state, move.resting)
        return move, newcomers
