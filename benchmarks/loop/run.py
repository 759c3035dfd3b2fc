"""Time the decode loop itself, over an engine that costs nothing; writes JSON.

It also counts the bytes that a step allocates, which must grow neither with the vocabulary nor with the position.
Every search has a process of its own, processes take turns (A B A B …), and the tokens are checked before a time is
recorded.
"""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, get_args

import click
import numpy as np

from benchmarks.harness import recording as record
from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.settings import NEIGHBOURS
from benchmarks.loop.turns import CaseName, LoopSizes, LoopTurn

OUT = RESULTS / "loop_overhead.json"
# The microseconds per step that the loop may cost, including the arg-max over the vocabulary; None has no target.
TARGETS: dict[tuple[CaseName, int], float | None] = {
    ("greedy", 1): 60,
    ("greedy", 32): 150,
    ("beams", 1): 250,
    ("beams", 8): None,
    ("top_p", 1): None,
    ("beams_ngrams", 1): None,
}
# Python's free lists and growing lists change a step's bytes by hundreds; an array of positions takes thousands.
SLACK_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """What is measured: the axes of the benchmark."""

    cases: tuple[CaseName, ...]
    vocab_sizes: tuple[int, ...]
    rounds: int
    sizes: LoopSizes

    def batches(self) -> list[tuple[CaseName, int]]:
        """Return searches with their batches."""
        return [(case, batch) for case, batch in TARGETS if case in self.cases]

    def turns(self) -> list[LoopTurn]:
        """Return the turns of one round."""
        cases = product(self.batches(), self.vocab_sizes)
        return [LoopTurn(case=case, batch=batch, vocab_size=vocab_size) for (case, batch), vocab_size in cases]


def result_from_turns(plan: LoopPlan, results: dict[LoopTurn, list[Any]]) -> dict[str, Any]:
    """Return the result without its provenance."""
    rows = [row_of(turn, rounds) for turn, rounds in results.items()]
    return {
        "threads": 1,
        "steps": plan.sizes.steps,
        "positions": plan.sizes.positions,
        "rounds": plan.rounds,
        "tokens_checked": True,
        "results": rows,
        "allocations": [growth_of(plan, rows, case, batch) for case, batch in plan.batches()],
    }


def row_of(turn: LoopTurn, rounds: list[Any]) -> dict[str, Any]:
    """Return time and allocations of a step over the rounds of a turn."""
    us = np.array([seconds for result in rounds for seconds in result["seconds"]]) * 1e6
    summary = {"min_us": us.min(), "p50_us": np.median(us), "p95_us": np.percentile(us, 95)}
    target = TARGETS[turn.case, turn.batch]
    return {
        **asdict(turn),
        "steps_timed": len(us),
        **{name: float(value) for name, value in summary.items()},
        "target_us": target,
        "within_target": None if target is None else bool(summary["p50_us"] <= target),
        # Noise only adds: without it every round would have the same.
        "bytes": {name: min(result["bytes"][name] for result in rounds) for name in rounds[0]["bytes"]},
    }


def growth_of(plan: LoopPlan, rows: list[dict[str, Any]], case: CaseName, batch: int) -> dict[str, Any]:
    """Return the largest growth of a step's allocations with the vocabulary and with the position, in bytes."""
    early, late = (f"position_{position}" for position in plan.sizes.positions)
    allocations = {row["vocab_size"]: row["bytes"] for row in rows if (row["case"], row["batch"]) == (case, batch)}
    small, large = (allocations[pick(allocations)] for pick in (min, max))
    growth = {
        "with_vocabulary": max(large[name] - small[name] for name in (early, late)),
        "with_position": max(counts[late] - counts[early] for counts in allocations.values()),
    }
    return {"case": case, "batch": batch, **growth, "grows": max(growth.values()) > SLACK_BYTES}


@click.command()
@click.option("--case", "cases", multiple=True, type=click.Choice(get_args(CaseName)), default=get_args(CaseName))
@click.option("--vocab-size", "vocab_sizes", multiple=True, type=click.IntRange(64), default=[1_000, 32_000])
@click.option("--steps", type=click.IntRange(32), default=450, show_default=True, help="Steps per decode.")
@click.option("--positions", nargs=2, type=click.IntRange(4), default=(50, 400), show_default=True)
@record.round_options(rounds=4, repetitions=5, measured="search")
@record.file_options(OUT)
def main(**options: Any) -> None:
    """Time the decode loop over an engine that costs nothing; writes JSON."""
    sizes = LoopSizes(**record.popped(options, "steps", "repetitions", "positions"))
    if max(sizes.positions) + NEIGHBOURS >= sizes.steps - 1:
        raise click.UsageError(f"--positions must lie {NEIGHBOURS + 1} steps before the last of --steps")
    run = record.Recording(**record.popped(options, "cache", "out"), packages=("fatdeploy", "numpy"))
    plan = LoopPlan(sizes=sizes, **options)
    results = run.measured_by("benchmarks.loop.turns", plan, dict.fromkeys(plan.turns(), plan.rounds))
    run.write(result_from_turns(plan, results))


if __name__ == "__main__":
    main()
