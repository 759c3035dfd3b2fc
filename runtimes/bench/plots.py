"""What a bench's report shows: which plots, of which rows, and what each says in words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fatdeploy.runtimes.bench.svg import (
    Line,
    Spread,
    Words,
    dot_plot,
    line_plot,
    room_for,
    spread_plot,
)
from fatdeploy.runtimes.bench.table import PHASE_NAMES, counted, milliseconds, percent

Row = dict[str, Any]
Report = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """A picture with its heading and what its colours mean."""

    heading: str
    picture: str
    legend: Sequence[Line] = ()


@dataclass(frozen=True)
class Figure:
    """Pictures of one kind, and how to read them."""

    heading: str
    text: str
    panels: Sequence[Panel]


def figures_of(report: Report) -> list[Figure]:
    """Return all figures; those that a report has nothing for are left out."""
    rows = report["rows"]
    figures = [
        Figure(
            "How times spread",
            "The dot is the median, the thick line goes to the 95th percentile, the thin one from the quickest to the "
            "99th percentile. Scales are logarithmic here and below.",
            [*_spread_panels(rows, "per_token"), *_spread_panels(rows, "end_to_end")],
        ),
        Figure(
            "Latency against batch",
            "Median time from sources to targets. Where a line is flat, more sources at once cost nothing.",
            list(_batch_panels(rows)),
        ),
        Figure(
            "Latency against position",
            "The quickest time of each step, by how many tokens were said before it: what disturbed a single one does "
            "not count. What grows to the right is attention to what was said.",
            list(_position_panels(rows)),
        ),
        Figure(
            "Size against agreement",
            "Megabytes of a bundle, and how many of the reference's tokens it chooses when it is given those before.",
            [_size_panel(report)],
        ),
        Figure(
            "How far from the memory's limit",
            "A step must read the decoder's weights once. The dashed line is how long this machine takes to read as "
            "many bytes, measured with the same threads; the dot is a step's median, and the last number says how "
            "many times as long it takes.",
            list(_floor_panels(rows)),
        ),
    ]
    return [figure for figure in figures if figure.panels]


def setting_of(row: Row) -> str:
    """Return a setting in words."""
    return f"batch {row['batch']}, {_search(row['beams'])}"


def by_threads(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield each bundle with its threads, and the rows of it."""
    for (label, threads), group in groupby(rows, key=lambda row: (row["bundle"], row["threads"])):
        yield f"{label}, {counted(threads, 'thread')}", list(group)


def _spread_panels(rows: Sequence[Row], phase: str) -> Iterator[Panel]:
    found = [row for row in rows if phase in row["phases"]]
    colours = _colours(rows)
    for name, group in by_threads(found):
        heading = f"{name}: {PHASE_NAMES[phase]}"
        spreads = [_spread(row, row["phases"][phase], colours) for row in group]
        text = "; ".join(
            f"{one.name}: median {milliseconds(one.dot)}, 95 % within {milliseconds(one.thick)} ms" for one in spreads
        )
        ends = room_for(row["phases"][phase][time] for row in found for time in ("min_ms", "p99_ms"))
        yield Panel(heading, spread_plot(Words(heading, text, "milliseconds"), spreads, ends))


def _spread(row: Row, times: dict[str, float], colours: dict[int, int]) -> Spread:
    ends = times["min_ms"], times["p50_ms"], times["p95_ms"], times["p99_ms"]
    return Spread(setting_of(row), *ends, f"{milliseconds(times['p50_ms'])} ms", colours[row["batch"]])


def _batch_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    ends = room_for(row["phases"]["end_to_end"]["p50_ms"] for row in rows)
    for label, group in groupby(rows, key=lambda row: row["bundle"]):
        found = list(group)
        lines = list(_batch_lines(found))
        text = "; ".join(
            f"{line.name}: {', '.join(f'batch {size} {milliseconds(ms)} ms' for size, ms in line.points)}"
            for line in lines
        )
        words = Words(f"{label}: end to end", text, "sources at once", "milliseconds")
        yield Panel(label, line_plot(words, lines, sorted({row["batch"] for row in found}), ends), lines)


