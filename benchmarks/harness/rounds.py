"""What all benchmarks share: timed decoding, processes of their own, summaries, provenance, turns that are kept."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from fatdeploy.machine import this_machine
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, State, Stepper, Want
from fatdeploy.spec import Mask, Tokens

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / "build" / "benchmarks"  # what is prepared, and what is kept of a run that is not over
# Folders whose code a time depends on.
MEASURED = ("fatdeploy", "export", "runtimes", "benchmarks")

Phases = dict[str, float]  # seconds
AnyTurn = TypeVar("AnyTurn", bound=Any)  # a frozen dataclass that says which engine does what


def timed_decode(engine: Stepper[State], source: Tokens, mask: Mask, target: int) -> tuple[Phases, Tokens]:
    """Return seconds of each phase and the tokens [B, T]; EOS ends no row, so that every run does the same work."""
    started = time.perf_counter()
    state = engine.encode(source, mask, Capacity(1, target))
    encoded = first = time.perf_counter()
    tokens, output = np.full((len(source), 1), engine.spec.bos_id), []
    for position in range(target):
        tokens = engine.step(tokens, state, Want.LOGITS).logits.argmax(-1)
        output.append(tokens)
        if position == 0:
            first = time.perf_counter()
    ended = time.perf_counter()
    engine.release(state)
    phases = {"encode": encoded - started, "first_token": first - encoded, "end_to_end": ended - started}
    if target > 1:
        phases["per_token"] = (ended - first) / (target - 1)
    return phases, np.concatenate(output, 1)


def timed_search(
    engine: Engine[State], sources: Sequence[Tokens], options: DecodeOptions, target: int
) -> tuple[Phases, list[Hypothesis]]:
    """Return seconds of each phase of the decode loop, and what it found; the sources must let EOS end nothing."""
    started = time.perf_counter()
    with Decoding(engine, sources, replace(options, max_new_tokens=target)) as decoding:
        encoded = time.perf_counter()
        goes_on = decoding.advance()
        first = time.perf_counter()
        while goes_on:
            goes_on = decoding.advance()
        found = decoding.found()
    ended = time.perf_counter()
    phases = {"encode": encoded - started, "first_token": first - encoded, "end_to_end": ended - started}
    if target > 1:
        phases["per_token"] = (ended - first) / (target - 1)
    return phases, found


def result_apart(module: str, *arguments: object, blas_threads: int | None = None) -> Any:
    """Return the JSON that a module prints in a process of its own: idle threads of an engine steal another's cores.

    ``blas_threads`` are those of numpy, which takes all cores unless it is told before it is imported.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    told = {} if blas_threads is None else {"OPENBLAS_NUM_THREADS": str(blas_threads)}
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | told, check=False)
    if run.returncode:
        raise SystemExit(f"{module} failed with exit code {run.returncode}: {' '.join(command[3:])}")
    return json.loads(run.stdout)


def summary(phases: Sequence[Phases]) -> dict[str, dict[str, float]]:
    """Return minimum, median and 95th percentile of each phase in milliseconds."""
    columns = {name: np.array([phase[name] for phase in phases]) * 1e3 for name in phases[0]}
    return {
        name: {"min_ms": float(ms.min()), "p50_ms": float(np.median(ms)), "p95_ms": float(np.percentile(ms, 95))}
        for name, ms in columns.items()
    }


def provenance(packages: Sequence[str] = ("fatdeploy", "torch", "numpy")) -> dict[str, Any]:
    """Return where and with what a result was made."""
    return {
        "machine": this_machine().as_dict(),
        "versions": {name: version(name) for name in packages},
        "commit": _git("rev-parse", "HEAD"),
        # A commit alone would name code that was not measured.
        "modified": bool(_git("status", "--porcelain", "--", *(f"{folder}/**.py" for folder in MEASURED))),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT)
    return run.stdout.strip()


def code_digest(*folders: str) -> str:
    """Return a hash of the code in some folders: what was made by other code must not be taken for its product."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass
class Kept:
    """Results of finished turns in a file, so that an interrupted run goes on where it was.

    ``made_by`` is all that they depend on; results that something else made are forgotten.
    """

    path: Path
    made_by: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made_by = json.loads(json.dumps(self.made_by))  # as it is read back
        if self.path.exists():
            found = json.loads(self.path.read_text())
            if found["made_by"] == self.made_by:
                self.results = found["results"]

    def add(self, key: str, result: object) -> None:
        """Keep one more result; a crash leaves the file as it was before or as it is after."""
        self.results[key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"made_by": self.made_by, "results": self.results}))
        new.replace(self.path)

    def forget(self) -> None:
        """Remove the file: the results are elsewhere now."""
        self.path.unlink(missing_ok=True)


def measured(
    module: str,
    rounds: Mapping[AnyTurn, int],
    common: Mapping[str, Any],
    kept: Kept,
    blas_threads: Callable[[AnyTurn], int | None] = lambda _: None,
) -> dict[AnyTurn, list[Any]]:
    """Return what a module makes of every turn, as often as it is taken; what was kept is not measured again.

    Turns alternate: each is taken once before any is taken again.
    """
    keys = {turn: json.dumps(asdict(turn)) for turn in rounds}
    order = [(turn, index) for index in range(max(rounds.values())) for turn in rounds if index < rounds[turn]]
    with click.progressbar(order, file=sys.stderr, label="measuring") as bar:
        for turn, index in bar:
            if (key := f"{index} {keys[turn]}") not in kept.results:
                described = json.dumps({"turn": asdict(turn), **common})
                kept.add(key, result_apart(module, described, blas_threads=blas_threads(turn)))
    return {turn: [kept.results[f"{index} {keys[turn]}"] for index in range(n)] for turn, n in rounds.items()}


def write_result(path: Path, result: dict[str, Any], kept: Kept) -> None:
    """Write a complete result, and forget its parts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    kept.forget()
