"""Times one decode by phase and step, in the same loop that applications run; also memory and bandwidth."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.defaults import PLAIN, changed_options, default_options
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.spec import ModelSpec

STATUS = Path("/proc/self/status")
# Reading less takes no longer than the call itself.
SMALLEST_BUFFER = 1 << 20
# Options that a bench sets back: they decide where a target begins or ends, how many there are, or draw them.
UNMEASURED = (
    *("min_new_tokens", "stop", "timeout_s", "eos_ids", "forced_eos_id", "exponential_decay_length_penalty"),
    *("prefix", "num_return_sequences", "sample", "length_candidates", "scores"),
)
READS = 8  # the fastest counts: the others were disturbed


@dataclass(frozen=True)
class Times:
    """Seconds of one decode: encoding the sources, each step with the choice of its tokens, and the whole decode."""

    encode: float
    steps: tuple[float, ...]
    end_to_end: float
    device_steps: tuple[float, ...] | None = None  # by the clock of the device, if it has one


class Stopwatch(Protocol):
    """A clock on the device: CUDA events."""

    def mark(self) -> None:
        """Queue a mark behind all work of the device so far, without waiting for it."""
        ...

    def seconds(self) -> list[float]:
        """Wait for the device, return the seconds between marks, and forget the marks."""
        ...


@runtime_checkable
class Clocked(Protocol):
    """What an engine adds to the protocol if its device has a clock."""

    def stopwatch(self) -> Stopwatch:
        """Return a clock for the calls of this thread."""
        ...


def stopwatch_of(engine: Engine[Any]) -> Stopwatch | None:
    """Return the clock of an engine's device; None if it has none."""
    return engine.stopwatch() if isinstance(engine, Clocked) else None


class Endless:
    """An engine whose EOS is no token of the model, so that every decode does the same work."""

    def __init__(self, engine: Engine[Any]) -> None:
        # Suppressing EOS with a processor would copy every score of every step, and the times would include that.
        self.spec = copy(engine.spec)
        # Past what the contract allows, and so past its checks.
        object.__setattr__(self.spec, "eos_id", engine.spec.vocab_size)
        self.encode, self.step, self.reorder = engine.encode, engine.step, engine.reorder
        self.length_log_probs = engine.length_log_probs
        self.output_rows, self.output_bias = engine.output_rows, engine.output_bias
        self.release, self.close = engine.release, engine.close


def measured_options(bundle: Bundle, *, target: int, beams: int, plain: bool) -> DecodeOptions:
    """Return what a bench decodes with: the bundle's default options, or none of them if ``plain``.

    What changes scores costs time in every step and counts. Lengths and beams are the bench's own, so that every decode
    does the same work, and nothing ends it early.
    """
    defaults = DecodeOptions() if plain else default_options(bundle)
    unmeasured = {name: PLAIN[name] for name in UNMEASURED}
    return changed_options(defaults, {**unmeasured, "max_new_tokens": target, "num_beams": beams})


def timed_decode(
    engine: Engine[Any],
    sources: Sequence[NDArray[np.int64]],
    options: DecodeOptions,
    stopwatch: Stopwatch | None = None,
) -> tuple[Times, list[tuple[int, ...]]]:
    """Return the times of a decode, and the tokens of each source."""
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
        results = decoding.results()
    ended = clock()
    seconds = np.diff(marks).tolist()
    device = None if stopwatch is None else tuple(stopwatch.seconds())
    return Times(seconds[0], tuple(seconds[1:]), ended - marks[0], device), [result.tokens for result in results]


def random_sources(spec: ModelSpec, count: int, length: int) -> list[NDArray[np.int64]]:
    """Return random sources, the same on every machine; a small batch is the beginning of a large one."""
    ordinary = spec.ordinary_ids()
    # One generator per row: rows must not depend on the size of their batch.
    return [np.random.default_rng([row, length]).choice(ordinary, length) for row in range(count)]


def peak_bytes() -> int | None:
    """Return the peak memory of this process; None if the system does not report it."""
    if STATUS.exists():
        # Not getrusage: on Linux a new process inherits the peak of its parent.
        [kilobytes] = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(kilobytes) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_bandwidth(n_bytes: int, threads: int) -> float:
    """Return how many bytes per second a number of threads can read from a buffer of a size.

    The size is that of the weights, so that the buffer fits into the same caches as they do.
    """
    parts = np.array_split(np.ones(max(n_bytes, SMALLEST_BUFFER), np.uint8), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = [_seconds_of_reading(pool, parts) for _ in range(READS)]
    return sum(part.nbytes for part in parts) / min(seconds)


def _seconds_of_reading(pool: ThreadPoolExecutor, parts: Sequence[NDArray[np.uint8]]) -> float:
    started = time.perf_counter()
    # max is among the fastest reductions of numpy: one core is as fast as the memory.
    list(pool.map(np.max, parts))
    return time.perf_counter() - started
