"""Time quantized bundles against every peer on the CPU, on the same weights and sources; writes JSON.

Bundles in each precision run beside CTranslate2 in every precision that it supports on this CPU, a plain ``torch.onnx``
export with growing caches, and the PyTorch reference. optimum-onnx is left out: it exports only Hugging Face models.
Tokens come first: an fp32 engine must give the reference's, and every other engine's time comes with its share of equal
tokens. Every engine and setting has a process of its own, processes take turns (A B A B …). An interrupted run
continues where it stopped.
"""

import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, get_args

import click

from benchmarks.harness import recording as record
from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.rounds import module_result
from benchmarks.harness.rows import Row, p50, plan_facts, timed_row
from benchmarks.harness.settings import FP32, DecodeSizes, EngineName
from benchmarks.harness.timing import STEP
from benchmarks.quantized.memory_alone import ENGINES as ALONE
from benchmarks.quantized.targets import fastest_or_none, rows_of, targets, with_batch
from benchmarks.quantized.turns import QuantizedTurn
from fatdeploy.bundle import read_bundle

OUT = RESULTS / "quantized.json"
PRECISIONS = (FP32, "int8", "int4")  # of bundles
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
PACKAGES = ("fatdeploy", "onnxruntime", "ctranslate2", "torch", "onnxscript", "numpy")
COMPARED = (STEP, "end_to_end")


@dataclass(frozen=True, kw_only=True)
class QuantizedPlan:
    """What is measured: the axes of the benchmark."""

    preset: str
    engines: tuple[EngineName, ...]
    precisions: tuple[str, ...]  # of bundles
    compute_types: tuple[str, ...]  # of CTranslate2
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    sizes: DecodeSizes

    def turns(self) -> list[QuantizedTurn]:
        """Return the turns of one round; neighbours are different engines or settings."""
        return [
            turn
            for batch in self.batches
            for turn in (*self._greedy(batch), *self._forced(batch), *self._memory(batch), *self._profiles(batch))
        ]

    def _greedy(self, batch: int) -> list[QuantizedTurn]:
        shared: dict[str, Any] = {"part": "greedy", "preset": self.preset, "batch": batch}
        turns = [
            *self._ours(shared),
            *(
                QuantizedTurn(engine="ctranslate2", precision=name, threads=threads, workers=workers, **shared)
                for name, (threads, workers) in product(self.compute_types, self._pools(batch))
            ),
            *(QuantizedTurn(engine="plain", threads=threads, **shared) for threads in self.threads),
            QuantizedTurn(engine="reference", threads=max(self.threads), **shared),
        ]
        return [turn for turn in turns if turn.engine in self.engines]

    def _ours(self, shared: dict[str, Any]) -> list[QuantizedTurn]:
        return [
            QuantizedTurn(engine="fatdeploy", precision=precision, threads=threads, **shared)
            for precision, threads in product(self.precisions, self.threads)
        ]

    def _pools(self, batch: int) -> list[tuple[int, int]]:
        """Return threads per worker and workers of CTranslate2: one worker with all, or workers of one thread."""
        most = max(self.threads)
        return [*((threads, 1) for threads in self.threads), *([(1, most)] if batch > 1 and most > 1 else [])]

    def _forced(self, batch: int) -> list[QuantizedTurn]:
        """Return one comparison per quantized engine; its tokens do not depend on threads."""
        cases = dict.fromkeys((turn.engine, turn.precision) for turn in self._greedy(batch) if not turn.exact)
        shared: dict[str, Any] = {"part": "forced", "preset": self.preset, "batch": batch, "threads": max(self.threads)}
        return [QuantizedTurn(engine=engine, precision=precision, **shared) for engine, precision in cases]

    def _memory(self, batch: int) -> list[QuantizedTurn]:
        """Return one measurement of memory per setting of the engines that are compared by it."""
        return [replace(turn, part="memory") for turn in self._greedy(batch) if turn.engine in ALONE]

    def _profiles(self, batch: int) -> list[QuantizedTurn]:
        """Return one profile of the steps of each quantized bundle."""
        shared: dict[str, Any] = {"part": "profile", "preset": self.preset, "batch": batch}
        return [turn for turn in self._ours(shared) if turn.threads == max(self.threads) and not turn.exact]

    def n_rounds(self) -> dict[QuantizedTurn, int]:
        """Return how often each turn is measured: only once where repetition would change nothing."""
        return {turn: self.rounds if turn.part == "greedy" else 1 for turn in self.turns()}


