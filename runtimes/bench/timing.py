"""One decode with a clock: its phases, every step, and what it said. The loop is the one that applications run."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.spec import ModelSpec

STATUS = Path("/proc/self/status")
# Small buffers cost more in calls than in reading; the bandwidth of a small model is that of a small cache.
SMALLEST_BUFFER = 1 << 20
READS = 8  # of which the quickest counts: others were disturbed


@dataclass(frozen=True)
class Times:
    """Seconds of one decode: reading the sources, each step with the choice of its tokens, and all of it."""

    encode: float
    steps: tuple[float, ...]
    end_to_end: float
    device_steps: tuple[float, ...] | None = None  # what the device itself says of each step, where it has a clock


class Stopwatch(Protocol):
    """A clock that runs with a device's work: CUDA events."""

    def mark(self) -> None:
        """Put a mark behind all that was asked of the device so far; nothing waits for it."""
        ...

    def seconds(self) -> list[float]:
        """Return the seconds of the device's work from each mark to the next, when all is done, and forget them."""
        ...


@runtime_checkable
class Clocked(Protocol):
    """What an engine offers, beside its verbs, whose device has a clock."""

    def stopwatch(self) -> Stopwatch:
        """Return a clock for the calls of this thread."""
        ...


def stopwatch_of(engine: Engine[Any]) -> Stopwatch | None:
    """Return the clock of an engine's device, where it offers one."""
    return engine.stopwatch() if isinstance(engine, Clocked) else None


class Endless:
    """Another engine whose model has no EOS that could be said: every decode does the same work."""

    def __init__(self, engine: Engine[Any]) -> None:
        # Not suppressed by a control: that would copy every score of every step, and be measured.
        self.spec = replace(engine.spec, eos_id=engine.spec.vocab_size)
        self.encode, self.step, self.reorder = engine.encode, engine.step, engine.reorder
        self.length_log_probs, self.output_rows = engine.length_log_probs, engine.output_rows
        self.release, self.close = engine.release, engine.close


def timed_decode(
    engine: Engine[Any],
    sources: Sequence[NDArray[np.int64]],
    options: DecodeOptions,
    stopwatch: Stopwatch | None = None,
) -> tuple[Times, list[tuple[int, ...]]]:
    """Return the times of a decode, and each source's tokens."""
    clock = time.perf_counter
    mark = None if stopwatch is None else stopwatch.mark
    marks = [clock()]
    with Decoding(engine, sources, options) as decoding:
        marks.append(clock())
        if mark is not None:
            mark()
        goes_on = True
        while goes_on:
            goes_on = decoding.advance()
            marks.append(clock())
            if mark is not None:
                mark()
        found = decoding.results()
    ended = clock()
    seconds = np.diff(marks).tolist()
    device = None if stopwatch is None else tuple(stopwatch.seconds())
    return Times(seconds[0], tuple(seconds[1:]), ended - marks[0], device), [one.tokens for one in found]


def random_sources(spec: ModelSpec, count: int, length: int) -> list[NDArray[np.int64]]:
    """Return the same sources on every machine; a small batch is the beginning of a large one."""
    plain = np.setdiff1d(np.arange(spec.vocab_size), [spec.pad_id, spec.bos_id, spec.eos_id])
    # One generator a row, or else the rows of a batch would depend on its size.
    return [np.random.default_rng([row, length]).choice(plain, length) for row in range(count)]


def peak_bytes() -> int | None:
    """Return how much of this process ever was in memory at once; None where the system does not tell it."""
    if STATUS.exists():
        # Not getrusage: on Linux a new process begins with the peak of the one that started it.
        [kilobytes] = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(kilobytes) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def read_bandwidth(n_bytes: int, threads: int) -> float:
    """Return how many bytes a second so many threads read, again and again, of a buffer of a size.

    The size is that of the weights, so that what stays in a cache for them does for the buffer, too.
    """
    parts = np.array_split(np.ones(max(n_bytes, SMALLEST_BUFFER), np.uint8), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = [_seconds_of_reading(pool, parts) for _ in range(READS)]
    return sum(part.nbytes for part in parts) / min(seconds)


def _seconds_of_reading(pool: ThreadPoolExecutor, parts: Sequence[NDArray[np.uint8]]) -> float:
    started = time.perf_counter()
    # Of numpy's reductions the largest byte is among the quickest: as fast as the memory from one core on.
    list(pool.map(np.max, parts))
    return time.perf_counter() - started
