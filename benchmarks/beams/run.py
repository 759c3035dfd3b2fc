"""Time beam search of an exported bundle against CTranslate2 on the same weights; writes JSON.

It also measures memory with one beam and with many (the part that belongs to sources must not grow), and greedy steps
with a shortlist. Every engine and setting has a process of its own, processes take turns (A B A B …), and nothing is
recorded unless the tokens are the reference's. An interrupted run continues where it stopped.
"""

import json
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, get_args

import click

from benchmarks.beams.turns import BeamPart, BeamTurn
from benchmarks.harness import recording as record
from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.rounds import module_result
from benchmarks.harness.rows import Row, bundle_facts, fastest, plan_facts, ratios, setting_of, timed_row
from benchmarks.harness.settings import DecodeSizes
from benchmarks.harness.timing import STEP
from fatdeploy.bundle import read_bundle

OUT = RESULTS / "engines_beam.json"
WORKERS = (1, 2)  # of CTranslate2
# The largest share of CTranslate2's time, from source to targets, that a beam search may take.
TARGET = 0.8
# The whole, and the step by the difference of two decodes: CTranslate2 shows no more.
COMPARED = ("end_to_end", STEP)


@dataclass(frozen=True, kw_only=True)
class BeamPlan:
    """What is measured: the axes of the benchmark."""

    parts: tuple[BeamPart, ...]
    preset: str
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    beams: int
    most_beams: int
    shortlist: int
    rounds: int
    sizes: DecodeSizes

    def turns(self) -> list[BeamTurn]:
        """Return the turns of one round; neighbours are different engines or settings."""
        turns = [turn for batch in self.batches for turn in (*self._beams(batch), *self._shortlist(batch))]
        turns += [
            self._turn("memory", min(self.batches), beams, threads=max(self.threads)) for beams in (1, self.most_beams)
        ]
        return [turn for turn in turns if turn.part in self.parts]

    def _turn(self, part: BeamPart, batch: int, beams: int, **setting: Any) -> BeamTurn:
        return BeamTurn(**{"engine": "fatdeploy", **setting}, part=part, preset=self.preset, batch=batch, beams=beams)

    def _beams(self, batch: int) -> list[BeamTurn]:
        workers = WORKERS if batch > 1 else (1,)
        return [
            *(self._turn("beams", batch, self.beams, threads=threads) for threads in self.threads),
            *(
                self._turn("beams", batch, self.beams, engine="ctranslate2", threads=threads, workers=count)
                for threads, count in product(self.threads, workers)
            ),
        ]

    def _shortlist(self, batch: int) -> list[BeamTurn]:
        settings = product(self.threads, (0, self.shortlist))
        return [self._turn("shortlist", batch, 1, threads=threads, shortlist=count) for threads, count in settings]

    def n_rounds(self) -> dict[BeamTurn, int]:
        """Return how often each turn is measured: memory only once, because it hardly varies."""
        return {turn: 1 if turn.part == "memory" else self.rounds for turn in self.turns()}


def prepare(plan: BeamPlan) -> None:
    """Write bundle, CTranslate2 model and sources, in a process of their own: torch stays out of this one."""
    cases = sorted({(turn.batch, turn.beams) for turn in plan.turns()})
    module_result("benchmarks.beams.prepare", json.dumps({"sizes": asdict(plan.sizes), "cases": {plan.preset: cases}}))


def result_from_turns(plan: BeamPlan, results: dict[BeamTurn, list[Any]]) -> dict[str, Any]:
    """Return the result without its provenance."""
    parts = {
        part: {turn: rounds for turn, rounds in results.items() if turn.part == part} for part in get_args(BeamPart)
    }
    bundle = read_bundle(plan.sizes.models(plan.preset).bundle)
    return {
        "precision": "fp32",
        **plan_facts(plan),
        "beams": plan.beams,
        "bundles": {plan.preset: bundle_facts(bundle)},
        "results": _with_ratios([timed_row(turn, rounds) for turn, rounds in parts["beams"].items()]),
        "memory": [setting_of(turn) | only for turn, [only] in parts["memory"].items()],
        "shortlist": _with_full([timed_row(turn, rounds) for turn, rounds in parts["shortlist"].items()]),
    }


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Mark CTranslate2's best setting of each batch, by the median from source to target, and add ratios to it."""
    peers = [row for row in rows if row["engine"] == "ctranslate2"]
    best = {
        batch: fastest([row for row in peers if row["batch"] == batch], "end_to_end")
        for batch in {row["batch"] for row in peers}
    }
    return [
        {
            **row,
            "best_ctranslate2": row is (peer := best[row["batch"]]),
            "ratio_to_ctranslate2": (compared := _compared(row, peer)),
            "within_target": None if row["engine"] == "ctranslate2" else compared["end_to_end"]["p50"] <= TARGET,
        }
        for row in rows
    ]


def _with_full(rows: list[Row]) -> list[Row]:
    """Add to each shortlist its ratio to the whole vocabulary."""
    full = {(row["batch"], row["threads"]): row for row in rows if not row["shortlist"]}
    return [{**row, "ratio_to_full": _compared(row, full[row["batch"], row["threads"]])} for row in rows]


def _compared(ours: Row, theirs: Row) -> dict[str, dict[str, float]]:
    return {phase: ratios(ours["phases"][phase], theirs["phases"][phase]) for phase in COMPARED}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(get_args(BeamPart)), default=get_args(BeamPart))
@click.option("--preset", default="transformer-base", show_default=True)
@record.batch_and_threads_options([1, 8])
@click.option("--beams", type=click.IntRange(2), default=4, show_default=True)
@click.option("--most-beams", type=click.IntRange(2), default=8, show_default=True, help="For memory.")
@click.option("--shortlist", type=click.IntRange(2), default=2000, show_default=True, help="Number of allowed tokens.")
@record.length_options()
@record.round_options(rounds=4, repetitions=5)
@record.file_options(OUT)
def main(**options: Any) -> None:
    """Time beams, their memory and shortlists against CTranslate2 on the same weights; writes JSON."""
    run = record.Recording(**record.popped(options, "cache", "out"))
    lengths = record.popped(options, "source", "target", "repetitions")
    plan = BeamPlan(sizes=DecodeSizes(cache=str(run.cache), **lengths), **options)
    prepare(plan)
    results = run.measured_by("benchmarks.beams.turns", plan, plan.n_rounds(), lambda turn: turn.threads)
    run.write(result_from_turns(plan, results))


if __name__ == "__main__":
    main()
