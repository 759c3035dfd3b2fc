"""How many rows per second workers decode: a few steps of an engine, timed."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want

# A sentence as translated: its length matters less than the number of rows.
SOURCE_LENGTH = 24
STEPS = 4  # after one to warm up
# All measurements of a bundle together take about this long: larger batches are left out if small ones are slow.
PATIENCE_S = 4.0


class Speeds:
    """Times batches of growing numbers of rows on an engine that workers share, for at most ``patience_s`` seconds."""

    def __init__(self, engine: Engine[Any], workers: int, patience_s: float) -> None:
        self._engine, self._workers = engine, workers
        self._end, self._last = monotonic() + patience_s, 0.0

    def rows_per_second(self, rows: int) -> float | None:
        """Return how many rows all workers together step per second; None if there is no time left to measure it."""
        # Twice the rows take about twice as long.
        if self._last and monotonic() + 2 * self._last > self._end:
            return None
        start = monotonic()
        barrier = Barrier(self._workers)
        with ThreadPoolExecutor(self._workers) as threads:
            seconds = list(threads.map(lambda _: self._timed(rows, barrier), range(self._workers)))
        self._last = monotonic() - start
        return sum(rows / taken for taken in seconds)

    def _timed(self, rows: int, barrier: Barrier) -> float:
        """Return the seconds of a step while all workers make theirs: the best, as other programs may use the cores."""
        steps = self._steps(rows)
        try:
            next(steps)
            barrier.wait()
            return min(_seconds(steps) for _ in range(STEPS))
        except BrokenBarrierError:
            return float("inf")  # another worker raises why
        except BaseException:
            barrier.abort()  # the others must not wait
            raise
        finally:
            steps.close()

    def _steps(self, rows: int) -> Generator[None]:
        """Make steps of a batch for as long as they are asked for."""
        engine, spec = self._engine, self._engine.spec
        length = min(SOURCE_LENGTH, spec.max_source)
        source = np.arange(rows * length).reshape(rows, length) % spec.n_source_ids
        # A parallel model reads all positions in one step, and none after it.
        parallel = spec.decoding == "parallel"
        positions = min(SOURCE_LENGTH if parallel else 1 + STEPS, spec.max_target)
        tokens = np.full((rows, positions if parallel else 1), spec.bos_id, np.int64)
        while True:
            state = engine.encode(source, np.ones(source.shape, bool), Capacity(1, positions))
            try:
                for _ in range(1 if parallel else positions):
                    logits = engine.step(tokens, state, Want.LOGITS).logits
                    if logits is not None:
                        logits.argmax(-1)
                    yield
            finally:
                engine.release(state)


def _seconds(steps: Generator[None]) -> float:
    start = perf_counter()
    next(steps)
    return max(perf_counter() - start, 1e-9)
