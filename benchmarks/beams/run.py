"""Time beam search of an exported bundle against CTranslate2 on the same weights; writes JSON.

Also measured: memory with one beam and with many, of which the sources' part must not grow, and greedy steps with a
shortlist. Every engine and setting has a process of its own, processes take turns (A B A B …), and nothing is recorded
of tokens that are not the reference's. An interrupted run goes on where it was.
"""

import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.beams.turns import BeamPart, BeamSizes, BeamTurn
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
from benchmarks.harness.turns import Cache
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import WEIGHTS

OUT = RESULTS / "engines_beam.json"
WORKERS = (1, 2)  # of CTranslate2
PACKAGES = ("fatdeploy", "onnxruntime", "ctranslate2", "torch", "numpy")
# What a beam search may take of CTranslate2's time, from the source to the targets.
TARGET = 0.8
# The step of each engine by the difference of two decodes, and the whole: CTranslate2 tells no more.
COMPARED = ("end_to_end", "per_token_by_difference")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: the axes of the benchmark."""

    parts: tuple[BeamPart, ...]
    preset: str
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    beams: int
    most_beams: int
    shortlist: int
    rounds: int
    sizes: BeamSizes

    def turns(self) -> list[BeamTurn]:
        """Return the turns of one round; neighbours are different engines or settings."""
        every = [turn for batch in self.batches for turn in (*self._beams(batch), *self._shortlist(batch))]
        every += [
            self._turn("memory", min(self.batches), beams, threads=max(self.threads)) for beams in (1, self.most_beams)
        ]
        return [turn for turn in every if turn.part in self.parts]

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
        """Return how often each turn is taken: what is no matter of luck only once."""
        return {turn: 1 if turn.part == "memory" else self.rounds for turn in self.turns()}


def prepare(plan: Plan) -> None:
    """Write bundle, CTranslate2 model and sources, in a process of their own: torch stays out of this one."""
    cases = sorted({(turn.batch, turn.beams) for turn in plan.turns()})
    result_apart("benchmarks.beams.prepare", json.dumps({"sizes": asdict(plan.sizes), "cases": {plan.preset: cases}}))


def result_from_turns(plan: Plan, found: dict[BeamTurn, list[Any]]) -> dict[str, Any]:
    """Return all that is written, provenance apart."""
    of = {part: {turn: rounds for turn, rounds in found.items() if turn.part == part} for part in get_args(BeamPart)}
    bundle = read_bundle(Cache(Path(plan.sizes.cache), plan.preset).bundle)
    return {
        "precision": "fp32",
        "threads": plan.threads,
        "source": plan.sizes.source,
        "target": plan.sizes.target,
        "beams": plan.beams,
        "rounds": plan.rounds,
        "tokens_checked": True,
        "bundles": {plan.preset: {"digest": bundle.digest, "weights_bytes": bundle.manifest.files[WEIGHTS].size}},
        "results": _with_ratios([_row(turn, rounds) for turn, rounds in of["beams"].items()]),
        "memory": [_setting(turn) | only for turn, [only] in of["memory"].items()],
        "shortlist": _with_full([_row(turn, rounds) for turn, rounds in of["shortlist"].items()]),
    }


def _setting(turn: BeamTurn) -> dict[str, Any]:
    return {name: value for name, value in asdict(turn).items() if name != "part"}


def _row(turn: BeamTurn, rounds: list[Any]) -> dict[str, Any]:
    phases = [phases for one in rounds for phases in one["phases"]]
    loads = [{"load": one["load"]} for one in rounds]
    return {**_setting(turn), "repetitions": len(phases), "phases": summary(phases) | summary(loads)}


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark CTranslate2's best setting of each batch, by the median of the whole, and say all relative to it."""
    peers = [row for row in rows if row["engine"] == "ctranslate2"]
    best = {
        batch: min((row for row in peers if row["batch"] == batch), key=lambda row: _p50(row, "end_to_end"))
        for batch in {row["batch"] for row in peers}
    }
    return [
        {
            **row,
            "best_ctranslate2": row is (peer := best[row["batch"]]),
            "ratio_to_ctranslate2": (ratios := {name: _ratio(row, peer, name) for name in COMPARED}),
            "within_target": None if row["engine"] == "ctranslate2" else ratios["end_to_end"]["p50"] <= TARGET,
        }
        for row in rows
    ]


def _with_full(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say each shortlist relative to the whole vocabulary."""
    full = {(row["batch"], row["threads"]): row for row in rows if not row["shortlist"]}
    return [
        {**row, "ratio_to_full": {name: _ratio(row, full[row["batch"], row["threads"]], name) for name in COMPARED}}
        for row in rows
    ]


def _p50(row: dict[str, Any], phase: str) -> float:
    return float(row["phases"][phase]["p50_ms"])


def _ratio(ours: dict[str, Any], theirs: dict[str, Any], phase: str) -> dict[str, float]:
    return {
        name: ours["phases"][phase][f"{name}_ms"] / theirs["phases"][phase][f"{name}_ms"] for name in ("min", "p50")
    }


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(get_args(BeamPart)), default=get_args(BeamPart))
@click.option("--preset", default="transformer-base", show_default=True)
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=[1, 8], show_default=True)
@click.option("--threads", multiple=True, type=click.IntRange(1), default=[1, 2], show_default=True)
@click.option("--beams", type=click.IntRange(2), default=4, show_default=True)
@click.option("--most-beams", type=click.IntRange(2), default=8, show_default=True, help="For memory.")
@click.option("--shortlist", type=click.IntRange(2), default=2000, show_default=True, help="Tokens that may be said.")
@click.option("--source", default=32, show_default=True, help="Source length.")
@click.option("--target", type=click.IntRange(2), default=64, show_default=True, help="Decoder steps.")
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Turns of each engine.")
@click.option("--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Decodes in a turn.")
@click.option("--cache", default=CACHE, type=click.Path(path_type=Path), show_default="build/benchmarks")
@click.option("--out", default=OUT, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
def main(**options: Any) -> None:
    """Time beams, their memory and shortlists against CTranslate2 on the same weights; writes JSON."""
    cache, out = options.pop("cache").resolve(), options.pop("out").resolve()
    common = {name: options.pop(name) for name in ("source", "target", "repetitions")}
    plan = Plan(sizes=BeamSizes(cache=str(cache), **common), **options)
    cache.mkdir(parents=True, exist_ok=True)
    prepare(plan)
    kept = Kept(cache / f"{out.stem}.partial.json", {"plan": asdict(plan), "code": code_digest(*MEASURED)})
    found = measured(
        "benchmarks.beams.turns", plan.n_rounds(), {"sizes": asdict(plan.sizes)}, kept, lambda turn: turn.threads
    )
    write_result(out, {**provenance(PACKAGES), **result_from_turns(plan, found)}, kept)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
