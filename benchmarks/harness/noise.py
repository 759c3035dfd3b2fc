"""How quiet a machine is: fixed work before and after a turn, which is repeated while others use the cores."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

REPETITIONS = 9
IN_CACHE, IN_MEMORY = 1 << 15, 1 << 23  # numbers of float64 per core
PASSES = {IN_CACHE: 48, IN_MEMORY: 4}


@dataclass
class NoiseProbe:
    """Repeats a turn, a few times at most, during which fixed work was slower than its best by more than ``limit``."""

    limit: float = 1.10
    attempts: int = 3
    best: dict[str, float] = field(default_factory=dict)  # seconds by kind of work

    def measured(self, measure: Callable[[], Any]) -> dict[str, Any]:
        """Return the result of the quietest attempt, the slowdown of the fixed work, and the number of attempts."""
        attempts: list[dict[str, Any]] = []
        before = self._probed()
        while len(attempts) < self.attempts:
            result = measure()
            after = self._probed()
            slowdown = max(seconds / self.best[kind] for work in (before, after) for kind, seconds in work.items())
            attempts.append({"result": result, "slowdown": slowdown})
            if slowdown <= self.limit:
                break
            before = after
        return {**min(attempts, key=lambda attempt: attempt["slowdown"]), "attempts": len(attempts)}

    def facts(self, turns: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what a result says about the noise of its turns."""
        return {
            "limit": self.limit,
            "noisy_share": sum(turn["slowdown"] > self.limit for turn in turns) / len(turns),
            "repeated": sum(turn["attempts"] - 1 for turn in turns),
            "largest_slowdown": max(turn["slowdown"] for turn in turns),
        }

    def _probed(self) -> dict[str, float]:
        seconds = fixed_work()
        self.best = {kind: min(taken, self.best.get(kind, taken)) for kind, taken in seconds.items()}
        return seconds


def fixed_work() -> dict[str, float]:
    """Return the median seconds of arithmetic and of memory reads on all cores at once."""
    cores = os.cpu_count() or 1
    works: dict[str, tuple[int, Callable[[np.ndarray], object]]] = {
        "arithmetic": (IN_CACHE, np.sin),
        "memory": (IN_MEMORY, np.sum),
    }
    seconds = {}
    with ThreadPoolExecutor(cores) as pool:
        for kind, (size, work) in works.items():
            arrays = [np.ones(size) for _ in range(cores)]
            times = []
            for _ in range(REPETITIONS):
                started = time.perf_counter()
                list(pool.map(lambda array, work=work: [work(array) for _ in range(PASSES[array.size])], arrays))
                times.append(time.perf_counter() - started)
            seconds[kind] = float(np.median(times))
    return seconds
