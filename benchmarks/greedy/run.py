"""Time greedy decoding of an exported bundle against CTranslate2 and PyTorch on the same weights; writes JSON.

It also measures how a step's cost grows with its position, resident memory, load and export. Every engine and setting
has a process of its own, processes take turns (A B A B …), and no time is recorded unless the tokens are the
reference's. An interrupted run continues where it stopped.
"""

import json
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, get_args

import click

from benchmarks.greedy.turns import GreedyPart, GreedySizes, GreedyTurn
from benchmarks.harness import recording as record
from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.rounds import module_result
from benchmarks.harness.rows import (
    Row,
    bundle_facts,
    fastest,
    phase_summaries,
    plan_facts,
    ratios,
    setting_of,
    timed_row,
)
from benchmarks.harness.settings import FLOAT32, FP32
from benchmarks.harness.timing import STEP
from fatdeploy.bundle import read_bundle

OUT = RESULTS / "engines_greedy.json"
WORKERS = (1, 2)  # of CTranslate2
LARGEST_STEADY_BATCH = 8
# The default; the time of an export has a result file of its own.
PARTS: tuple[GreedyPart, ...] = ("greedy", "positions", "memory")


@dataclass(frozen=True, kw_only=True)
class GreedyPlan:
    """What is measured: the axes of the benchmark."""

    parts: tuple[GreedyPart, ...]
    presets: tuple[str, ...]
    steady_preset: str
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    sizes: GreedySizes

    @property
    def steady_batches(self) -> list[int]:
        """The batches for which positions are compared."""
        return [batch for batch in self.batches if batch <= LARGEST_STEADY_BATCH]

    def turns(self) -> list[GreedyTurn]:
        """Return the turns of one round; neighbours are different engines or settings."""
        most, least = max(self.threads), min(self.batches)
        turns = [turn for preset, batch in product(self.presets, self.batches) for turn in self._greedy(preset, batch)]
        steady: dict[str, Any] = {"preset": self.steady_preset, "engine": "fatdeploy", "threads": most}
        turns += [GreedyTurn(part="positions", batch=batch, **steady) for batch in self.steady_batches]
        turns += [
            GreedyTurn(part="memory", preset=preset, engine="fatdeploy", batch=least, threads=most)
            for preset in self.presets
        ]
        turns.append(GreedyTurn(part="export", batch=1, **steady))
        return [turn for turn in turns if turn.part in self.parts]

    def _greedy(self, preset: str, batch: int) -> list[GreedyTurn]:
        workers = WORKERS if batch > 1 else (1,)
        shared: dict[str, Any] = {"part": "greedy", "preset": preset, "batch": batch}
        return [
            *(GreedyTurn(engine="fatdeploy", threads=threads, **shared) for threads in self.threads),
            *(
                GreedyTurn(engine="ctranslate2", precision=FLOAT32, threads=threads, workers=count, **shared)
                for threads, count in product(self.threads, workers)
            ),
            GreedyTurn(engine="reference", threads=max(self.threads), **shared),
        ]

    def n_rounds(self) -> dict[GreedyTurn, int]:
        """Return how often each turn is measured: only once where repetition would change nothing."""
        return {turn: self.rounds if turn.part in ("greedy", "positions") else 1 for turn in self.turns()}


def prepare(plan: GreedyPlan) -> None:
    """Write bundles, CTranslate2 models and sources, in a process of their own: torch stays out of this one."""
    needed = {
        "sizes": asdict(plan.sizes),
        "greedy": {preset: plan.batches for preset in plan.presets if {"greedy", "memory"} & {*plan.parts}},
        "positions": {plan.steady_preset: plan.steady_batches} if "positions" in plan.parts else {},
    }
    module_result("benchmarks.greedy.prepare", json.dumps(needed))


def result_from_turns(plan: GreedyPlan, results: dict[GreedyTurn, list[Any]]) -> dict[str, Any]:
    """Return the result without its provenance."""
    parts = {
        part: {turn: rounds for turn, rounds in results.items() if turn.part == part} for part in get_args(GreedyPart)
    }
    return {
        "precision": FP32,
        **plan_facts(plan),
        "bundles": _bundles(plan),
        "results": _with_ratios([timed_row(turn, rounds) for turn, rounds in parts["greedy"].items()]),
        "positions": [_positions_row(turn, rounds, plan.sizes) for turn, rounds in parts["positions"].items()],
        "memory": [_memory_row(turn, rounds[0]) for turn, rounds in parts["memory"].items()],
        "export": [setting_of(turn) | rounds[0] for turn, rounds in parts["export"].items()],
    }


def _bundles(plan: GreedyPlan) -> dict[str, Any]:
    folders = {preset: plan.sizes.models(preset).bundle for preset in (*plan.presets, plan.steady_preset)}
    return {preset: bundle_facts(read_bundle(folder)) for preset, folder in folders.items() if folder.exists()}


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Mark CTranslate2's best setting of each batch, by the median step, and add every row's ratio to it."""
    peers = [row for row in rows if row["engine"] == "ctranslate2"]
    best = {case: fastest([row for row in peers if _case(row) == case], STEP) for case in map(_case, peers)}
    return [
        {
            **row,
            "best_ctranslate2": row is (peer := best[_case(row)]),
            "ratio_to_ctranslate2": ratios(row["phases"][STEP], peer["phases"][STEP]),
        }
        for row in rows
    ]


def _case(row: Row) -> tuple[str, int]:
    return row["preset"], row["batch"]


def _positions_row(turn: GreedyTurn, rounds: list[Any], sizes: GreedySizes) -> Row:
    samples = [phases for result in rounds for phases in result]
    phases = phase_summaries(samples)
    early, late = (phases[f"position_{position}"] for position in sizes.positions)
    return {
        **setting_of(turn),
        "positions": sizes.positions,
        "samples": len(samples),
        "phases": phases,
        "ratio": ratios(late, early),
    }


def _memory_row(turn: GreedyTurn, result: dict[str, int]) -> Row:
    limit = round(1.75 * result["weights_bytes"] + 150e6)
    most = max(result["after_load_bytes"], result["after_decode_bytes"])
    return {**setting_of(turn), **result, "limit_bytes": limit, "within_limit": most <= limit}


@click.command()
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(get_args(GreedyPart)), default=PARTS, show_default=True
)
@click.option("--preset", "presets", multiple=True, default=["transformer-base"], show_default=True)
@click.option("--steady-preset", default="fat-base", show_default=True, help="For positions and export.")
@record.batch_and_threads_options([1, 8, 32])
@record.length_options()
@click.option("--positions", nargs=2, type=click.IntRange(4), default=(10, 400), show_default=True)
@record.round_options(rounds=4, repetitions=5)
@record.file_options(OUT)
def main(**options: Any) -> None:
    """Time bundles against CTranslate2 and PyTorch on the same weights; writes JSON."""
    run = record.Recording(**record.popped(options, "cache", "out"))
    lengths = record.popped(options, "source", "target", "repetitions", "positions")
    plan = GreedyPlan(sizes=GreedySizes(cache=str(run.cache), **lengths), **options)
    prepare(plan)
    results = run.measured_by("benchmarks.greedy.turns", plan, plan.n_rounds())
    run.write(result_from_turns(plan, results))


if __name__ == "__main__":
    main()
