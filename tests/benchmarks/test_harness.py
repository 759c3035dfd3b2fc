"""The harness of all benchmarks: it depends on none of them; results consist of summaries and rounds."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness.rounds import PartialResults, measured_rounds
from benchmarks.harness.rows import phase_summaries
from benchmarks.harness.timing import phases_of

HARNESS = Path(__file__).parents[2] / "benchmarks" / "harness"


@dataclass(frozen=True)
class NamedTurn:
    name: str


def test_the_harness_imports_no_benchmark() -> None:
    modules = [
        node.module or ""
        for path in HARNESS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    ours = {module for module in modules if module.startswith("benchmarks")}
    assert ours
    assert {module for module in ours if not module.startswith("benchmarks.harness")} == set()


def test_a_summary_has_the_columns_of_the_committed_results() -> None:
    summaries = phase_summaries([{"encode": seconds / 1e3} for seconds in range(1, 102)])
    assert summaries == {"encode": pytest.approx({"min_ms": 1, "p50_ms": 51, "p95_ms": 96})}


def test_the_phases_of_a_decode_add_up() -> None:
    phases = phases_of(encode=1.0, first_token=2.0, end_to_end=9.0, target=4)
    assert phases == {"encode": 1.0, "first_token": 2.0, "per_token": 2.0, "end_to_end": 9.0}
    assert phases_of(1.0, 2.0, 3.0, target=1).keys() == {"encode", "first_token", "end_to_end"}


def test_rounds_alternate_and_an_interrupted_run_continues(tmp_path: Path) -> None:
    first, second, once = (NamedTurn(name) for name in ("first", "second", "once"))
    measured: list[str] = []

    def measure(turn: NamedTurn) -> int:
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(turn.name)
        return len(measured)

    rounds = {first: 2, second: 2, once: 1}
    with pytest.raises(KeyboardInterrupt):
        measured_rounds(rounds, measure, PartialResults(tmp_path / "partial.json", {}))
    assert measured == ["first", "second", "once", "first"]
    results = measured_rounds(rounds, lambda turn: 5, PartialResults(tmp_path / "partial.json", {}))
    assert results == {first: [1, 4], second: [2, 5], once: [3]}
