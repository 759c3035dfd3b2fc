"""The result of a bench as text: a section per bundle and number of threads, a line per phase."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from fatdeploy.tables import aligned

PHASE_NAMES = {
    "load": "load",
    "encode": "encode",
    "first_token": "first token",
    "per_token": "per token",
    "first_token_device": "first token, device",
    "per_token_device": "per token, device",
    "end_to_end": "end to end",
}
TIMES = ("p50_ms", "p95_ms", "p99_ms", "min_ms")
HEAD = (
    "batch",
    "beams",
    "phase",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "min ms",
    "samples",
    "tokens/s",
    "peak MB",
    "agreement",
    "certified",
)
RIGHT = frozenset(HEAD) - {"batch", "beams", "phase"}


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the sections of the table, then where it was measured."""
    for name, group in sections_of(report["rows"]):
        yield f"{name}: {section_line(group[0])}"
        yield from aligned(_right_aligned([HEAD, *table_cells(group)]), indent=2)
        yield ""
    yield where_line(report)


def sections_of(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name of each bundle with its number of threads, and its rows."""
    for (label, threads), group in groupby(rows, key=lambda row: (row["bundle"], row["threads"])):
        yield f"{label}, {counted(threads, 'thread')}", list(group)


def setting_name(row: dict[str, Any]) -> str:
    """Return the setting of a row in words."""
    return f"batch {row['batch']}, {search_name(row['beams'])}"


def search_name(beams: int) -> str:
    """Return the kind of search in words."""
    return "greedy" if beams == 1 else counted(beams, "beam")


def section_line(row: dict[str, Any]) -> str:
    """Return what all settings of a bundle share: its size, the lengths of source and target, and its accuracy."""
    sizes = f"source {row['source']}, target {row['target']}"
    return f"{row['bundle_bytes'] / 1e6:.1f} MB, {sizes}; {fidelity_line(row)}"


def fidelity_line(row: dict[str, Any]) -> str:
    """Return in words how many tokens are the reference's, here and in the certificate."""
    fidelity = row["fidelity"]
    return f"{fidelity['same']} of {fidelity['tokens']} tokens are the reference's ({agreement(row)})"


def agreement(row: dict[str, Any]) -> str:
    """Return the share of the reference's tokens here and in the certificate."""
    return f"{percent(row['fidelity']['share'])}, certified {percent(row['certified_share'])}"


def where_line(report: dict[str, Any]) -> str:
    """Return machine, versions and repetitions in one line."""
    machine, settings = report["machine"], report["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in sorted(report["versions"].items()))
    times = f"{counted(settings['repetitions'], 'repetition')} in {counted(settings['rounds'], 'round')}"
    cpu = machine["cpu"] or "an unknown CPU"
    where = "".join(f"{line}, " for line in dict.fromkeys(map(device_line, report["rows"])) if line)
    return f"Measured on {where}{cpu}, {counted(machine['cores'], 'core')}, {versions}; {times} after a warm-up."


def device_line(row: dict[str, Any]) -> str:
    """Return the GPU of a row with its clocks, as far as they are known; empty for a CPU."""
    device = row["device"]
    if device["kind"] == "cpu":
        return ""
    name = device["name"] or "a GPU of unknown name"
    if device["clocks"] is None:
        return f"{name} ({device['absent']})"
    gpus = [gpu for gpu in device["clocks"] if gpu["name"] == device["name"]] or list(device["clocks"])
    units = {"driver": "driver", "sm_clock_mhz": "MHz", "power_limit_w": "W limit"}
    facts = [_fact(gpus[0].get(field), unit) for field, unit in units.items()]
    return f"{name} ({', '.join(facts)})"


def _fact(value: Any, unit: str) -> str:
    if value is None:
        return f"{unit} unknown"
    return f"{unit} {value}" if isinstance(value, str) else f"{value:.0f} {unit}"


def percent(share: float) -> str:
    """Return a share in percent; less than everything never rounds to 100 %."""
    return "100 %" if share == 1 else f"{min(share * 100, 99.99):.2f} %"


def counted(number: int, name: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def milliseconds(value: float) -> str:
    """Return a time with about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def phase_cells(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the times of a phase and its number of samples: high percentiles of few samples mean little."""
    phase = row["phases"][name]
    return *(milliseconds(phase[time]) for time in TIMES), f"{phase['n']:,}"


def peak(row: dict[str, Any]) -> str:
    """Return the memory peak in MB."""
    return "unknown" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"


def table_cells(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells below ``HEAD`` for rows that differ only in their setting: load once, then all other phases."""
    shares = percent(rows[0]["fidelity"]["share"]), percent(rows[0]["certified_share"])
    yield "", "", PHASE_NAMES["load"], *phase_cells(rows[0], "load"), "", "", *shares
    for row in rows:
        for name in row["phases"]:
            if name == "load":
                continue
            totals = (f"{row['tokens_per_s']:,.0f}", peak(row)) if name == "end_to_end" else ("", "")
            yield str(row["batch"]), str(row["beams"]), PHASE_NAMES[name], *phase_cells(row, name), *totals, *shares


def _right_aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield rows whose numbers are aligned."""
    columns = [
        [cell.rjust(max(map(len, column))) if column[0] in RIGHT else cell for cell in column]
        for column in zip(*rows, strict=True)
    ]
    yield from zip(*columns, strict=True)