def _batch_lines(rows: Sequence[Row]) -> Iterator[Line]:
    threads, beams = (sorted({row[name] for row in rows}) for name in ("threads", "beams"))
    for dash, width in enumerate(beams):
        for colour, count in enumerate(threads):
            points = sorted(
                (row["batch"], row["phases"]["end_to_end"]["p50_ms"])
                for row in rows
                if (row["threads"], row["beams"]) == (count, width)
            )
            yield Line(f"{counted(count, 'thread')}, {_search(width)}", points, colour, dash)


def _position_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    # A line needs two points.
    found = [row for row in rows if row["positions_ms"] is not None and len(row["positions_ms"]["min"]) > 1]
    beams, colours = sorted({row["beams"] for row in found}), _colours(rows)
    for name, group in by_threads(found):
        lines = [
            Line(
                setting_of(row),
                list(enumerate(row["positions_ms"]["min"])),
                colours[row["batch"]],
                beams.index(row["beams"]),
            )
            for row in group
        ]
        text = "; ".join(
            f"{line.name}: first {milliseconds(line.points[0][1])}, last {milliseconds(line.points[-1][1])} ms"
            for line in lines
        )
        words = Words(f"{name}: steps", text, "tokens before", "milliseconds")
        ends = room_for(value for row in found for value in row["positions_ms"]["min"])
        yield Panel(name, line_plot(words, lines, (), ends), lines)


def _size_panel(report: Report) -> Panel:
    least = {
        one["bundle"]: min(row["fidelity"]["share"] for row in report["rows"] if row["bundle"] == one["bundle"])
        for one in report["bundles"]
    }
    dots = [
        Line(
            f"{one['bundle']} ({one['precision']}): {one['bytes'] / 1e6:.1f} MB, {percent(least[one['bundle']])}",
            [(one["bytes"] / 1e6, least[one["bundle"]] * 100)],
            index,
        )
        for index, one in enumerate(report["bundles"])
    ]
    words = Words("Size and agreement", "; ".join(dot.name for dot in dots), "megabytes", "agreement, percent")
    most = max(one["bytes"] for one in report["bundles"]) / 1e6 * 1.15
    # The lowest share decides: nine tenths and 99.9 % need different scales.
    fewest = max(0.0, min(99.0, 100 - 150 * (1 - min(least.values()))))
    return Panel("All bundles", dot_plot(words, dots, most, fewest), dots)


def _floor_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    found = [row for row in rows if row["floor"] is not None]
    colours = _colours(rows)
    for name, group in by_threads(found):
        floor = group[0]["floor"]
        spreads = [_above(row, colours) for row in group]
        limit = f"{floor['decoder_bytes'] / 1e6:.1f} MB at {floor['read_bytes_per_s'] / 1e9:.1f} GB/s"
        heading = f"{name}: {limit} = {milliseconds(floor['ms'])} ms"
        words = Words(heading, "; ".join(f"{one.name}: {one.said}" for one in spreads), "milliseconds a step")
        ends = room_for(value for row in found for value in (row["floor"]["ms"], row["phases"]["per_token"]["p50_ms"]))
        yield Panel(heading, spread_plot(words, spreads, ends, floor["ms"]))


def _above(row: Row, colours: dict[int, int]) -> Spread:
    """Return how far a step is from the time in which its weights could be read."""
    floor, step = row["floor"], row["phases"]["per_token"]["p50_ms"]
    said = f"{milliseconds(step)} ms, × {floor['times']:.1f}"
    return Spread(setting_of(row), floor["ms"], step, step, step, said, colours[row["batch"]])


def _search(beams: int) -> str:
    return "greedy" if beams == 1 else counted(beams, "beam")


def _colours(rows: Sequence[Row]) -> dict[int, int]:
    """Return a colour for each batch size."""
    return {batch: index for index, batch in enumerate(sorted({row["batch"] for row in rows}))}
