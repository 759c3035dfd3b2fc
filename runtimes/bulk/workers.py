"""Workers decode the jobs of a call: the calling thread, and as many others as pay."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from threading import Event, Lock, Thread
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
        self._error: BaseException | None = None

    def run(self, n_workers: int) -> None:
        """Decode everything; the first error of any worker stops all of them and is raised."""
        threads: list[Thread] = []
        try:
            for _ in range(n_workers - 1):
                thread = Thread(target=copy_context().run, args=(self._work,))
                thread.start()
                threads.append(thread)
            self._work()
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt, or no more threads: no worker may outlive the call
            self._stop(error)
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            for job in self._jobs:
                while not self._over and (batch := job.batch()) is not None:
                    self._decode(job, batch)
        except BaseException as error:  # raised where the call was made
            self._stop(error)

    @property
    def _over(self) -> bool:
        return self._stopped.is_set() or (self._deadline is not None and monotonic() >= self._deadline)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._stopped.set()

    def _decode(self, job: Job, batch: Sequence[int]) -> None:
        """Decode a batch and those that take its places, unless another worker fails."""
        n_reported = 0

        def take(count: int) -> Sequence[int]:
            nonlocal n_reported
            newcomers = job.take(count)
            # Each takes the place of a source that is complete.
            n_reported += len(newcomers)
            self._report(len(newcomers))
            return newcomers

        waiting = Waiting(take) if job.refills else None
        with Decoding.of_task(self._engine, job.task, batch, deadline=self._deadline, waiting=waiting) as decoding:
            while decoding.advance():
                if self._stopped.is_set():
                    return
            results = decoding.results()
            sources = batch if waiting is None else decoding.arrivals
        for source, result in zip(sources, results, strict=True):
            self._results[job.rows[source]] = result
        self._report(len(results) - n_reported)

    def _report(self, count: int) -> None:
        if self._progress is not None and count:
            with self._lock:
                self._progress(count)
