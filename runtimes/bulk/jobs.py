"""Sources with the same options, handed out to workers: longest first, in batches or one by one."""

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

from fatdeploy.runtimes.decoding.loop import refills
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.decoding.sources import MostSources, batches_of
from fatdeploy.runtimes.engines.protocol import Engine

# Sources of a batch at least if each has several rows: with fewer, a batch often waits for its longest.
FEWEST_PLACES = 16
# Positions of sources that are encoded at once while others are decoded: fewer take longer each, more leave the
# processor's cache.
ENCODED_TOGETHER = 384


class Job:
    """A task whose sources are ``rows`` of a call; any number of workers may take from it."""

    def __init__(self, task: Task, rows: Sequence[int]) -> None:
        self.task, self.rows = task, rows
        self.refills = False
        self._lock = Lock()
        self._batches: deque[list[int]] = deque()
        self._waiting: deque[int] = deque()
        self._n_workers = 1

    @property
    def n_rows(self) -> int:
        """The number of targets that are decoded in parallel, over all sources."""
        return len(self.rows) * self.task.options.rows_per_source(self.task.spec)

    def cut(self, budget: int, most_sources: MostSources | None) -> None:
        """Cut the sources into batches of at most ``budget`` positions and as many sources as an engine takes."""
        self._batches.extend(self._cut(budget, most_sources))

    def share_out(self, engine: Engine[Any], budget: int, most_rows: int, n_workers: int) -> None:
        """Cut the sources into batches for workers; where the engine can refill a batch, each worker has only one."""
        count = self.task.options.rows_per_source(self.task.spec)
        most_places = most_rows if count == 1 else max(most_rows // count, FEWEST_PLACES)
        places = max(1, min(most_places, -(-len(self.rows) // n_workers)))
        batches = self._cut(budget, lambda *_: places)
        self.refills, self._n_workers = refills(engine, self.task), n_workers
        if not self.refills:
            self._batches.extend(batches)
            return
        # Any source may come to any batch: the longest target needs room in all of them.
        longest = len(self.task.sources[batches[0][0]]) + int(self.task.ends.max()) - 1
        places = max(1, min(places, budget // (count * longest)))
        order = [source for batch in batches for source in batch]
        begins = range(0, min(len(order), n_workers * places), places)
        self._batches.extend(order[begin : begin + places] for begin in begins)
        self._waiting.extend(order[n_workers * places :])

    def batch(self) -> list[int] | None:
        """Take the sources of a batch, by index in the task; None if there are no more."""
        with self._lock:
            return self._batches.popleft() if self._batches else None

    def take(self, count: int) -> list[int]:
        """Take a number of sources that wait for a place in a batch, longest first, or all if they are fewer.

        More are taken while there are enough for all workers: they are encoded together.
        """
        with self._lock:
            if not self._waiting:
                return []
            together = max(count, ENCODED_TOGETHER // max(1, len(self.task.sources[self._waiting[0]])))
            if len(self._waiting) > self._n_workers * together:
                count = together
            return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def _cut(self, budget: int, most_sources: MostSources | None) -> list[list[int]]:
        task = self.task
        lengths, positions = [len(source) for source in task.sources], [int(end) - 1 for end in task.ends]
        return batches_of(lengths, task.options.rows_per_source(task.spec), positions, budget, most_sources)
