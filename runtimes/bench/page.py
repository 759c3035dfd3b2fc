"""The report of a bench: one HTML file with its plots and its style inside, for any screen, light or dark."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from fatdeploy.runtimes.bench.drawing import (
    Caption,
    Line,
    Spread,
    ends_of,
    line_plot,
    spread_plot,
    swatch,
    x_scale,
    y_scale,
)
from fatdeploy.runtimes.bench.table import (
    HEAD,
    PHASE_NAMES,
    agreement,
    counted,
    milliseconds,
    peak,
    percent,
    search_name,
    sections_of,
    setting_name,
    table_cells,
    where_line,
)

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1b1f24; --soft: #5b6570; --line: #d9dee3; --card: #f6f8fa;
  --c0: #0b62a8; --c1: #c2410c; --c2: #15803d; --c3: #9333a8; --c4: #8a6100; --c5: #0f7c86; }
@media (prefers-color-scheme: dark) { :root { --back: #12161b; --text: #e8ebee; --soft: #a3adb8; --line: #323a43;
  --card: #1a2027; --c0: #6cb6ff; --c1: #ff9a62; --c2: #5fd38a; --c3: #d99bf0; --c4: #e3bc4f; --c5: #5cd1dc; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.25rem clamp(1rem, 4vw, 2.5rem) 3rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; }
h3 { font-size: .95rem; margin: 1.5rem 0 .5rem; overflow-wrap: anywhere; }
p { max-width: 70ch; margin: .25rem 0 1rem; }
.soft { color: var(--soft); }
.grid-of { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .9rem; min-width: 0; }
.card > h3 { margin-top: 0; }
.facts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 13rem), 1fr)); }
.facts strong { display: block; font-size: 1.45rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; paint-order: stroke; stroke: var(--card);
  stroke-width: 4px; stroke-linejoin: round; }
svg .tick { fill: var(--soft); font-size: 11px; text-anchor: middle; }
svg .end, svg .value { text-anchor: end; }
svg .value { font-variant-numeric: tabular-nums; }
svg .axis { fill: var(--soft); text-anchor: middle; }
.grid { stroke: var(--line); }
.mark { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 4 3; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.thin { stroke-width: 1.5; opacity: .75; }
.thick { stroke-width: 6; stroke-linecap: round; opacity: .45; }
.d1 { stroke-dasharray: 6 3; } .d2 { stroke-dasharray: 2 3; } .d3 { stroke-dasharray: 8 3 2 3; }
.dot { stroke: var(--card); stroke-width: 1; stroke-dasharray: none; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.dot.c3 { fill: var(--c3); } .dot.c4 { fill: var(--c4); } .dot.c5 { fill: var(--c5); }
svg .dot { stroke: var(--card); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem .9rem; margin: .5rem 0 0; padding: 0; list-style: none;
  font-size: .85rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.swatch { width: 28px; flex: none; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .6rem; }
.wide:focus-visible { outline: 2px solid var(--c0); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { background: var(--card); } tr:last-child > * { border-bottom: 0; }
.name { text-align: left; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .25rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin-top: 2rem; } pre { overflow: auto; max-height: 30rem; font-size: .8rem; }
@media print { .card, tr { break-inside: avoid; } }
"""
N_NAMES = HEAD.index("phase") + 1  # columns of names; the others are numbers

Row = dict[str, Any]
Report = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """A picture with its heading and its legend."""

    heading: str
    picture: str
    legend: Sequence[Line] = ()


