"""Time quantized bundles against every peer on the CPU, on the same weights and sources; writes JSON.

Beside bundles in each precision: CTranslate2 in every precision that it has here, a plain ``torch.onnx`` export with
growing caches, and the PyTorch reference. optimum-onnx is left out: it exports models of Hugging Face, and these
weights are none. Tokens come first: an fp32 engine must give the reference's, beside every other one's time stands the
share on which it agrees. Every engine and setting has a process of its own, processes take turns (A B A B …). An
interrupted run goes on where it was.
"""

import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.harness.decoders import STEP, EngineName
from benchmarks.harness.measuring import (
    CACHE,
    MEASURED,
    RESULTS,
    Kept,
    code_digest,
    measured,
    provenance,
    result_apart,
    summary,
    write_result,
)
from benchmarks.harness.memory_alone import ENGINES as ALONE
from benchmarks.harness.turns import FP32, Cache, Sizes
from benchmarks.quantized.targets import Row, fastest, p50, rows_of, targets, with_batch
from benchmarks.quantized.turns import QuantizedTurn
from fatdeploy.bundle import read_bundle

OUT = RESULTS / "quantized.json"
PRECISIONS = (FP32, "int8", "int4")  # of bundles
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
PACKAGES = ("fatdeploy", "onnxruntime", "ctranslate2", "torch", "onnxscript", "numpy")
COMPARED = (STEP, "end_to_end")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: the axes of the benchmark."""

    preset: str
    engines: tuple[EngineName, ...]
    precisions: tuple[str, ...]  # of bundles
    compute_types: tuple[str, ...]  # of CTranslate2
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    sizes: Sizes

    def turns(self) -> list[QuantizedTurn]:
        """Return the turns of one round; neighbours are different engines or settings."""
        return [
            turn
            for batch in self.batches
            for turn in (*self._greedy(batch), *self._forced(batch), *self._memory(batch), *self._profiles(batch))
        ]

    def _greedy(self, batch: int) -> list[QuantizedTurn]:
        same: dict[str, Any] = {"part": "greedy", "preset": self.preset, "batch": batch}
        every = [
            *self._ours(same),
            *(
                QuantizedTurn(engine="ctranslate2", precision=name, threads=threads, workers=workers, **same)
                for name, (threads, workers) in product(self.compute_types, self._pools(batch))
            ),
            *(QuantizedTurn(engine="plain", threads=threads, **same) for threads in self.threads),
            QuantizedTurn(engine="reference", threads=max(self.threads), **same),
        ]
        return [turn for turn in every if turn.engine in self.engines]

    def _ours(self, same: dict[str, Any]) -> list[QuantizedTurn]:
        return [
            QuantizedTurn(engine="fatdeploy", precision=precision, threads=threads, **same)
            for precision, threads in product(self.precisions, self.threads)
        ]

    def _pools(self, batch: int) -> list[tuple[int, int]]:
        """Return CTranslate2's threads a worker and workers: one worker with each, or as many workers of one thread."""
        most = max(self.threads)
        return [*((threads, 1) for threads in self.threads), *([(1, most)] if batch > 1 and most > 1 else [])]

    def _forced(self, batch: int) -> list[QuantizedTurn]:
        """Return one comparison of each quantized engine; its tokens do not depend on threads."""
        cases = dict.fromkeys((turn.engine, turn.precision) for turn in self._greedy(batch) if not turn.exact)
        same: dict[str, Any] = {"part": "forced", "preset": self.preset, "batch": batch, "threads": max(self.threads)}
        return [QuantizedTurn(engine=engine, precision=precision, **same) for engine, precision in cases]

    def _memory(self, batch: int) -> list[QuantizedTurn]:
        """Return one look at the memory of each setting of the engines that are compared by it."""
        return [replace(turn, part="memory") for turn in self._greedy(batch) if turn.engine in ALONE]

    def _profiles(self, batch: int) -> list[QuantizedTurn]:
        """Return one look at where the steps of quantized bundles spend their time."""
        same: dict[str, Any] = {"part": "profile", "preset": self.preset, "batch": batch}
        return [turn for turn in self._ours(same) if turn.threads == max(self.threads) and not turn.exact]

    def n_rounds(self) -> dict[QuantizedTurn, int]:
        """Return how often each turn is taken: what is no matter of luck only once."""
        return {turn: self.rounds if turn.part == "greedy" else 1 for turn in self.turns()}


def prepare(options: dict[str, Any], sizes: Sizes) -> dict[str, str]:
    """Write all models and sources, in a process of its own: torch stays out of this one.

    Return what CTranslate2 computes in for each of its compute types.
    """
    needed = {name: options[name] for name in ("preset", "batches", "engines", "precisions")}
    computed: dict[str, str] = result_apart(
        "benchmarks.quantized.prepare", json.dumps({"sizes": asdict(sizes), **needed})
    )
    return computed


