"""What quantized bundles must reach against their peers, and whether the rows of a result do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.rows import Row, fastest, p50
from benchmarks.harness.settings import EngineName
from benchmarks.harness.targets import judged, limit_of
from benchmarks.harness.timing import STEP


@dataclass(frozen=True)
class SpeedTarget:
    """How many times faster than a peer our bundles must be, by batch; ratio of medians in the best settings."""

    name: str
    phase: str
    precisions: tuple[str, ...]
    peer: EngineName
    needed: dict[int, float]


INT8 = "int8"  # both ours and CTranslate2's
SPEEDS = (
    SpeedTarget(
        "int8 step, times faster than CTranslate2's best", STEP, (INT8,), "ctranslate2", {1: 3.0, 8: 2.0, 32: 1.3}
    ),
    SpeedTarget(
        "best of int8 and int4 step, times faster than CTranslate2's best",
        STEP,
        (INT8, "int4"),
        "ctranslate2",
        {1: 4.0, 8: 2.0, 32: 1.3},
    ),
    SpeedTarget(
        "int8 step, times faster than a plain torch.onnx export", STEP, (INT8,), "plain", {1: 4.0, 8: 4.0, 32: 2.5}
    ),
    SpeedTarget(
        "int8 from source to target, times faster than CTranslate2's best",
        "end_to_end",
        (INT8,),
        "ctranslate2",
        {1: 2.5, 8: 1.8, 32: 1.25},
    ),
)
MOST_MEGABYTES, MOST_LOAD_SECONDS, MOST_MEMORY = 70.0, 0.5, 1.25
MEMORY = {"after_load_bytes": "after load", "peak_bytes": "at its peak"}


def targets(rows: list[Row]) -> list[dict[str, Any]]:
    """Return every target, the measured value and whether it is met; None where a side was not measured."""
    return [*_speeds(rows), *_bundle_limits(rows), *_memory_limits(rows)]


def fastest_or_none(rows: list[Row], phase: str) -> Row | None:
    """Return the row with the smallest median of a phase; None without rows."""
    return fastest(rows, phase) if rows else None


def rows_of(rows: list[Row], engine: EngineName, precisions: tuple[str, ...] = ()) -> list[Row]:
    """Return the rows of an engine in some precisions (default: all)."""
    return [row for row in rows if row["engine"] == engine and (not precisions or row["precision"] in precisions)]


def with_batch(rows: list[Row], batch: int) -> list[Row]:
    """Return the rows of a batch."""
    return [row for row in rows if row["batch"] == batch]


def _speeds(rows: list[Row]) -> Iterator[dict[str, Any]]:
    for speed in SPEEDS:
        for batch, needed in speed.needed.items():
            batch_rows = with_batch(rows, batch)
            ours = fastest_or_none(rows_of(batch_rows, "fatdeploy", speed.precisions), speed.phase)
            peer = fastest_or_none(rows_of(batch_rows, speed.peer), speed.phase)
            times = p50(peer, speed.phase) / p50(ours, speed.phase) if ours and peer else None
            yield _target(speed.name, times, at_least=needed, batch=batch, ours=_setting(ours), peer=_setting(peer))


def _bundle_limits(rows: list[Row]) -> Iterator[dict[str, Any]]:
    ours = rows_of(rows, "fatdeploy", (INT8,))
    size = max((row["bytes_on_disk"] / 1e6 for row in ours), default=None)
    load = max((p50(row, "load") / 1e3 for row in ours), default=None)
    yield _target("int8 bundle on disk, MB", size, at_most=MOST_MEGABYTES)
    yield _target("int8 bundle loads with warm files and checked hashes, s", load, at_most=MOST_LOAD_SECONDS)


def _memory_limits(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Compare our fastest setting with the smallest of CTranslate2's int8."""
    for batch in sorted({row["batch"] for row in rows}):
        batch_rows = with_batch(rows, batch)
        ours = fastest_or_none(rows_of(batch_rows, "fatdeploy", (INT8,)), STEP)
        for key, when in MEMORY.items():
            theirs = [row["memory"][key] for row in rows_of(batch_rows, "ctranslate2", (INT8,))]
            times = ours["memory"][key] / min(theirs) if ours and theirs else None
            name = f"memory of int8 {when}, times that of CTranslate2's int8"
            yield _target(name, times, at_most=MOST_MEMORY, batch=batch, ours=_setting(ours))


def _target(name: str, value: float | None, **rest: Any) -> dict[str, Any]:
    target = judged(name, value, **rest)
    return {**target, "said": _sentence(target)}


def _sentence(target: dict[str, Any]) -> str:
    """Return a target in words."""
    batch = f", batch {target['batch']}" if "batch" in target else ""
    if target["found"] is None:
        return f"not measured: {target['target']}{batch} ({limit_of(target)})"
    met = "met" if target["met"] else "NOT MET"
    return f"{met}: {target['target']}{batch}: {target['found']:.2f} ({limit_of(target)})"


def _setting(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {name: row[name] for name in ("precision", "threads", "workers")}
