"""The report of a bench: one HTML file with its pictures and its look inside, for any screen, light or dark."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fatdeploy.runtimes.bench.plots import Figure, Panel, figures_of, setting_of
from fatdeploy.runtimes.bench.svg import swatch
from fatdeploy.runtimes.bench.table import HEAD, agreement, counted, milliseconds, peak, table_cells, where_line

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
svg .end, svg .said { text-anchor: end; }
svg .said { font-variant-numeric: tabular-nums; }
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
WORDS = HEAD.index("phase") + 1  # columns of names; the others are numbers


def html_from_report(report: dict[str, Any]) -> str:
    """Return the page; nothing in it is loaded from anywhere."""
    names = ", ".join(one["bundle"] for one in report["bundles"])
    body = [
        f"<h1>{escape(names)}</h1>",
        f'<p class="soft">{escape(where_line(report))} {escape(report["date"])}</p>',
        *(f"<p>{escape(note)}.</p>" for note in report["notes"]),
        *_facts(report),
        *(part for figure in figures_of(report) for part in _figure(figure)),
        "<h2>All numbers</h2>",
        "<p>Each bundle was checked against the reference's tokens with the same threads before a time "
        "was recorded.</p>",
        *_tables(report),
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


def _facts(report: dict[str, Any]) -> Iterator[str]:
    """Yield what one wants to know first, each with how right the bundle is that did it."""
    rows = report["rows"]
    most = max(rows, key=lambda row: row["tokens_per_s"])
    yield '<section class="grid-of facts" aria-label="The best">'
    yield _fact("most tokens a second, median", f"{most['tokens_per_s']:,.0f}", most)
    steps = [row for row in rows if "per_token" in row["phases"]]
    if steps:
        quickest = min(steps, key=lambda row: row["phases"]["per_token"]["p50_ms"])
        yield _fact("quickest token, median", f"{milliseconds(quickest['phases']['per_token']['p50_ms'])} ms", quickest)
    soonest = min(rows, key=lambda row: row["phases"]["end_to_end"]["p50_ms"])
    yield _fact("quickest target, median", f"{milliseconds(soonest['phases']['end_to_end']['p50_ms'])} ms", soonest)
    known = [row for row in rows if row["peak_bytes"] is not None]
    if known:
        least = min(known, key=lambda row: row["peak_bytes"])
        yield _fact("least memory", f"{peak(least)} MB", least)
    yield "</section>"


def _fact(name: str, value: str, row: dict[str, Any]) -> str:
    where = f"{row['bundle']}, {counted(row['threads'], 'thread')}, {setting_of(row)}; "
    return (
        f'<div class="card"><span class="soft">{name}</span><strong>{value}</strong>'
        f"{escape(where)}<b>agreement {agreement(row)}</b></div>"
    )


def _figure(figure: Figure) -> Iterator[str]:
    yield f'<section><h2>{escape(figure.heading)}</h2><p>{escape(figure.text)}</p><div class="grid-of">'
    yield from map(_panel, figure.panels)
    yield "</div></section>"


def _panel(panel: Panel) -> str:
    entries = "".join(f"<li>{swatch(line)}{escape(line.name)}</li>" for line in panel.legend)
    legend = f'<ul class="legend">{entries}</ul>' if entries else ""
    return f'<div class="card"><h3>{escape(panel.heading)}</h3>{panel.picture}{legend}</div>'


def _tables(report: dict[str, Any]) -> Iterator[str]:
    places = dict.fromkeys((row["bundle"], row["threads"]) for row in report["rows"])
    for label, threads in places:
        name = escape(f"{label}, {counted(threads, 'thread')}")
        rows = [row for row in report["rows"] if (row["bundle"], row["threads"]) == (label, threads)]
        yield f"<h3>{name}: {rows[0]['bundle_bytes'] / 1e6:.1f} MB</h3>"
        # It can be scrolled sideways, so it must be reachable by the keyboard.
        yield f'<div class="wide" role="region" tabindex="0" aria-label="{name}"><table><thead>'
        yield _table_row(HEAD, "th")
        yield "</thead><tbody>"
        yield from (_table_row(cells) for cells in table_cells(rows))
        yield "</tbody></table></div>"


def _table_row(cells: Sequence[str], tag: str = "td") -> str:
    looks = ['class="name"' if index < WORDS else "" for index in range(len(cells))]
    inner = "".join(f"<{tag} {look}>{escape(cell)}</{tag}>" for look, cell in zip(looks, cells, strict=True))
    return f"<tr>{inner}</tr>"


def _about(report: dict[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    facts = {
        "processor": machine["cpu"] or "unknown",
        "instructions": " ".join(machine["features"] or ["unknown"]),
        "cores": str(machine["cores"]),
        "system": f"{machine['system']}, Python {machine['python']}",
        **{f"digest of {one['bundle']}": one["digest"] for one in report["bundles"]},
    }
    yield "<h2>Where</h2><dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    yield "</dl><details><summary>Settings as JSON</summary>"
    yield f"<pre>{escape(json.dumps(report['settings'], indent=2))}</pre></details>"
