"""Turns in processes of their own, in alternating rounds, with partial results that survive an interruption."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.harness.provenance import ROOT

AnyTurn = TypeVar("AnyTurn", bound=Any)  # a frozen dataclass that names the engine and what it does
AnySizes = TypeVar("AnySizes", bound=Any)  # a frozen dataclass of what all turns of a run share


def module_result(module: str, *arguments: object, blas_threads: int | None = None) -> Any:
    """Return the JSON that a module prints in a process of its own: idle threads of an engine steal another's cores.

    ``blas_threads`` limits numpy, which otherwise takes all cores when it is imported.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    limits = {} if blas_threads is None else {"OPENBLAS_NUM_THREADS": str(blas_threads)}
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | limits, check=False)
    if run.returncode:
        raise SystemExit(f"{module} failed with exit code {run.returncode}: {' '.join(command[3:])}")
    return json.loads(run.stdout)


def turn_result(module: str, turn: Any, sizes: Any, blas_threads: int | None = None) -> Any:
    """Return what a module measures of a turn; its ``__main__`` is ``print_turn``."""
    return module_result(module, json.dumps({"turn": asdict(turn), "sizes": asdict(sizes)}), blas_threads=blas_threads)


def print_turn(
    turn_type: type[AnyTurn], sizes_type: type[AnySizes], measure: Callable[[AnyTurn, AnySizes], Any]
) -> None:
    """Measure the turn that the first argument describes, and print the result as JSON."""
    described = json.loads(sys.argv[1])
    print(json.dumps(measure(turn_type(**described["turn"]), sizes_type(**described["sizes"]))))


@dataclass
class PartialResults:
    """Results of finished turns in a file, so that an interrupted run continues where it stopped.

    ``made_by`` is all that they depend on: results made by anything else are dropped.
    """

    path: Path
    made_by: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made_by = json.loads(json.dumps(self.made_by))  # tuples become lists, as in the file
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            if stored["made_by"] == self.made_by:
                self.results = stored["results"]

    def add(self, key: str, result: object) -> None:
        """Store another result; a crash leaves the old file or the new one."""
        self.results[key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"made_by": self.made_by, "results": self.results}))
        new.replace(self.path)

    def forget(self) -> None:
        """Remove the file once the results are written elsewhere."""
        self.path.unlink(missing_ok=True)


def measured_rounds(
    rounds: Mapping[AnyTurn, int], measure: Callable[[AnyTurn], Any], partial: PartialResults
) -> dict[AnyTurn, list[Any]]:
    """Return the results of every turn, one per round; stored results are not measured again.

    Turns alternate (A B A B …): each is measured once before any is measured again.
    """
    keys = {turn: json.dumps(asdict(turn)) for turn in rounds}
    order = [(turn, index) for index in range(max(rounds.values())) for turn in rounds if index < rounds[turn]]
    with click.progressbar(order, file=sys.stderr, label="measuring") as bar:
        for turn, index in bar:
            if (key := f"{index} {keys[turn]}") not in partial.results:
                partial.add(key, measure(turn))
    return {turn: [partial.results[f"{index} {keys[turn]}"] for index in range(n)] for turn, n in rounds.items()}
