"""Time greedy decoding of an exported bundle against CTranslate2 and PyTorch on the same weights; writes JSON.

Also measured: how a step's cost grows with its position, resident memory, load and export. Every engine and setting has
a process of its own, processes take turns (A B A B …), and no time is recorded of tokens that are not the reference's.
An interrupted run goes on where it was.
"""

import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.harness.decoders import STEP
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
from benchmarks.harness.turns import FLOAT32, FP32, Cache, Part, Sizes, Turn
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import WEIGHTS

OUT = RESULTS / "engines_greedy.json"
WORKERS = (1, 2)  # of CTranslate2
LARGEST_STEADY_BATCH = 8
# Of a run that says nothing else; the time of an export has a result of its own.
PARTS: tuple[Part, ...] = ("greedy", "positions", "memory")
PACKAGES = ("fatdeploy", "onnxruntime", "ctranslate2", "torch", "numpy")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: the axes of the benchmark."""

    parts: tuple[Part, ...]
    presets: tuple[str, ...]
    steady_preset: str
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    sizes: Sizes

    @property
    def steady_batches(self) -> list[int]:
        """Batches with which positions are compared."""
        return [batch for batch in self.batches if batch <= LARGEST_STEADY_BATCH]

    def turns(self) -> list[Turn]:
        """Return the turns of one round; neighbours are different engines or settings."""
        most, least = max(self.threads), min(self.batches)
        every = [turn for preset, batch in product(self.presets, self.batches) for turn in self._greedy(preset, batch)]
        steady: dict[str, Any] = {"preset": self.steady_preset, "engine": "fatdeploy", "threads": most}
        every += [Turn(part="positions", batch=batch, **steady) for batch in self.steady_batches]
        every += [
            Turn(part="memory", preset=preset, engine="fatdeploy", batch=least, threads=most) for preset in self.presets
        ]
        every.append(Turn(part="export", batch=1, **steady))
        return [turn for turn in every if turn.part in self.parts]

    def _greedy(self, preset: str, batch: int) -> list[Turn]:
        workers = WORKERS if batch > 1 else (1,)
        same: dict[str, Any] = {"part": "greedy", "preset": preset, "batch": batch}
        return [
            *(Turn(engine="fatdeploy", threads=threads, **same) for threads in self.threads),
            *(
                Turn(engine="ctranslate2", precision=FLOAT32, threads=threads, workers=count, **same)
                for threads, count in product(self.threads, workers)
            ),
            Turn(engine="reference", threads=max(self.threads), **same),
        ]

    def n_rounds(self) -> dict[Turn, int]:
        """Return how often each turn is taken: what is no matter of luck only once."""
        return {turn: self.rounds if turn.part in ("greedy", "positions") else 1 for turn in self.turns()}


def prepare(plan: Plan) -> None:
    """Write bundles, CTranslate2 models and sources, in a process of their own: torch stays out of this one."""
    needed = {
        "sizes": asdict(plan.sizes),
        "greedy": {preset: plan.batches for preset in plan.presets if {"greedy", "memory"} & {*plan.parts}},
        "positions": {plan.steady_preset: plan.steady_batches} if "positions" in plan.parts else {},
    }
    result_apart("benchmarks.harness.prepare", json.dumps(needed))


def result_from_turns(plan: Plan, found: dict[Turn, list[Any]]) -> dict[str, Any]:
    """Return all that is written, provenance apart."""
    of = {part: {turn: rounds for turn, rounds in found.items() if turn.part == part} for part in get_args(Part)}
    return {
        "precision": FP32,
        "threads": plan.threads,
        "source": plan.sizes.source,
        "target": plan.sizes.target,
        "rounds": plan.rounds,
        "tokens_checked": True,
        "bundles": _bundles(plan),
        "results": _with_ratios([_greedy_row(turn, rounds) for turn, rounds in of["greedy"].items()]),
        "positions": [_positions_row(turn, rounds, plan.sizes) for turn, rounds in of["positions"].items()],
        "memory": [_memory_row(turn, rounds[0]) for turn, rounds in of["memory"].items()],
        "export": [_setting(turn) | rounds[0] for turn, rounds in of["export"].items()],
    }


def _bundles(plan: Plan) -> dict[str, Any]:
    folders = {preset: Cache(Path(plan.sizes.cache), preset).bundle for preset in (*plan.presets, plan.steady_preset)}
    bundles = {preset: read_bundle(folder) for preset, folder in folders.items() if folder.exists()}
    return {
        preset: {"digest": bundle.digest, "weights_bytes": bundle.manifest.files[WEIGHTS].size}
        for preset, bundle in bundles.items()
    }


def _setting(turn: Turn) -> dict[str, Any]:
    return {name: value for name, value in asdict(turn).items() if name != "part"}


def _greedy_row(turn: Turn, rounds: list[Any]) -> dict[str, Any]:
    phases = [phases for one in rounds for phases in one["phases"]]
    loads = [{"load": one["load"]} for one in rounds if one["load"] is not None]
    summaries = summary(phases) | (summary(loads) if loads else {})
    return {**_setting(turn), "repetitions": len(phases), "phases": summaries}


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark CTranslate2's best setting of each batch, by the median step, and say every other step relative to it."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        case = row["preset"], row["batch"]
        if row["engine"] == "ctranslate2" and (case not in best or _p50(row) < _p50(best[case])):
            best[case] = row
    return [
        {
            **row,
            "best_ctranslate2": row is (peer := best[row["preset"], row["batch"]]),
            "ratio_to_ctranslate2": _ratio(row["phases"][STEP], peer["phases"][STEP]),
        }
        for row in rows
    ]


def _p50(row: dict[str, Any]) -> float:
    return float(row["phases"][STEP]["p50_ms"])


def _ratio(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    return {name: ours[f"{name}_ms"] / theirs[f"{name}_ms"] for name in ("min", "p50")}


def _positions_row(turn: Turn, rounds: list[Any], sizes: Sizes) -> dict[str, Any]:
    samples = [phases for one in rounds for phases in one]
    phases = summary(samples)
    early, late = (phases[f"position_{position}"] for position in sizes.positions)
    return {
        **_setting(turn),
        "positions": sizes.positions,
        "samples": len(samples),
        "phases": phases,
        "ratio": _ratio(late, early),
    }


def _memory_row(turn: Turn, result: dict[str, int]) -> dict[str, Any]:
    limit = round(1.75 * result["weights_bytes"] + 150e6)
    most = max(result["after_load_bytes"], result["after_decode_bytes"])
    return {**_setting(turn), **result, "limit_bytes": limit, "within_limit": most <= limit}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(get_args(Part)), default=PARTS, show_default=True)
@click.option("--preset", "presets", multiple=True, default=["transformer-base"], show_default=True)
@click.option("--steady-preset", default="fat-base", show_default=True, help="For positions and export.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=[1, 8, 32], show_default=True)
@click.option("--threads", multiple=True, type=click.IntRange(1), default=[1, 2], show_default=True)
@click.option("--source", default=32, show_default=True, help="Source length.")
@click.option("--target", type=click.IntRange(2), default=64, show_default=True, help="Decoder steps.")
@click.option("--positions", nargs=2, type=click.IntRange(4), default=(10, 400), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Turns of each engine.")
@click.option("--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Decodes in a turn.")
@click.option("--cache", default=CACHE, type=click.Path(path_type=Path), show_default="build/benchmarks")
@click.option("--out", default=OUT, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
def main(**options: Any) -> None:
    """Time bundles against CTranslate2 and PyTorch on the same weights; writes JSON."""
    cache, out = options.pop("cache").resolve(), options.pop("out").resolve()
    common = {name: options.pop(name) for name in ("source", "target", "repetitions", "positions")}
    plan = Plan(sizes=Sizes(cache=str(cache), **common), **options)
    cache.mkdir(parents=True, exist_ok=True)
    prepare(plan)
    made_by = {"plan": asdict(plan), "code": code_digest(*MEASURED)}
    kept = Kept(cache / f"{out.stem}.partial.json", made_by)
    found = measured("benchmarks.harness.turns", plan.n_rounds(), {"sizes": asdict(plan.sizes)}, kept)
    write_result(out, {**provenance(PACKAGES), **result_from_turns(plan, found)}, kept)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
