"""Put one model under load from many threads, and see that nothing is wrong, lost or left behind; writes JSON.

Requests are of all kinds and lengths, some are cancelled. Every result must be the one that a single thread gets,
memory must stay where it is after a warm-up, and no thread, state or buffer may be left. Each bundle has a process of
its own.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.measuring import (
    CACHE,
    MEASURED,
    RESULTS,
    Kept,
    code_digest,
    measured,
    provenance,
    result_apart,
    write_result,
)
from benchmarks.harness.turns import Cache
from benchmarks.load.turns import FLAT, WARM_UP, Sizes, Turn

OUT = RESULTS / "load.json"
PRESETS = ("transformer-tiny", "fat-tiny")
PACKAGES = ("fatdeploy", "onnxruntime", "numpy")


def bundles_of(presets: tuple[str, ...], cache: Path) -> list[Turn]:
    """Return the bundles of presets, written in a process of their own: torch stays out of this one."""
    result_apart("benchmarks.harness.prepare", json.dumps({"bundles": presets, "cache": str(cache)}))
    return [Turn(name=preset, bundle=str(Cache(cache, preset).bundle)) for preset in presets]


def result_from_turns(sizes: Sizes, found: dict[Turn, list[Any]]) -> dict[str, Any]:
    """Return all that is written, provenance apart; paths stay out of it."""
    return {
        **asdict(sizes),
        "warm_up": WARM_UP,
        "flat": FLAT,
        "results": [{"bundle": turn.name, **only} for turn, [only] in found.items()],
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
@click.option("--preset", "presets", multiple=True, help=f"Exported if no --bundle is given  [default: {PRESETS}]")
@click.option("--requests", type=click.IntRange(8), default=2000, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--cache", default=CACHE, type=click.Path(path_type=Path), show_default="build/benchmarks")
@click.option("--out", default=OUT, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
def main(bundles: tuple[Path, ...], presets: tuple[str, ...], cache: Path, out: Path, **options: Any) -> None:
    """Decode mixed requests from many threads on one model; writes JSON, fails if something is wrong."""
    sizes, cache, out = Sizes(**options), cache.resolve(), out.resolve()
    turns = [Turn(name=path.name, bundle=str(path.resolve())) for path in bundles]
    if presets or not bundles:
        turns += bundles_of(presets or PRESETS, cache)
    made_by = {"turns": [asdict(turn) for turn in turns], "sizes": asdict(sizes), "code": code_digest(*MEASURED)}
    kept = Kept(cache / f"{out.stem}.partial.json", made_by)
    found = measured("benchmarks.load.turns", dict.fromkeys(turns, 1), {"sizes": asdict(sizes)}, kept)
    result = {**provenance(PACKAGES), **result_from_turns(sizes, found)}
    write_result(out, result, kept)
    click.echo(f"wrote {out}")
    if reasons := unmet(result):
        raise SystemExit("\n".join(["conditions not met:", *reasons]))


if __name__ == "__main__":
    main()