def result_from_turns(plan: Plan, found: dict[QuantizedTurn, list[Any]]) -> dict[str, Any]:
    """Return all that is written, provenance apart."""
    forced = {
        (turn.engine, turn.precision, turn.batch): one["agreeing"]
        for turn, [one, *_] in found.items()
        if turn.part == "forced"
    }
    memory = {turn: one for turn, [one, *_] in found.items() if turn.part == "memory"}
    rows = [
        {**_row(turn, rounds, forced), "memory": memory.get(replace(turn, part="memory"))}
        for turn, rounds in found.items()
        if turn.part == "greedy"
    ]
    rows = [row for batch in plan.batches for row in _compared(with_batch(rows, batch))]
    return {
        "threads": plan.threads,
        "source": plan.sizes.source,
        "target": plan.sizes.target,
        "rounds": plan.rounds,
        "tokens_checked": True,
        "bundles": _bundles(plan),
        "results": rows,
        "targets": targets(rows),
        "profiles": [
            {"precision": turn.precision, "batch": turn.batch, "threads": turn.threads, **one}
            for turn, [one, *_] in found.items()
            if turn.part == "profile"
        ],
    }


def _bundles(plan: Plan) -> dict[str, Any]:
    cache = Cache(Path(plan.sizes.cache), plan.preset)
    bundles = {precision: read_bundle(cache.model("fatdeploy", precision)) for precision in plan.precisions}
    return {precision: {"digest": one.digest, "bytes": one.total_bytes} for precision, one in bundles.items()}


def _row(turn: QuantizedTurn, rounds: list[Any], forced: dict[tuple[EngineName, str, int], float]) -> Row:
    phases = [phases for one in rounds for phases in one["phases"]]
    loads = [{"load": one["load"]} for one in rounds if one["load"] is not None]
    prefix = rounds[0]["agreeing_prefix"]
    return {
        **{name: value for name, value in asdict(turn).items() if name != "part"},
        "repetitions": len(phases),
        "phases": summary(phases) | (summary(loads) if loads else {}),
        # An engine that says all of the reference's tokens by itself says them as well when it is given them.
        "agreement": {
            "forced": forced.get((turn.engine, turn.precision, turn.batch), 1.0 if prefix == 1 else None),
            "prefix": prefix,
        },
        "bytes_on_disk": rounds[0]["bytes_on_disk"],
    }


def _compared(rows: list[Row]) -> list[Row]:
    """Say how many times faster than CTranslate2's best setting each row of a batch is, and mark the best settings."""
    peers = {phase: fastest(rows_of(rows, "ctranslate2"), phase) for phase in COMPARED}
    # Of a peer one setting is the best, of bundles one for each precision.
    groups = [rows_of(rows, engine) for engine in ENGINES if engine != "fatdeploy"]
    groups += [rows_of(rows, "fatdeploy", (precision,)) for precision in PRECISIONS]
    best = [fastest(group, STEP) for group in groups]
    return [
        {
            **row,
            "times_faster": {
                phase: None if peer is None else p50(peer, phase) / p50(row, phase) for phase, peer in peers.items()
            },
            "best_setting": any(row is one for one in best),
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
    help="Of bundles.",
)
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=[1, 8, 32], show_default=True)
@click.option("--threads", multiple=True, type=click.IntRange(1), default=[1, 2], show_default=True)
@click.option("--source", default=32, show_default=True, help="Source length.")
@click.option("--target", type=click.IntRange(2), default=64, show_default=True, help="Decoder steps.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Turns of each engine.")
@click.option("--repetitions", type=click.IntRange(1), default=4, show_default=True, help="Decodes in a turn.")
@click.option("--cache", default=CACHE, type=click.Path(path_type=Path), show_default="build/benchmarks")
@click.option("--out", default=OUT, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
def main(**options: Any) -> None:
    """Time bundles in each precision against CTranslate2, a plain export and PyTorch; writes JSON."""
    cache, out = options.pop("cache").resolve(), options.pop("out").resolve()
    sizes = Sizes(cache=str(cache), **{name: options.pop(name) for name in ("source", "target", "repetitions")})
    if "fatdeploy" not in options["engines"]:
        options["precisions"] = ()
    cache.mkdir(parents=True, exist_ok=True)
    computed = prepare(options, sizes)
    plan = Plan(sizes=sizes, compute_types=tuple(computed), **options)
    kept = Kept(cache / f"{out.stem}.partial.json", {"plan": asdict(plan), "code": code_digest(*MEASURED)})
    found = measured(
        "benchmarks.quantized.turns", plan.n_rounds(), {"sizes": asdict(sizes)}, kept, lambda turn: turn.threads
    )
    result = result_from_turns(plan, found)
    write_result(out, {**provenance(PACKAGES), "preset": plan.preset, "compute_types": computed, **result}, kept)
    for target in result["targets"]:
        click.echo(target["said"], err=True)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
