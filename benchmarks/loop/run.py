"""Time the decode loop itself, over an engine that costs nothing; writes JSON.

Also counted: what a step allocates, which must grow neither with the vocabulary nor with the position. Every search has
a process of its own, processes take turns (A B A B …), and the tokens are checked before a time is recorded.
"""

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from benchmarks.harness.measuring import (
    CACHE,
    MEASURED,
    RESULTS,
    Kept,
    code_digest,
    measured,
    provenance,
    write_result,
)
from benchmarks.loop.turns import NEIGHBOURS, CaseName, Sizes, Turn

OUT = RESULTS / "loop_overhead.json"
# Microseconds a step that the loop may cost, the arg-max over the vocabulary included; the others have no target.
TARGETS: dict[tuple[CaseName, int], float | None] = {
    ("greedy", 1): 60,
    ("greedy", 32): 150,
    ("beams", 1): 250,
    ("beams", 8): None,
    ("top_p", 1): None,
    ("beams_ngrams", 1): None,
}
# Python's free lists and lists that grow make a step's bytes move by hundreds; an array of positions takes thousands.
SLACK_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: the axes of the benchmark."""

    cases: tuple[CaseName, ...]
    vocab_sizes: tuple[int, ...]
    rounds: int
    sizes: Sizes

    def batches(self) -> list[tuple[CaseName, int]]:
        """Return searches with their batches."""
        return [(case, batch) for case, batch in TARGETS if case in self.cases]

    def turns(self) -> list[Turn]:
        """Return the turns of one round."""
        every = product(self.batches(), self.vocab_sizes)
        return [Turn(case=case, batch=batch, vocab_size=vocab_size) for (case, batch), vocab_size in every]


def result_from_turns(plan: Plan, found: dict[Turn, list[Any]]) -> dict[str, Any]:
    """Return all that is written, provenance apart."""
    rows = [row_of(turn, rounds) for turn, rounds in found.items()]
    return {
        "threads": 1,
        "steps": plan.sizes.steps,
        "positions": plan.sizes.positions,
        "rounds": plan.rounds,
        "tokens_checked": True,
        "results": rows,
        "allocations": [growth_of(plan, rows, case, batch) for case, batch in plan.batches()],
    }


def row_of(turn: Turn, rounds: list[Any]) -> dict[str, Any]:
    """Return what the rounds of a turn tell of a step's time and allocations."""
    us = np.array([second for one in rounds for second in one["seconds"]]) * 1e6
    summary = {"min_us": us.min(), "p50_us": np.median(us), "p95_us": np.percentile(us, 95)}
    target = TARGETS[turn.case, turn.batch]
    return {
        **asdict(turn),
        "steps_timed": len(us),
        **{name: float(value) for name, value in summary.items()},
        "target_us": target,
        "within_target": None if target is None else bool(summary["p50_us"] <= target),
        # The same in every round but for noise that only adds.
        "bytes": {name: min(one["bytes"][name] for one in rounds) for name in rounds[0]["bytes"]},
    }


def growth_of(plan: Plan, rows: list[dict[str, Any]], case: CaseName, batch: int) -> dict[str, Any]:
    """Return by how many bytes a step's allocations grow with the vocabulary and with the position, at most."""
    early, late = (f"position_{position}" for position in plan.sizes.positions)
    found = {row["vocab_size"]: row["bytes"] for row in rows if (row["case"], row["batch"]) == (case, batch)}
    small, large = (found[pick(found)] for pick in (min, max))
    growth = {
        "with_vocabulary": max(large[name] - small[name] for name in (early, late)),
        "with_position": max(one[late] - one[early] for one in found.values()),
    }
    return {"case": case, "batch": batch, **growth, "grows": max(growth.values()) > SLACK_BYTES}


@click.command()
@click.option("--case", "cases", multiple=True, type=click.Choice(get_args(CaseName)), default=get_args(CaseName))
@click.option("--vocab-size", "vocab_sizes", multiple=True, type=click.IntRange(64), default=[1_000, 32_000])
@click.option("--steps", type=click.IntRange(32), default=450, show_default=True, help="Of a decode.")
@click.option("--positions", nargs=2, type=click.IntRange(4), default=(50, 400), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Turns of each search.")
@click.option("--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Decodes in a turn.")
@click.option("--cache", default=CACHE, type=click.Path(path_type=Path), show_default="build/benchmarks")
@click.option("--out", default=OUT, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
def main(**options: Any) -> None:
    """Time the decode loop over an engine that costs nothing; writes JSON."""
    cache, out = options.pop("cache").resolve(), options.pop("out").resolve()
    sizes = Sizes(**{name: options.pop(name) for name in ("steps", "repetitions", "positions")})
    if max(sizes.positions) + NEIGHBOURS >= sizes.steps - 1:
        raise click.UsageError(f"--positions must lie {NEIGHBOURS + 1} steps before the last of --steps")
    plan = Plan(sizes=sizes, **options)
    kept = Kept(cache / f"{out.stem}.partial.json", {"plan": asdict(plan), "code": code_digest(*MEASURED)})
    rounds = dict.fromkeys(plan.turns(), plan.rounds)
    found = measured("benchmarks.loop.turns", rounds, {"sizes": asdict(sizes)}, kept)
    write_result(out, {**provenance(("fatdeploy", "numpy")), **result_from_turns(plan, found)}, kept)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