def html_from_report(report: Report) -> str:
    """Return the page; it loads nothing from anywhere."""
    names = ", ".join(bundle["bundle"] for bundle in report["bundles"])
    body = [
        f"<h1>{escape(names)}</h1>",
        f'<p class="soft">{escape(where_line(report))} {escape(report["date"])}</p>',
        *(f"<p>{escape(note)}.</p>" for note in report["notes"]),
        *_facts(report["rows"]),
        *_figures(report),
        "<h2>All numbers</h2>",
        "<p>Each bundle was checked against the reference's tokens with the same threads before it was timed.</p>",
        *_tables(report["rows"]),
        *_about(report),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>Bench: {escape(names)}</title><style>{STYLE}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def _facts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the best numbers, each with the accuracy of its bundle."""
    most = max(rows, key=lambda row: row["tokens_per_s"])
    yield '<section class="grid-of facts" aria-label="The best">'
    yield _fact("most tokens per second, median", f"{most['tokens_per_s']:,.0f}", most)
    for name, phase in (("fastest token, median", "per_token"), ("fastest target, median", "end_to_end")):
        timed = [row for row in rows if phase in row["phases"]]
        if timed:
            fastest = min(timed, key=lambda row: row["phases"][phase]["p50_ms"])
            yield _fact(name, f"{milliseconds(fastest['phases'][phase]['p50_ms'])} ms", fastest)
    weighed = [row for row in rows if row["peak_bytes"] is not None]
    if weighed:
        least = min(weighed, key=lambda row: row["peak_bytes"])
        yield _fact("least memory", f"{peak(least)} MB", least)
    yield "</section>"


def _fact(name: str, value: str, row: Row) -> str:
    where = f"{row['bundle']}, {counted(row['threads'], 'thread')}, {setting_name(row)}; "
    return (
        f'<div class="card"><span class="soft">{name}</span><strong>{value}</strong>'
        f"{escape(where)}<b>agreement {agreement(row)}</b></div>"
    )


def _figures(report: Report) -> Iterator[str]:
    rows = report["rows"]
    yield from _figure(
        "How times spread",
        "The dot is the median, the thick line goes to the 95th percentile, the thin one from the fastest to the 99th "
        "percentile. Scales are logarithmic here and below.",
        [*_spread_panels(rows, "per_token"), *_spread_panels(rows, "end_to_end")],
    )
    yield from _figure(
        "Latency by batch size",
        "Median time from sources to targets. Where a line is flat, more sources at once cost nothing.",
        _batch_panels(rows),
    )
    yield from _figure(
        "Latency by position",
        "The fastest time of each step, by the number of tokens before it: disturbances of single steps do not count. "
        "What grows to the right is attention to earlier tokens.",
        _position_panels(rows),
    )
    yield from _figure(
        "Size and agreement",
        "Megabytes of a bundle, and how many of the reference's tokens it chooses after the reference's tokens.",
        [_size_panel(report)],
    )
    yield from _figure(
        "How far from the memory's limit",
        "A step must read the decoder's weights once. The dashed line is how long this machine takes to read as many "
        "bytes, measured with the same threads; the dot is the median of a step, and the last number is their ratio.",
        _floor_panels(rows),
    )


def _figure(heading: str, text: str, panels: Iterable[Panel]) -> Iterator[str]:
    """Yield pictures of one kind with how to read them; nothing if there are none."""
    cards = [_card(panel) for panel in panels]
    if cards:
        yield f'<section><h2>{escape(heading)}</h2><p>{escape(text)}</p><div class="grid-of">'
        yield from cards
        yield "</div></section>"


def _card(panel: Panel) -> str:
    entries = "".join(f"<li>{swatch(line)}{escape(line.name)}</li>" for line in panel.legend)
    legend = f'<ul class="legend">{entries}</ul>' if entries else ""
    return f'<div class="card"><h3>{escape(panel.heading)}</h3>{panel.picture}{legend}</div>'


def _spread_panels(rows: Sequence[Row], phase: str) -> Iterator[Panel]:
    timed, colours = [row for row in rows if phase in row["phases"]], _colours(rows)
    for name, group in sections_of(timed):
        heading = f"{name}: {PHASE_NAMES[phase]}"
        spreads = []
        for row in group:
            low, dot, thick, high = (row["phases"][phase][time] for time in ("min_ms", "p50_ms", "p95_ms", "p99_ms"))
            value, colour = f"{milliseconds(dot)} ms", colours[row["batch"]]
            spreads.append(Spread(setting_name(row), low, dot, thick, high, value, colour))
        text = "; ".join(
            f"{spread.name}: median {milliseconds(spread.dot)}, 95 % within {milliseconds(spread.thick)} ms"
            for spread in spreads
        )
        ends = ends_of(row["phases"][phase][time] for row in timed for time in ("min_ms", "p99_ms"))
        yield Panel(heading, spread_plot(Caption(heading, text, "milliseconds"), spreads, ends))


def _batch_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    y = y_scale(*ends_of(row["phases"]["end_to_end"]["p50_ms"] for row in rows), log=True)
    for label, group in groupby(rows, key=lambda row: row["bundle"]):
        lines = list(_batch_lines(list(group)))
        text = "; ".join(
            f"{line.name}: {', '.join(f'batch {size} {milliseconds(ms)} ms' for size, ms in line.points)}"
            for line in lines
        )
        sizes = sorted({size for line in lines for size, _ in line.points})
        ends = (sizes[0], sizes[-1]) if len(sizes) > 1 else (sizes[0] / 2, sizes[0] * 2)
        caption = Caption(f"{label}: end to end", text, "sources at once", "milliseconds")
        yield Panel(label, line_plot(caption, lines, (x_scale(*ends, log=True, margin=10), y), sizes, radius=3), lines)


def _batch_lines(rows: Sequence[Row]) -> Iterator[Line]:
    threads, beams = (sorted({row[name] for row in rows}) for name in ("threads", "beams"))
    for dash, width in enumerate(beams):
        for colour, count in enumerate(threads):
            chosen = [row for row in rows if (row["threads"], row["beams"]) == (count, width)]
            points = sorted((row["batch"], row["phases"]["end_to_end"]["p50_ms"]) for row in chosen)
            yield Line(f"{counted(count, 'thread')}, {search_name(width)}", points, colour, dash)


def _position_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    # A line needs two points.
    timed = [row for row in rows if row["positions_ms"] is not None and len(row["positions_ms"]["min"]) > 1]
    beams, colours = sorted({row["beams"] for row in timed}), _colours(rows)
    for name, group in sections_of(timed):
        lines = []
        for row in group:
            points = list(enumerate(row["positions_ms"]["min"]))
            lines.append(Line(setting_name(row), points, colours[row["batch"]], beams.index(row["beams"])))
        text = "; ".join(
            f"{line.name}: first {milliseconds(line.points[0][1])}, last {milliseconds(line.points[-1][1])} ms"
            for line in lines
        )
        x = x_scale(0, max(len(line.points) for line in lines) - 1, margin=10)
        y = y_scale(*ends_of(value for row in timed for value in row["positions_ms"]["min"]), log=True)
        caption = Caption(f"{name}: steps", text, "tokens before", "milliseconds")
        yield Panel(name, line_plot(caption, lines, (x, y), x.ticks()), lines)


def _size_panel(report: Report) -> Panel:
    dots, shares = [], []
    for index, bundle in enumerate(report["bundles"]):
        share = min(row["fidelity"]["share"] for row in report["rows"] if row["bundle"] == bundle["bundle"])
        megabytes = bundle["bytes"] / 1e6
        name = f"{bundle['bundle']} ({bundle['precision']}): {megabytes:.1f} MB, {percent(share)}"
        dots.append(Line(name, [(megabytes, share * 100)], index))
        shares.append(share)
    caption = Caption("Size and agreement", "; ".join(dot.name for dot in dots), "megabytes", "agreement, percent")
    x = x_scale(0, max(bundle["bytes"] for bundle in report["bundles"]) / 1e6 * 1.15)
    # The lowest share decides: nine tenths and 99.9 % need different scales.
    y = y_scale(max(0.0, min(99.0, 100 - 150 * (1 - min(shares)))), 100, margin=8)
    return Panel("All bundles", line_plot(caption, dots, (x, y), x.ticks(), radius=6), dots)


def _floor_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    timed, colours = [row for row in rows if row["floor"] is not None], _colours(rows)
    for name, group in sections_of(timed):
        floor, spreads = group[0]["floor"], []
        for row in group:
            step = row["phases"]["per_token"]["p50_ms"]
            value, colour = f"{milliseconds(step)} ms, × {row['floor']['times']:.1f}", colours[row["batch"]]
            spreads.append(Spread(setting_name(row), floor["ms"], step, step, step, value, colour))
        limit = f"{floor['decoder_bytes'] / 1e6:.1f} MB at {floor['read_bytes_per_s'] / 1e9:.1f} GB/s"
        heading = f"{name}: {limit} = {milliseconds(floor['ms'])} ms"
        caption = Caption(heading, "; ".join(f"{row.name}: {row.value}" for row in spreads), "milliseconds per step")
        ends = ends_of(value for row in timed for value in (row["floor"]["ms"], row["phases"]["per_token"]["p50_ms"]))
        yield Panel(heading, spread_plot(caption, spreads, ends, floor["ms"]))


def _colours(rows: Sequence[Row]) -> dict[int, int]:
    """Return a colour for each batch size."""
    return {batch: index for index, batch in enumerate(sorted({row["batch"] for row in rows}))}


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    for title, group in sections_of(rows):
        name = escape(title)
        yield f"<h3>{name}: {group[0]['bundle_bytes'] / 1e6:.1f} MB</h3>"
        # It scrolls sideways, so the keyboard must be able to reach it.
        yield f'<div class="wide" role="region" tabindex="0" aria-label="{name}"><table><thead>'
        yield _table_row(HEAD, "th")
        yield "</thead><tbody>"
        yield from (_table_row(cells) for cells in table_cells(group))
        yield "</tbody></table></div>"


def _table_row(cells: Sequence[str], tag: str = "td") -> str:
    looks = ['class="name"' if index < N_NAMES else "" for index in range(len(cells))]
    inner = "".join(f"<{tag} {look}>{escape(cell)}</{tag}>" for look, cell in zip(looks, cells, strict=True))
    return f"<tr>{inner}</tr>"


def _about(report: Report) -> Iterator[str]:
    machine = report["machine"]
    facts = {
        "processor": machine["cpu"] or "unknown",
        "instructions": " ".join(machine["features"] or ["unknown"]),
        "cores": str(machine["cores"]),
        "system": f"{machine['system']}, Python {machine['python']}",
        **{f"digest of {bundle['bundle']}": bundle["digest"] for bundle in report["bundles"]},
    }
    yield "<h2>Where</h2><dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    yield "</dl><details><summary>Settings as JSON</summary>"
    yield f"<pre>{escape(json.dumps(report['settings'], indent=2))}</pre></details>"
