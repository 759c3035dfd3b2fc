"""Show where the time of a bundle's decoder step goes: ms by op type, and the nodes that cost most.

It reads onnxruntime's own profile of some steps after a warm-up. Profiling slows every op, so trust the shares rather
than the sums: ``quantized`` and ``greedy`` measure how long a step takes.
"""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.harness.provenance import provenance
from benchmarks.harness.timing import timed_greedy
from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.spec import ModelSpec
from fatdeploy.tables import aligned

WARM_UP = 4  # steps at the start that are left out
SUFFIX = "_kernel_time"  # onnxruntime's, on every node's name
READ_BYTES = 1 << 28  # far larger than any cache
PACKAGES = ("fatdeploy", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Cost:
    """The cost of an op type, or of a node, in a step."""

    name: str
    op: str
    calls: float  # per step
    ms: float  # per step, without the nodes of its branches


@dataclass(frozen=True)
class Profile:
    """Where a step's time goes."""

    steps: int
    ms: float  # per step, from call to return inside onnxruntime
    ops: list[Cost]
    nodes: list[Cost]

    @property
    def between_ms(self) -> float:
        """The time of a step outside its ops."""
        return self.ms - sum(op.ms for op in self.ops)


def recorded(bundle: Bundle, *, batch: int, threads: int, source: int, steps: int) -> list[dict[str, Any]]:
    """Return onnxruntime's profile of the decoder for a number of steps on random sources."""
    spec = bundle.spec
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, (batch, min(source, spec.max_source)))
    with tempfile.TemporaryDirectory() as folder:
        # Closing the engine writes the profile.
        with closing(OrtEngine(bundle, OrtOptions(threads=threads, profile=Path(folder)))) as engine:
            timed_greedy(engine, ids, np.ones_like(ids, bool), steps)
        [record] = Path(folder).glob(f"{DECODER}*.json")
        events: list[dict[str, Any]] = json.loads(record.read_text())
        return events


def profile_of(events: list[dict[str, Any]], warm_up: int = WARM_UP) -> Profile:
    """Return where the time of the steps after the warm-up went; medians, because other processes disturb some."""
    runs = sorted((event for event in events if event["name"] == "model_run"), key=lambda run: run["ts"])[warm_up:]
    nodes = [event for event in events if event["cat"] == "Node" and event["ts"] >= runs[0]["ts"]]
    costs = _by_node(nodes, len(runs))
    ms = float(np.median([run["dur"] for run in runs])) / 1e3
    return Profile(steps=len(runs), ms=ms, ops=_by_op(costs), nodes=costs)


def cache_bytes(spec: ModelSpec, *, batch: int, source: int, steps: int) -> int:
    """Return the bytes of keys and values that an average step reads: of the source and of half of the steps."""
    sizes = {"batch": batch, "rows": batch, "source": source, "capacity": steps // 2}
    tensors = [*spec.memory, *(tensor for tensor in spec.state if tensor.kind == "cache")]
    return sum(math.prod(tensor.sized(sizes)) * np.dtype(tensor.dtype).itemsize for tensor in tensors)


def own_times(nodes: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield nodes with their own microseconds: those of an ``If`` exclude the nodes of its branch."""
    ordered = sorted(nodes, key=lambda event: (event["ts"], -event["dur"]))
    own = [event["dur"] for event in ordered]
    enclosing: list[int] = []
    for index, event in enumerate(ordered):
        while enclosing and event["ts"] >= ordered[enclosing[-1]]["ts"] + ordered[enclosing[-1]]["dur"]:
            enclosing.pop()
        if enclosing:
            own[enclosing[-1]] -= event["dur"]
        enclosing.append(index)
    return zip(ordered, own, strict=True)


def _by_node(nodes: list[dict[str, Any]], steps: int) -> list[Cost]:
    """Return the cost of each node in a step, the largest first."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event, own in own_times(nodes):
        times[event["name"].removesuffix(SUFFIX), event["args"]["op_name"]].append(own)
    costs = [
        Cost(*names, calls := len(durations) / steps, float(np.median(durations)) * calls / 1e3)
        for names, durations in times.items()
    ]
    return sorted(costs, key=lambda cost: -cost.ms)


def _by_op(nodes: list[Cost]) -> list[Cost]:
    """Return the cost of each op type in a step, the largest first."""
    groups: dict[str, list[Cost]] = defaultdict(list)
    for node in nodes:
        groups[node.op].append(node)
    costs = [
        Cost(op, op, sum(node.calls for node in group), sum(node.ms for node in group)) for op, group in groups.items()
    ]
    return sorted(costs, key=lambda cost: -cost.ms)


def lines(profile: Profile, top: int) -> Iterator[str]:
    """Yield both tables."""
    yield f"{profile.ms:.3f} ms per step over {profile.steps} steps, {profile.between_ms:.3f} of it between ops"
    yield ""
    ops = [(cost.op, f"{cost.calls:g}", f"{cost.ms:.3f}", f"{cost.ms / profile.ms:.1%}") for cost in profile.ops]
    yield from aligned([("op", "calls", "ms", "share"), *ops])
    yield ""
    costs = profile.nodes[:top]
    nodes = [(cost.name, cost.op, f"{cost.ms:.3f}", f"{cost.ms / profile.ms:.1%}") for cost in costs]
    yield from aligned([("node", "op", "ms", "share"), *nodes])


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--source", type=click.IntRange(1), default=32, show_default=True, help="Source length.")
@click.option(
    "--steps", type=click.IntRange(1), default=60, show_default=True, help=f"Steps after {WARM_UP} of warm-up."
)
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="Nodes in the table.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all nodes.")
def main(bundle: Path, batch: int, threads: int, source: int, steps: int, top: int, as_json: bool) -> None:
    """Show where the time of a decoder step goes."""
    loaded = read_bundle(bundle)
    setting = {"batch": batch, "threads": threads, "source": source}
    profile = profile_of(recorded(loaded, steps=WARM_UP + steps, **setting))
    if as_json:
        made_by = {**provenance(PACKAGES), "bundle": loaded.digest, "precision": loaded.manifest.precision, **setting}
        click.echo(json.dumps({**made_by, **asdict(profile), "between_ms": profile.between_ms}, indent=2))
        return
    for line in lines(profile, top):
        click.echo(line)


if __name__ == "__main__":
    main()
