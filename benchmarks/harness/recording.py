"""The head and the end of every run: common options, alternating rounds, a result with its provenance."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.harness.provenance import CACHE, MEASURED, code_digest, provenance
from benchmarks.harness.rounds import AnyTurn, PartialResults, measured_rounds, turn_result

Command = TypeVar("Command", bound=Callable[..., Any])
PACKAGES = ("fatdeploy", "onnxruntime", "ctranslate2", "torch", "numpy")
Option = Callable[[Command], Command]


def with_options(*options: Option[Any]) -> Callable[[Command], Command]:
    """Add options to a command; ``--help`` lists them in this order."""

    def decorated(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


def batch_and_threads_options(batches: Sequence[int]) -> Callable[[Command], Command]:
    """Add ``--batch`` and ``--threads``, both repeatable."""
    return with_options(
        click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=batches, show_default=True),
        click.option("--threads", multiple=True, type=click.IntRange(1), default=[1, 2], show_default=True),
    )


def length_options() -> Callable[[Command], Command]:
    """Add ``--source`` and ``--target``."""
    return with_options(
        click.option("--source", default=32, show_default=True, help="Source length."),
        click.option("--target", type=click.IntRange(2), default=64, show_default=True, help="Decoder steps."),
    )


def round_options(rounds: int, repetitions: int, measured: str = "engine") -> Callable[[Command], Command]:
    """Add ``--rounds`` and ``--repetitions``."""
    count = click.IntRange(1)
    return with_options(
        click.option("--rounds", type=count, default=rounds, show_default=True, help=f"Turns per {measured}."),
        click.option("--repetitions", type=count, default=repetitions, show_default=True, help="Decodes per turn."),
    )


def out_option(out: Path) -> Callable[[Command], Command]:
    """Add ``--out``, the file of the result."""
    path = click.Path(path_type=Path)
    return click.option("--out", default=out, type=path, show_default=f"benchmarks/results/{out.name}")


def file_options(out: Path) -> Callable[[Command], Command]:
    """Add ``--cache`` and ``--out``."""
    path = click.Path(path_type=Path)
    cache = click.option("--cache", default=CACHE, type=path, show_default="build/benchmarks")
    return with_options(cache, out_option(out))


def popped(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove some options from a dictionary and return them."""
    return {name: options.pop(name) for name in names}


def write_result(out: Path, result: dict[str, Any], packages: Sequence[str]) -> None:
    """Write a result with its provenance, and say where it is."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**provenance(packages), **result}, indent=2) + "\n")
    click.echo(f"wrote {out}")


@dataclass
class Recording:
    """One run of a benchmark: an interrupted one continues where it stopped."""

    cache: Path
    out: Path
    packages: Sequence[str] = PACKAGES

    def __post_init__(self) -> None:
        self.cache, self.out = self.cache.resolve(), self.out.resolve()
        self.cache.mkdir(parents=True, exist_ok=True)
        self._partial: PartialResults | None = None

    def measured(
        self, rounds: Mapping[AnyTurn, int], measure: Callable[[AnyTurn], Any], made_by: Mapping[str, Any]
    ) -> dict[AnyTurn, list[Any]]:
        """Return the results of every turn; those of an interrupted run with the same ``made_by`` are used again."""
        described = {**made_by, "code": code_digest(*MEASURED)}
        self._partial = PartialResults(self.cache / f"{self.out.stem}.partial.json", described)
        return measured_rounds(rounds, measure, self._partial)

    def measured_by(
        self,
        module: str,
        plan: Any,
        rounds: Mapping[AnyTurn, int],
        blas_threads: Callable[[AnyTurn], int | None] = lambda _: None,
    ) -> dict[AnyTurn, list[Any]]:
        """Return the results of a plan's turns, each measured by a module in a process of its own."""

        def measure(turn: AnyTurn) -> Any:
            return turn_result(module, turn, plan.sizes, blas_threads(turn))

        return self.measured(rounds, measure, {"plan": asdict(plan)})

    def write(self, result: dict[str, Any]) -> None:
        """Write the complete result, and forget its parts."""
        write_result(self.out, result, self.packages)
        if self._partial is not None:
            self._partial.forget()
