"""Runs each turn in a process of its own: idle threads of one engine would spin on the cores of another.

The process prints one JSON object per line: ``ticks`` while it works, then ``result`` or ``error``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

import fatdeploy
from fatdeploy import errors
from fatdeploy.errors import BenchFailed, FatdeployError
from fatdeploy.records import json_from_record
from fatdeploy.runtimes.bench.plan import BenchPlan, Turn
from fatdeploy.runtimes.bench.table import counted

MODULE = "fatdeploy.runtimes.bench.turn"
OnTick = Callable[[int], object]
# The results of all rounds, by the number of the plan and the number of threads.
Results = dict[tuple[int, int], list[dict[str, Any]]]


def turns_of(plans: Sequence[BenchPlan]) -> Iterator[tuple[int, Turn]]:
    """Yield the number of a plan and a turn; each round measures all bundles and threads before the next begins."""
    for index in range(max(plan.request.rounds for plan in plans)):
        for number, plan in enumerate(plans):
            for threads in plan.request.threads:
                yield number, plan.turn(threads, index)


def ticks_of(turn: Turn) -> int:
    """Return how often a turn ticks: after its check, and after each repetition."""
    return 1 + turn.repetitions


def measured(turns: Sequence[tuple[int, Turn]], on_tick: OnTick) -> Results:
    """Return the result of each turn, in order, by plan and threads."""
    results: Results = {}
    for number, turn in turns:
        results.setdefault((number, turn.threads), []).append(measured_in_process(turn, on_tick))
    return results


def measured_in_process(turn: Turn, on_tick: OnTick) -> dict[str, Any]:
    """Return the result of a turn, measured in a process of its own."""
    task = f"{turn.bundle} with {counted(turn.threads, 'thread')}"
    result: dict[str, Any] = result_of_process(MODULE, json.dumps(json_from_record(turn)), task, on_tick)
    return result


def result_of_process(module: str, argument: str, task: str, on_tick: OnTick = lambda _: None) -> Any:
    """Return what a module answers in a process of its own; raise its error here. ``task`` names it in errors."""
    command = [sys.executable, "-P", "-m", module, argument]
    # The program is this Python, the argument our own JSON.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_environment()) as process:  # noqa: S603
        try:
            message = _last_message(process, on_tick)
        except BaseException:
            process.kill()
            raise
    if "result" in message:
        return message["result"]
    if "error" in message:
        raise _error(**message["error"])
    raise BenchFailed(f"{_ending(process.returncode)} while it measured {task}")


def answer(work: Callable[[Callable[[], None]], Any]) -> None:
    """Do the work of a process that ``result_of_process`` started, and print what that reads."""
    try:
        result = work(lambda: _print_message({"ticks": 1}))
    except FatdeployError as error:
        _print_message({"error": {"kind": type(error).__name__, "message": str(error)}})
    except KeyboardInterrupt:  # the parent process is interrupted too, and says so
        raise SystemExit(130) from None
    else:
        _print_message({"result": result})


def process_environment() -> dict[str, str]:
    """Return an environment in which a process imports this very fatdeploy, and numpy starts no threads."""
    here = str(Path(fatdeploy.__file__).parent.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}


def _print_message(message: dict[str, Any]) -> None:
    click.echo(json.dumps(message))


def _last_message(process: subprocess.Popen[str], on_tick: OnTick) -> dict[str, Any]:
    """Return the message that ends a turn; empty if the process ended without one."""
    message: dict[str, Any] = {}
    for line in process.stdout or ():
        message = json.loads(line)
        on_tick(message.get("ticks", 0))
    return {} if "ticks" in message else message


def _error(kind: str, message: str) -> FatdeployError:
    error: FatdeployError = getattr(errors, kind, BenchFailed)(message)
    return error


def _ending(code: int) -> str:
    if code == -9:
        return "the measuring process was killed (perhaps out of memory: try smaller --batch, --beams)"
    return f"the measuring process ended with exit code {code}"
