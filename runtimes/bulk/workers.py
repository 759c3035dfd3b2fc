"""Workers decode the jobs of a call: the calling thread, and as many others as pay."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from threading import Event, Lock
from time import monotonic
from typing import Any

from fatdeploy.runtimes.bulk.jobs import Job
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.refilling import Waiting
from fatdeploy.runtimes.engines.protocol import Engine

Progress = Callable[[int], None]


class Workers:
    """Decodes jobs and writes their results; a source that has not begun by the deadline keeps the result it had.

    ``progress`` gets the number of sources that are complete, from any worker but never from two at once.
    """

    def __init__(
        self,
        engine: Engine[Any],
        jobs: Sequence[Job],
        results: list[Hypothesis],
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._engine, self._jobs, self._results = engine, jobs, results
        self._deadline, self._progress = deadline, progress
        self._lock = Lock()
        self._stopped = Event()

    def run(self, n_workers: int) -> None:
        """Decode everything; an error of any worker stops all of them and is raised."""
        if n_workers == 1:
            self._work()
            return
        # Leaving the block waits for all workers: none outlives the call.
        with ThreadPoolExecutor(n_workers - 1) as threads:
            others = [threads.submit(copy_context().run, self._work) for _ in range(n_workers - 1)]
            self._work()
            try:
                wait(others)
            finally:
                self._stopped.set()  # after an interrupt
        for worker in others:
            worker.result()

    def _work(self) -> None:
        try:
            for job in self._jobs:
                while not self._over and (batch := job.batch()) is not None:
                    self._decode(job, batch)
        except BaseException:
            self._stopped.set()
            raise

    @property
    def _over(self) -> bool:
        return self._stopped.is_set() or (self._deadline is not None and monotonic() >= self._deadline)

    def _decode(self, job: Job, batch: Sequence[int]) -> None:
        """Decode a batch and those that take its places, unless another worker fails."""
        waiting = Waiting(job.take) if job.refills else None
        n_reported = 0
        with Decoding.of_task(self._engine, job.task, batch, deadline=self._deadline, waiting=waiting) as decoding:
            while decoding.advance():
                if self._stopped.is_set():
                    return
                # Each source that joined has the place of one that is complete.
                n_joined = len(decoding.arrivals) - len(batch)
                self._report(n_joined - n_reported)
                n_reported = n_joined
            results = decoding.results()
            sources = batch if waiting is None else decoding.arrivals
        for source, result in zip(sources, results, strict=True):
            self._results[job.rows[source]] = result
        self._report(len(results) - n_reported)

    def _report(self, count: int) -> None:
        if self._progress is not None and count:
            with self._lock:
                self._progress(count)
