"""Rows of results: the setting of a turn, summaries of its phases, and how rows compare."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.harness.timing import Phases
from fatdeploy.bundle import Bundle
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes.bench.report import percentile_summary

Row = dict[str, Any]
SUMMARY = ("min_ms", "p50_ms", "p95_ms")


def phase_summaries(repetitions: Sequence[Phases]) -> dict[str, dict[str, float]]:
    """Return minimum, median and 95th percentile of each phase in milliseconds."""
    samples = {name: np.array([phases[name] for phases in repetitions]) * 1e3 for name in repetitions[0]}
    summaries = {name: percentile_summary(ms) for name, ms in samples.items()}
    return {name: {column: columns[column] for column in SUMMARY} for name, columns in summaries.items()}


def setting_of(turn: Any) -> Row:
    """Return the fields of a turn, except which part of the benchmark it is."""
    return {name: value for name, value in asdict(turn).items() if name != "part"}


def plan_facts(plan: Any) -> dict[str, Any]:
    """Return what every result says about the plan of its run."""
    return {
        "threads": plan.threads,
        "source": plan.sizes.source,
        "target": plan.sizes.target,
        "rounds": plan.rounds,
        "tokens_checked": True,
    }


def timed_row(turn: Any, rounds: Sequence[Any]) -> Row:
    """Return the setting of a turn and its phases, over the repetitions of all rounds; the reference has no load."""
    repetitions = [phases for result in rounds for phases in result["phases"]]
    loads = [{"load": result["load"]} for result in rounds if result["load"] is not None]
    summaries = phase_summaries(repetitions) | (phase_summaries(loads) if loads else {})
    return {**setting_of(turn), "repetitions": len(repetitions), "phases": summaries}


def bundle_facts(bundle: Bundle) -> dict[str, Any]:
    """Return what identifies a bundle in a result."""
    return {"digest": bundle.digest, "weights_bytes": bundle.manifest.files[WEIGHTS].size}


def p50(row: Row, phase: str) -> float:
    """Return the median of a phase in milliseconds."""
    return float(row["phases"][phase]["p50_ms"])


def fastest(rows: Sequence[Row], phase: str) -> Row:
    """Return the row with the smallest median of a phase."""
    return min(rows, key=lambda row: p50(row, phase))


def ratios(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Return the minimum and the median of one summary relative to those of another."""
    return {name: ours[f"{name}_ms"] / theirs[f"{name}_ms"] for name in ("min", "p50")}
