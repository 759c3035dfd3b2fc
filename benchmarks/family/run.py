"""Time decoders of the FAT family up to long targets, and encoders on long sources; writes JSON.

Every model has a process of its own, processes take turns, and a turn on a noisy machine is repeated. An interrupted
run continues where it stopped.
"""

import json
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import click
import numpy as np

from benchmarks.family.settings import DECODERS, ENCODERS, FamilyPart, FamilySizes, FamilyTurn
from benchmarks.harness import recording as record
from benchmarks.harness.noise import NoiseProbe
from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.rounds import module_result, turn_result

OUT = RESULTS / "family.json"
LENGTHS = (64, 128, 256, 512, 1024, 2048)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FamilyPlan:
    """What is measured: the axes of the benchmark."""

    decoders: tuple[str, ...]
    encoders: tuple[str, ...]
    batches: tuple[int, ...]
    threads: int
    sizes: FamilySizes

    def turns(self) -> list[FamilyTurn]:
        """Return the turns of one round."""
        decoders = [
            FamilyTurn(part="decoder", model=model, batch=batch, threads=self.threads)
            for batch, model in product(self.batches, self.decoders)
        ]
        return decoders + [
            FamilyTurn(part="encoder", model=model, batch=1, threads=self.threads) for model in self.encoders
        ]


def decoder_row(turn: FamilyTurn, rounds: list[Row]) -> Row:
    """Return the medians of all rounds, by target length."""
    return {
        "model": turn.model,
        "batch": turn.batch,
        **{name: np.median([result[name] for result in rounds], 0).tolist() for name in ("mean_ms", "step_ms")},
        "state_bytes": rounds[0]["state_bytes"],
        "peak_bytes": max(result["peak_bytes"] for result in rounds),
    }


def encoder_row(turn: FamilyTurn, rounds: list[Row]) -> Row:
    """Return the medians of all encodes, by source length."""
    seconds = np.concatenate([np.array(result["seconds"]) for result in rounds], 1)
    grown = np.median([result["grown_bytes"] for result in rounds], 0)
    return {"model": turn.model, "ms": (np.median(seconds, 1) * 1e3).tolist(), "grown_bytes": grown.tolist()}


def crossover(rows: list[Row], batch: int, model: str, other: str, targets: tuple[int, ...]) -> int | None:
    """Return the shortest measured target from which on a model's steps are cheaper on average; None if never."""
    by_model = {row["model"]: row["mean_ms"] for row in rows if row["batch"] == batch}
    if not {model, other} <= by_model.keys():
        return None
    faster = [ours < theirs for ours, theirs in zip(by_model[model], by_model[other], strict=True)]
    first = next((place for place in range(len(faster)) if all(faster[place:])), None)
    return None if first is None else targets[first]


def result_of(plan: FamilyPlan, results: dict[FamilyTurn, list[Any]], noise: Row) -> Row:
    """Return the result without its provenance."""
    rounds = {turn: [turn_round["result"] for turn_round in found] for turn, found in results.items()}
    decoders = [decoder_row(turn, found) for turn, found in rounds.items() if turn.part == "decoder"]
    return {
        "threads": plan.threads,
        "source": plan.sizes.source,
        "targets": plan.sizes.targets,
        "sources": plan.sizes.sources,
        "decoders": decoders,
        "crossovers": [
            {
                "batch": batch,
                "model": model,
                "other": "transformer-base",
                "target": crossover(decoders, batch, model, "transformer-base", plan.sizes.targets),
            }
            for batch, model in product(plan.batches, plan.decoders)
            if model != "transformer-base"
        ],
        "encoders": [encoder_row(turn, found) for turn, found in rounds.items() if turn.part == "encoder"],
        "noise": noise,
    }


def prepare(plan: FamilyPlan) -> None:
    """Write all graphs in a process of its own: torch stays out of this one."""
    models: list[tuple[FamilyPart, str]] = [
        *(("decoder", model) for model in plan.decoders),
        *(("encoder", model) for model in plan.encoders),
    ]
    module_result("benchmarks.family.prepare", json.dumps({"sizes": asdict(plan.sizes), "models": models}))


@click.command()
@click.option("--decoder", "decoders", multiple=True, default=DECODERS, show_default=True, help="A preset.")
@click.option("--encoder", "encoders", multiple=True, type=click.Choice([*ENCODERS]), default=[*ENCODERS])
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=[1, 8, 32], show_default=True)
@click.option("--target", "targets", multiple=True, type=click.IntRange(2), default=(32, *LENGTHS), show_default=True)
@click.option("--source", "sources", multiple=True, type=click.IntRange(1), default=LENGTHS, show_default=True)
@click.option("--decoded-source", default=64, show_default=True, help="Length of the sources whose target is decoded.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@record.round_options(rounds=2, repetitions=5, measured="model")
@record.file_options(OUT)
def main(rounds: int, decoded_source: int, **options: Any) -> None:
    """Time long targets and long sources of the FAT family; writes JSON."""
    run = record.Recording(**record.popped(options, "cache", "out"), packages=("fatdeploy", "onnxruntime", "numpy"))
    lengths = {name: tuple(sorted(options.pop(name))) for name in ("targets", "sources")}
    repetitions = options.pop("repetitions")
    sizes = FamilySizes(cache=str(run.cache), source=decoded_source, repetitions=repetitions, **lengths)
    plan = FamilyPlan(sizes=sizes, **options)
    prepare(plan)
    probe = NoiseProbe()
    results = run.measured(
        dict.fromkeys(plan.turns(), rounds),
        lambda turn: probe.measured(lambda: turn_result("benchmarks.family.turns", turn, plan.sizes)),
        {"plan": asdict(plan)},
    )
    noise = probe.facts([turn_round for found in results.values() for turn_round in found])
    run.write(result_of(plan, results, noise))


if __name__ == "__main__":
    main()
