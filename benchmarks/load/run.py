"""Put one model under load from many threads, and see that nothing is wrong, lost or left behind; writes JSON.

Requests are of all kinds and lengths, and some are cancelled. Every result must be the one that a single thread gets,
memory must stay flat after a warm-up, and no thread, state or buffer may be left. Each bundle has a process of its own.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.recording import Recording, file_options
from benchmarks.harness.rounds import module_result, turn_result
from benchmarks.harness.settings import ModelCache
from benchmarks.load.turns import FLAT, WARM_UP, LoadSizes, LoadTurn

OUT = RESULTS / "load.json"
PRESETS = ("transformer-tiny", "fat-tiny")
PACKAGES = ("fatdeploy", "onnxruntime", "numpy")


def bundles_of(presets: tuple[str, ...], cache: Path) -> list[LoadTurn]:
    """Return the bundles of presets, written in a process of their own: torch stays out of this one."""
    module_result("benchmarks.harness.prepare", json.dumps({"bundles": presets, "cache": str(cache)}))
    return [LoadTurn(name=preset, bundle=str(ModelCache(cache, preset).bundle)) for preset in presets]


def result_from_turns(sizes: LoadSizes, results: dict[LoadTurn, list[Any]]) -> dict[str, Any]:
    """Return the result without its provenance and without paths."""
    return {
        **asdict(sizes),
        "warm_up": WARM_UP,
        "flat": FLAT,
        "results": [{"bundle": turn.name, **only} for turn, [only] in results.items()],
    }


def unmet(result: dict[str, Any]) -> list[str]:
    """Return every condition that a bundle did not meet."""
    return [
        f"{row['bundle']}: {name}"
        for row in result["results"]
        for name, holds in row["conditions"].items()
        if not holds
    ]


@click.command()
@click.option("--bundle", "bundles", multiple=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--preset", "presets", multiple=True, help=f"Presets to export, if there is no --bundle  [default: {PRESETS}]"
)
@click.option("--requests", type=click.IntRange(8), default=2000, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--seed", default=0, show_default=True)
@file_options(OUT)
def main(bundles: tuple[Path, ...], presets: tuple[str, ...], cache: Path, out: Path, **options: Any) -> None:
    """Decode mixed requests from many threads on one model; writes JSON, fails if a condition is not met."""
    sizes, run = LoadSizes(**options), Recording(cache, out, PACKAGES)
    turns = [LoadTurn(name=path.name, bundle=str(path.resolve())) for path in bundles]
    if presets or not bundles:
        turns += bundles_of(presets or PRESETS, run.cache)
    made_by = {"turns": [asdict(turn) for turn in turns], "sizes": asdict(sizes)}
    module = "benchmarks.load.turns"
    results = run.measured(dict.fromkeys(turns, 1), lambda turn: turn_result(module, turn, sizes), made_by)
    result = result_from_turns(sizes, results)
    run.write(result)
    if reasons := unmet(result):
        raise SystemExit("\n".join(["conditions not met:", *reasons]))


if __name__ == "__main__":
    main()
