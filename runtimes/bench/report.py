"""Puts the results of all turns together: percentiles of each phase next to fidelity, memory and size."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy._version import VERSION
from fatdeploy.machine import Machine, this_machine
from fatdeploy.runtimes.bench.plan import BenchPlan, BenchRequest, Setting
from fatdeploy.runtimes.bench.processes import Results
from fatdeploy.runtimes.bench.timing import measured_options
from fatdeploy.runtimes.defaults import stated_options

FORMAT = 1
WARM_UP = 1  # decodes of each setting before any is timed, in every process
PERCENTILES = (50, 95, 99)
PER_TOKEN = ("per_token", "per_token_device")  # too many samples to list: the report has percentiles and positions
Milliseconds = NDArray[np.float64]
TurnResult = dict[str, Any]


def report_of(plans: Sequence[BenchPlan], results: Results, request: BenchRequest) -> dict[str, Any]:
    """Return all measurements as JSON values."""
    machine = this_machine()
    runtimes = [turn["onnxruntime"] for turns in results.values() for turn in turns if turn["onnxruntime"] is not None]
    versions = {"fatdeploy": VERSION, "numpy": np.__version__, **({"onnxruntime": runtimes[0]} if runtimes else {})}
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.as_dict(),
        "versions": versions,
        "settings": {
            **{name: getattr(request, name) for name in ("batch", "source", "target", "beams", "threads", "spinning")},
            "repetitions": request.repetitions,
            "rounds": request.rounds,
            "warm_up": WARM_UP,
        },
        "notes": [note for plan in plans for note in plan.notes],
        "bundles": [_bundle(plan, results[number, plan.request.threads[0]]) for number, plan in enumerate(plans)],
        "rows": [
            {**row, "device": results[number, threads][-1].get("device") or device_of(machine)}
            for number, plan in enumerate(plans)
            for threads in plan.request.threads
            for row in rows_of(plan, threads, results[number, threads])
        ],
    }


def device_of(machine: Machine) -> dict[str, Any]:
    """Return the CPU as the device of a row; only GPUs report clocks."""
    return {"kind": "cpu", "name": machine.cpu, "clocks": None}


def rows_of(plan: BenchPlan, threads: int, turns: Sequence[TurnResult]) -> list[dict[str, Any]]:
    """Return one row per setting of a bundle with a number of threads."""
    loads = _milliseconds([turn["load"] for turn in turns])
    bandwidths = [turn["bandwidth"] for turn in turns if turn["bandwidth"] is not None]
    shared = {"bundle": plan.label, "digest": plan.bundle.digest, "threads": threads}
    accuracy = {"fidelity": _lowest_fidelity(turns), "certified_share": turns[0]["certified_share"]}
    rows = []
    for index, setting in enumerate(plan.settings):
        row = _row(plan, setting, [turn["settings"][index] for turn in turns], loads)
        has_floor = not plan.parallel and bool(bandwidths)
        floor = _floor(plan.decoder_bytes, max(bandwidths), row["phases"]) if has_floor else None
        rows.append({**shared, **row, **accuracy, "floor": floor})
    return rows


def _row(plan: BenchPlan, setting: Setting, results: Sequence[TurnResult], loads: Milliseconds) -> dict[str, Any]:
    decodes = [times for result in results for times in result["times"]]
    steps = _milliseconds([times["steps"] for times in decodes])
    samples = {"load": loads, "encode": _milliseconds([times["encode"] for times in decodes])}
    if not plan.parallel:  # parallel models have no first-token phase
        samples |= {"first_token": steps[:, 0], "per_token": steps[:, 1:].ravel()}
        if all(times.get("device_steps") for times in decodes):
            device = _milliseconds([times["device_steps"] for times in decodes])
            samples |= {"first_token_device": device[:, 0], "per_token_device": device[:, 1:].ravel()}
    samples["end_to_end"] = _milliseconds([times["end_to_end"] for times in decodes])
    phases = {name: percentile_summary(ms) for name, ms in samples.items() if ms.size}
    peaks = [result["peak_bytes"] for result in results if result["peak_bytes"] is not None]
    tokens = results[0]["tokens"]
    return {
        "batch": setting.batch,
        "beams": setting.beams,
        "source": plan.request.source,
        "target": plan.request.target,
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


def percentile_summary(ms: Milliseconds) -> dict[str, float]:
    """Return the number of samples, the smallest, and percentiles."""
    values = np.percentile(ms, PERCENTILES).tolist()
    percentiles = {f"p{percent}_ms": value for percent, value in zip(PERCENTILES, values, strict=True)}
    return {"n": ms.size, "min_ms": float(ms.min()), **percentiles}


def _floor(n_bytes: int, bandwidth: float, phases: dict[str, Any]) -> dict[str, float] | None:
    """Return how long it takes to read the decoder's weights once, and how many times longer a step takes."""
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
        "options": _options(plan),
        "parity": turns[0]["parity"],
    }


def _options(plan: BenchPlan) -> dict[str, Any]:
    """Return the options of the decodes with the most beams, besides the length and the beams themselves."""
    beams, plain = max(plan.request.beams), plan.request.no_defaults
    options = measured_options(plan.bundle, target=plan.request.target, beams=beams, plain=plain)
    shared = ("max_new_tokens", "num_beams")
    return {name: value for name, value in stated_options(options).items() if name not in shared}


def _lowest_fidelity(turns: Sequence[TurnResult]) -> dict[str, Any]:
    fidelity: dict[str, Any] = min((turn["fidelity"] for turn in turns), key=lambda fidelity: fidelity["same"])
    return fidelity


def _milliseconds(seconds: Sequence[Any]) -> Milliseconds:
    return np.array(seconds, np.float64) * 1e3


def _rounded(ms: Milliseconds) -> list[float]:
    """Return times with no more digits than the clock has."""
    values: list[float] = ms.round(4).tolist()
    return values
