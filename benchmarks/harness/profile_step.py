"""Show where the time of a bundle's decoder step goes: ms by op type, and the nodes that cost most.

onnxruntime's own record of some steps after a warm-up. Keeping it costs time at every op, so that shares say more than
sums: how long a step takes is for ``quantized`` and ``greedy`` to say.
"""

import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.harness.measuring import provenance, timed_decode
from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.spec import ModelSpec
from fatdeploy.tables import aligned

WARM_UP = 4  # steps that are recorded and left out
SUFFIX = "_kernel_time"  # onnxruntime's, on every node's name
READ_BYTES = 1 << 28  # far more than any cache holds
PACKAGES = ("fatdeploy", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Cost:
    """What an op type, or a node of it, takes of a step."""

    name: str
    op: str
    calls: float  # a step
    ms: float  # a step, what stands inside its branches apart


@dataclass(frozen=True)
class Profile:
    """Where a step's time goes."""

    steps: int
    ms: float  # a step, from call to return inside of onnxruntime
    ops: list[Cost]
    nodes: list[Cost]

    @property
    def between_ms(self) -> float:
        """What a step takes beyond its ops."""
        return self.ms - sum(op.ms for op in self.ops)


def recorded(bundle: Bundle, *, batch: int, threads: int, source: int, steps: int) -> list[dict[str, Any]]:
    """Return what onnxruntime records of the decoder while it says so many tokens of random sources."""
    spec = bundle.spec
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, (batch, min(source, spec.max_source)))
    with tempfile.TemporaryDirectory() as folder:
        engine = OrtEngine(bundle, OrtOptions(threads=threads, profile=Path(folder)))
        timed_decode(engine, ids, np.ones_like(ids, bool), steps)
        engine.close()
        [record] = Path(folder).glob(f"{DECODER}*.json")
        events: list[dict[str, Any]] = json.loads(record.read_text())
        return events


def profile_of(events: list[dict[str, Any]], warm_up: int = WARM_UP) -> Profile:
    """Return where the time of the steps after the warm-up went, by medians: other processes disturb some of them."""
    runs = sorted((event for event in events if event["name"] == "model_run"), key=lambda run: run["ts"])[warm_up:]
    nodes = [event for event in events if event["cat"] == "Node" and event["ts"] >= runs[0]["ts"]]
    costs = _by_node(nodes, len(runs))
    ms = float(np.median([run["dur"] for run in runs])) / 1e3
    return Profile(steps=len(runs), ms=ms, ops=_by_op(costs), nodes=costs)


def cache_bytes(spec: ModelSpec, *, batch: int, source: int, steps: int) -> int:
    """Return the bytes of keys and values, of the source and of half of the steps, that a step reads on the average."""
    sizes = {"batch": batch, "rows": batch, "source": source, "capacity": steps // 2}
    read = [*spec.memory, *(one for one in spec.state if one.kind == "cache")]
    return sum(math.prod(one.sized(sizes)) * np.dtype(one.dtype).itemsize for one in read)


def reading_speed(threads: int) -> float:
    """Return how many bytes a second so many threads read from memory, at best: what no step can be faster than."""
    parts = np.array_split(np.ones(READ_BYTES // 4, np.float32), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - started)
    return READ_BYTES / min(seconds)


def own_times(nodes: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield nodes with their own microseconds: an ``If`` holds the nodes of its branch, which are recorded as well."""
    ordered = sorted(nodes, key=lambda event: (event["ts"], -event["dur"]))
    own = [event["dur"] for event in ordered]
    around: list[int] = []
    for index, event in enumerate(ordered):
        while around and event["ts"] >= ordered[around[-1]]["ts"] + ordered[around[-1]]["dur"]:
            around.pop()
        if around:
            own[around[-1]] -= event["dur"]
        around.append(index)
    return zip(ordered, own, strict=True)


def _by_node(nodes: list[dict[str, Any]], steps: int) -> list[Cost]:
    """Return what each node takes of a step, the most first."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event, own in own_times(nodes):
        times[event["name"].removesuffix(SUFFIX), event["args"]["op_name"]].append(own)
    costs = [
        Cost(*names, calls := len(found) / steps, float(np.median(found)) * calls / 1e3)
        for names, found in times.items()
    ]
    return sorted(costs, key=lambda cost: -cost.ms)


def _by_op(nodes: list[Cost]) -> list[Cost]:
    """Return what each op type takes of a step, the most first."""
    groups: dict[str, list[Cost]] = defaultdict(list)
    for node in nodes:
        groups[node.op].append(node)
    costs = [Cost(op, op, sum(one.calls for one in of), sum(one.ms for one in of)) for op, of in groups.items()]
    return sorted(costs, key=lambda cost: -cost.ms)


def lines(profile: Profile, top: int) -> Iterator[str]:
    """Yield both tables."""
    yield f"{profile.ms:.3f} ms a step over {profile.steps} steps, {profile.between_ms:.3f} of it between ops"
    yield ""
    ops = [(one.op, f"{one.calls:g}", f"{one.ms:.3f}", f"{one.ms / profile.ms:.1%}") for one in profile.ops]
    yield from aligned([("op", "calls", "ms", "share"), *ops])
    yield ""
    nodes = [(one.name, one.op, f"{one.ms:.3f}", f"{one.ms / profile.ms:.1%}") for one in profile.nodes[:top]]
    yield from aligned([("node", "op", "ms", "share"), *nodes])


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--source", type=click.IntRange(1), default=32, show_default=True, help="Source length.")
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True, help=f"After {WARM_UP} of warm-up.")
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="Nodes in the table.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all nodes.")
def main(bundle: Path, batch: int, threads: int, source: int, steps: int, top: int, as_json: bool) -> None:
    """Show where the time of a decoder step goes."""
    read = read_bundle(bundle)
    setting = {"batch": batch, "threads": threads, "source": source}
    profile = profile_of(recorded(read, steps=WARM_UP + steps, **setting))
    if as_json:
        made_by = {**provenance(PACKAGES), "bundle": read.digest, "precision": read.manifest.precision, **setting}
        click.echo(json.dumps({**made_by, **asdict(profile), "between_ms": profile.between_ms}, indent=2))
        return
    for line in lines(profile, top):
        click.echo(line)


if __name__ == "__main__":
    main()