def prepare(options: dict[str, Any], sizes: DecodeSizes) -> dict[str, str]:
    """Write all models and sources, in a process of its own: torch stays out of this one.

    Returns the type that CTranslate2 computes in for each of its compute types.
    """
    needed = {name: options[name] for name in ("preset", "batches", "engines", "precisions")}
    computed: dict[str, str] = module_result(
        "benchmarks.quantized.prepare", json.dumps({"sizes": asdict(sizes), **needed})
    )
    return computed


def result_from_turns(plan: QuantizedPlan, results: dict[QuantizedTurn, list[Any]]) -> dict[str, Any]:
    """Return the result without its provenance."""
    forced = {
        (turn.engine, turn.precision, turn.batch): result["agreeing"]
        for turn, [result, *_] in results.items()
        if turn.part == "forced"
    }
    memory = {turn: result for turn, [result, *_] in results.items() if turn.part == "memory"}
    rows = [
        {**_row(turn, rounds, forced), "memory": memory.get(replace(turn, part="memory"))}
        for turn, rounds in results.items()
        if turn.part == "greedy"
    ]
    rows = [row for batch in plan.batches for row in _compared(with_batch(rows, batch))]
    return {
        **plan_facts(plan),
        "bundles": _bundles(plan),
        "results": rows,
        "targets": targets(rows),
        "profiles": [
            {"precision": turn.precision, "batch": turn.batch, "threads": turn.threads, **result}
            for turn, [result, *_] in results.items()
            if turn.part == "profile"
        ],
    }


def _bundles(plan: QuantizedPlan) -> dict[str, Any]:
    models = plan.sizes.models(plan.preset)
    bundles = {precision: read_bundle(models.model("fatdeploy", precision)) for precision in plan.precisions}
    return {precision: {"digest": bundle.digest, "bytes": bundle.total_bytes} for precision, bundle in bundles.items()}


def _row(turn: QuantizedTurn, rounds: list[Any], forced: dict[tuple[EngineName, str, int], float]) -> Row:
    prefix = rounds[0]["agreeing_prefix"]
    return {
        **timed_row(turn, rounds),
        # An engine that finds all of the reference's tokens by itself also finds them when they are forced.
        "agreement": {
            "forced": forced.get((turn.engine, turn.precision, turn.batch), 1.0 if prefix == 1 else None),
            "prefix": prefix,
        },
        "bytes_on_disk": rounds[0]["bytes_on_disk"],
    }


def _compared(rows: list[Row]) -> list[Row]:
    """Add to each row of a batch its speed relative to CTranslate2's best setting, and mark the best settings."""
    peers = {phase: fastest_or_none(rows_of(rows, "ctranslate2"), phase) for phase in COMPARED}
    # A peer has one best setting, bundles have one per precision.
    groups = [rows_of(rows, engine) for engine in ENGINES if engine != "fatdeploy"]
    groups += [rows_of(rows, "fatdeploy", (precision,)) for precision in PRECISIONS]
    best = [fastest_or_none(group, STEP) for group in groups]
    return [
        {
            **row,
            "times_faster": {
                phase: None if peer is None else p50(peer, phase) / p50(row, phase) for phase, peer in peers.items()
            },
            "best_setting": any(row is other for other in best),
        }
        for row in rows
    ]


@click.command()
@click.option("--preset", default="transformer-base", show_default=True)
@click.option("--engines", multiple=True, type=click.Choice(ENGINES), default=ENGINES, show_default=True)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(PRECISIONS),
    default=PRECISIONS,
    show_default=True,
    help="Precision of bundles.",
)
@record.batch_and_threads_options([1, 8, 32])
@record.length_options()
@record.round_options(rounds=5, repetitions=4)
@record.file_options(OUT)
def main(**options: Any) -> None:
    """Time bundles in each precision against CTranslate2, a plain export and PyTorch; writes JSON."""
    run = record.Recording(**record.popped(options, "cache", "out"), packages=PACKAGES)
    sizes = DecodeSizes(cache=str(run.cache), **record.popped(options, "source", "target", "repetitions"))
    if "fatdeploy" not in options["engines"]:
        options["precisions"] = ()
    computed = prepare(options, sizes)
    plan = QuantizedPlan(sizes=sizes, compute_types=tuple(computed), **options)
    results = run.measured_by("benchmarks.quantized.turns", plan, plan.n_rounds(), lambda turn: turn.threads)
    result = result_from_turns(plan, results)
    for target in result["targets"]:
        click.echo(target["said"], err=True)
    run.write({"preset": plan.preset, "compute_types": computed, **result})


if __name__ == "__main__":
    main()
