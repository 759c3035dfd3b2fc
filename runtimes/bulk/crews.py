"""Who decodes many sources on this machine: one worker with all threads, or several with one thread each."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

from fatdeploy.errors import BundleReplaced
from fatdeploy.measured import kept
from fatdeploy.runtimes.bulk.speed import PATIENCE_S, Speeds
from fatdeploy.runtimes.closing import ClosedOnExit
from fatdeploy.runtimes.engines.protocol import Engine

log = logging.getLogger("fatdeploy")

# Fewer rows than this are decoded sooner than another engine is opened.
ROWS_TO_OPEN = 256
# Once there is an engine, workers that share fewer rows are not faster than all threads on one batch.
ROWS_TO_SHARE = 64
# Rows of a batch to choose from.
ROWS = (32, 64, 128)
# A larger batch takes more memory and is full for a smaller part of the time, so it must be faster by this.
WORTH = 1.03


@dataclass(frozen=True)
class Crew:
    """The engine that workers share, how many there are, and how many rows each decodes at once."""

    engine: Engine[Any]
    workers: int
    rows: int


class Crews(ClosedOnExit):
    """The crew for many sources, found when it is first needed: what is faster is measured once and kept.

    ``engine`` uses a number of ``threads``, and ``opened`` opens another one that uses one. ``key`` identifies what is
    measured: the bundle, its runtime and the threads.
    """

    def __init__(self, engine: Engine[Any], threads: int, opened: Callable[[], Engine[Any]], key: str) -> None:
        self._engine, self._threads, self._opened, self._key = engine, threads, opened, key
        self._lock = Lock()
        self._single: Engine[Any] | None = None
        self._crew: Crew | None = None

    def crew_for(self, n_rows: int, *, hurried: bool = False) -> Crew | None:
        """Return the crew for a number of rows; None if they are decoded sooner without one.

        A call in a hurry does not wait for a measurement.
        """
        with self._lock:
            if self._crew is None and n_rows >= ROWS_TO_OPEN and not hurried:
                self._crew = self._found()
            return self._crew if n_rows >= ROWS_TO_SHARE else None

    def close(self) -> None:
        """Close the second engine, if there is one."""
        with self._lock:
            self._crew = None
            if self._single is not None:
                self._single.close()
                self._single = None

    def _found(self) -> Crew:
        try:
            return self._kept()
        except BundleReplaced:
            # What was loaded stays as it is, and so do all results.
            log.warning("the bundle's folder was replaced, so no workers can be added: load it again")
            return Crew(self._engine, 1, ROWS[0])

    def _kept(self) -> Crew:
        chosen = kept("bulk", self._key, self._measured)
        workers, rows = int(chosen["workers"]), int(chosen["rows"])
        engine = self._engine_of_one if workers > 1 else self._engine
        if workers == 1 and self._single is not None:
            self._single.close()
            self._single = None
        log.info("many sources are decoded by %d worker(s) in batches of up to %d rows", workers, rows)
        return Crew(engine, workers, rows)

    @property
    def _engine_of_one(self) -> Engine[Any]:
        if self._single is None:
            self._single = self._opened()
        return self._single

    def _measured(self) -> dict[str, int]:
        """Return the fastest choice, the smallest batch among those that are about as fast."""
        choices = [(self._engine, 1)]
        if self._threads > 1:
            choices.append((self._engine_of_one, self._threads))
        best, best_speed = Choice(1, ROWS[0]), 0.0
        for engine, workers in choices:
            speeds = Speeds(engine, workers, PATIENCE_S / len(choices))
            for rows in ROWS:
                speed = speeds.rows_per_second(rows)
                if speed is None:
                    break
                if speed > best_speed * WORTH:
                    best, best_speed = Choice(workers, rows), speed
        return asdict(best)


@dataclass(frozen=True)
class Choice:
    """What is kept of a measurement."""

    workers: int
    rows: int
