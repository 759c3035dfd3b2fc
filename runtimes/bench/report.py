"""From the times of all turns to what is told: percentiles of each phase beside fidelity, memory and size."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy._version import VERSION
from fatdeploy.machine import Machine, this_machine
from fatdeploy.runtimes.bench.plan import BenchPlan, BenchRequest, Setting
from fatdeploy.runtimes.bench.processes import Results

FORMAT = 1
WARM_UP = 1  # decodes of each setting before any is timed, in every process
PERCENTILES = (50, 95, 99)
PER_TOKEN = ("per_token", "per_token_device")  # many: their percentiles are told, and positions
Milliseconds = NDArray[np.float64]
TurnResult = dict[str, Any]


def report_of(plans: Sequence[BenchPlan], results: Results, asked: BenchRequest) -> dict[str, Any]:
    """Return everything that was measured as JSON values."""
    machine = this_machine()
    runtimes = [turn["onnxruntime"] for turns in results.values() for turn in turns if turn["onnxruntime"] is not None]
    versions = {"fatdeploy": VERSION, "numpy": np.__version__, **({"onnxruntime": runtimes[0]} if runtimes else {})}
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.as_dict(),
        "versions": versions,
        "settings": {
            **{name: getattr(asked, name) for name in ("batch", "source", "target", "beams", "threads", "spinning")},
            "repetitions": asked.repetitions,
            "rounds": asked.rounds,
            "warm_up": WARM_UP,
        },
        "notes": [note for plan in plans for note in plan.notes],
        "bundles": [_bundle(plan, results[number, plan.asked.threads[0]]) for number, plan in enumerate(plans)],
        "rows": [
            {**row, "device": results[number, threads][-1].get("device") or device_of(machine)}
            for number, plan in enumerate(plans)
            for threads in plan.asked.threads
            for row in rows_of(plan, threads, results[number, threads])
        ],
    }


def device_of(machine: Machine) -> dict[str, Any]:
    """Return where a row was measured; clocks are there for devices that tell them."""
    return {"kind": "cpu", "name": machine.cpu, "clocks": None}


def rows_of(plan: BenchPlan, threads: int, turns: Sequence[TurnResult]) -> list[dict[str, Any]]:
    """Return a row for each setting of a bundle with so many threads."""
    loads = _milliseconds([turn["load"] for turn in turns])
    bandwidths = [turn["bandwidth"] for turn in turns if turn["bandwidth"] is not None]
    shared = {"bundle": plan.label, "digest": plan.bundle.digest, "threads": threads}
    right = {"fidelity": _least(turns), "certified_share": turns[0]["certified_share"]}
    rows = []
    for index, setting in enumerate(plan.settings):
        row = _row(plan, setting, [turn["settings"][index] for turn in turns], loads)
        told = not plan.parallel and bool(bandwidths)
        floor = _floor(plan.decoder_bytes, max(bandwidths), row["phases"]) if told else None
        rows.append({**shared, **row, **right, "floor": floor})
    return rows


def _row(plan: BenchPlan, setting: Setting, found: Sequence[TurnResult], loads: Milliseconds) -> dict[str, Any]:
    times = [one for turn in found for one in turn["times"]]
    steps = _milliseconds([one["steps"] for one in times])
    samples = {"load": loads, "encode": _milliseconds([one["encode"] for one in times])}
    if not plan.parallel:  # all tokens are said at once: none is the first
        samples |= {"first_token": steps[:, 0], "per_token": steps[:, 1:].ravel()}
        if all(one.get("device_steps") for one in times):
            device = _milliseconds([one["device_steps"] for one in times])
            samples |= {"first_token_device": device[:, 0], "per_token_device": device[:, 1:].ravel()}
    samples["end_to_end"] = _milliseconds([one["end_to_end"] for one in times])
    phases = {name: summary(ms) for name, ms in samples.items() if ms.size}
    peaks = [turn["peak_bytes"] for turn in found if turn["peak_bytes"] is not None]
    tokens = found[0]["tokens"]
    return {
        "batch": setting.batch,
        "beams": setting.beams,
        "source": plan.asked.source,
        "target": plan.asked.target,
        "tokens": tokens,
        "phases": phases,
        "tokens_per_s": tokens / phases["end_to_end"]["p50_ms"] * 1e3,
        "peak_bytes": max(peaks, default=None),
        "bundle_bytes": plan.bundle.total_bytes,
        "positions_ms": None
        if plan.parallel
        else {"min": _rounded(steps.min(0)), "p50": _rounded(np.median(steps, 0))},
        "samples_ms": {name: _rounded(ms) for name, ms in samples.items() if name not in PER_TOKEN},
    }


def summary(ms: Milliseconds) -> dict[str, float]:
    """Return how many samples there are, the smallest, and percentiles."""
    percentiles = np.percentile(ms, PERCENTILES).tolist()
    found = {f"p{percent}_ms": value for percent, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"n": ms.size, "min_ms": float(ms.min()), **found}


def _floor(n_bytes: int, bandwidth: float, phases: dict[str, Any]) -> dict[str, float] | None:
    """Return how long it takes to read the decoder's weights once, and how many times that a step takes."""
    if "per_token" not in phases:
        return None
    ms = n_bytes / bandwidth * 1e3
    times = phases["per_token"]["p50_ms"] / ms
    return {"decoder_bytes": n_bytes, "read_bytes_per_s": bandwidth, "ms": ms, "times": times}


def _bundle(plan: BenchPlan, turns: Sequence[TurnResult]) -> dict[str, Any]:
    manifest = plan.bundle.manifest
    return {
        "bundle": plan.label,
        "digest": plan.bundle.digest,
        **{name: getattr(manifest, name) for name in ("target", "precision", "dialect")},
        "decoding": manifest.spec.decoding,
        "bytes": plan.bundle.total_bytes,
        "parameters": sum(group.parameters for group in manifest.weights.values()),
        "decoder_bytes": plan.decoder_bytes,
        "parity": turns[0]["parity"],
    }


def _least(turns: Sequence[TurnResult]) -> dict[str, Any]:
    """Return the lowest fidelity of all processes."""
    found: dict[str, Any] = min((turn["fidelity"] for turn in turns), key=lambda one: one["same"])
    return found


def _milliseconds(seconds: Sequence[Any]) -> Milliseconds:
    return np.array(seconds, np.float64) * 1e3


def _rounded(ms: Milliseconds) -> list[float]:
    """Return numbers with as many digits as a clock has."""
    found: list[float] = ms.round(4).tolist()
    return found
