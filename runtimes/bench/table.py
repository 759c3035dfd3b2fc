"""The result of a bench as text: a section a bundle and number of threads, a line a phase."""

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
    """Yield sections for a human, then where it was measured."""
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
    """Return what is the same for all settings of a bundle: size, sizes of the task, and how right it is."""
    sizes = f"source {row['source']}, target {row['target']}"
    return f"{row['bundle_bytes'] / 1e6:.1f} MB, {sizes}; {fidelity_line(row)}"


def fidelity_line(row: dict[str, Any]) -> str:
    """Return in words how right a bundle is here, and was where it was exported."""
    found = row["fidelity"]
    return f"{found['same']} of {found['tokens']} tokens are the reference's ({agreement(row)})"


def agreement(row: dict[str, Any]) -> str:
    """Return the share of the reference's tokens here, and the one of the certificate."""
    return f"{percent(row['fidelity']['share'])}, certified {percent(row['certified_share'])}"


def where_line(report: dict[str, Any]) -> str:
    """Return machine, versions and repetitions in a line."""
    machine, settings = report["machine"], report["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in sorted(report["versions"].items()))
    times = f"{counted(settings['repetitions'], 'repetition')} in {counted(settings['rounds'], 'round')}"
    cpu = machine["cpu"] or "an unknown CPU"
    where = "".join(f"{line}, " for line in dict.fromkeys(map(device_line, report["rows"])) if line)
    return f"Measured on {where}{cpu}, {counted(machine['cores'], 'core')}, {versions}; {times} after a warm-up."


def device_line(row: dict[str, Any]) -> str:
    """Return the GPU of a row in words, with what of its clocks is known; empty of a CPU."""
    device = row["device"]
    if device["kind"] == "cpu":
        return ""
    name = device["name"] or "a GPU of unknown name"
    if device["clocks"] is None:
        return f"{name} ({device['absent']})"
    known = [one for one in device["clocks"] if one["name"] == device["name"]] or list(device["clocks"])
    told = {"driver": "driver", "sm_clock_mhz": "MHz", "power_limit_w": "W limit"}
    facts = [_fact(known[0].get(field), unit) for field, unit in told.items()]
    return f"{name} ({', '.join(facts)})"


def _fact(value: Any, unit: str) -> str:
    if value is None:
        return f"{unit} unknown"
    return f"{unit} {value}" if isinstance(value, str) else f"{value:.0f} {unit}"


def percent(share: float) -> str:
    """Return a share in percent; one that is not whole never looks as if it were."""
    return "100 %" if share == 1 else f"{min(share * 100, 99.99):.2f} %"


def counted(number: int, name: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def milliseconds(value: float) -> str:
    """Return a time with about three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def phase_cells(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the times of a phase, and how often it was timed: of few samples high percentiles say little."""
    phase = row["phases"][name]
    return *(milliseconds(phase[time]) for time in TIMES), f"{phase['n']:,}"


def peak(row: dict[str, Any]) -> str:
    """Return the peak of memory in MB."""
    return "unknown" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"


def table_cells(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells below ``HEAD`` of rows that differ in their setting alone: load once, then each phase of each."""
    right = percent(rows[0]["fidelity"]["share"]), percent(rows[0]["certified_share"])
    yield "", "", PHASE_NAMES["load"], *phase_cells(rows[0], "load"), "", "", *right
    for row in rows:
        for name in row["phases"]:
            if name == "load":
                continue
            whole = name == "end_to_end"
            said = (f"{row['tokens_per_s']:,.0f}", peak(row)) if whole else ("", "")
            yield str(row["batch"]), str(row["beams"]), PHASE_NAMES[name], *phase_cells(row, name), *said, *right


def _right_aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield rows whose numbers stand below each other."""
    columns = [
        [cell.rjust(max(map(len, column))) if column[0] in RIGHT else cell for cell in column]
        for column in zip(*rows, strict=True)
    ]
    yield from zip(*columns, strict=True)
