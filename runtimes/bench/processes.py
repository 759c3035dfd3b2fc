"""The turns of a bench, each in a process of its own: idle threads of one engine would spin on another's cores."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fatdeploy
from fatdeploy import errors
from fatdeploy.errors import BenchFailed, FatdeployError
from fatdeploy.records import json_from_record
from fatdeploy.runtimes.bench.plan import BenchPlan, Turn

MODULE = "fatdeploy.runtimes.bench.turn"
Ticked = Callable[[int], object]
# What one round of each plan, by its number, and of each number of threads told.
Results = dict[tuple[int, int], list[dict[str, Any]]]


def turns_of(plans: Sequence[BenchPlan]) -> Iterator[tuple[int, Turn]]:
    """Yield each plan's number and turn; rounds alternate: all bundles and threads once before any again."""
    for index in range(max(plan.asked.rounds for plan in plans)):
        for number, plan in enumerate(plans):
            for threads in plan.asked.threads:
                yield number, plan.turn(threads, index)


def ticks_of(turn: Turn) -> int:
    """Return how often a turn says that it goes on: once it is checked, and after each repetition."""
    return 1 + turn.repetitions


def measured(turns: Sequence[tuple[int, Turn]], ticked: Ticked) -> Results:
    """Return what each turn tells, in order, by plan and threads."""
    results: Results = {}
    for number, turn in turns:
        results.setdefault((number, turn.threads), []).append(result_apart(turn, ticked))
    return results


def result_apart(turn: Turn, ticked: Ticked) -> dict[str, Any]:
    """Return what a process of its own measures; its error is raised here."""
    command = [sys.executable, "-P", "-m", MODULE, json.dumps(json_from_record(turn))]
    # The program is this Python, the argument our own JSON.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as process:  # noqa: S603
        try:
            told = _last_message(process, ticked)
        except BaseException:
            process.kill()
            raise
    if "result" in told:
        result: dict[str, Any] = told["result"]
        return result
    if "error" in told:
        raise _error(**told["error"])
    raise BenchFailed(f"{turn.bundle}: {_ending(process.returncode)} while it measured {turn.threads} threads")


def _last_message(process: subprocess.Popen[str], ticked: Ticked) -> dict[str, Any]:
    """Return the message that ends a turn; empty if the process ended without one."""
    told: dict[str, Any] = {}
    for line in process.stdout or ():
        told = json.loads(line)
        ticked(told.get("ticks", 0))
    return {} if "ticks" in told else told


def _environment() -> dict[str, str]:
    """Return the environment in which a process imports this very fatdeploy, and numpy takes no thread of its own."""
    here = str(Path(fatdeploy.__file__).parent.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}


def _error(kind: str, message: str) -> FatdeployError:
    found = getattr(errors, kind, BenchFailed)
    error: FatdeployError = found(message)
    return error


def _ending(code: int) -> str:
    if code == -9:
        return "the measuring process was killed (perhaps there is too little memory: try smaller --batch, --beams)"
    return f"the measuring process ended with exit code {code}"
