"""The picture of the README: milliseconds a step of every engine in its best setting, a panel for each batch."""

from html import escape
from typing import Any

Row = dict[str, Any]

WIDTH, NAMES, NUMBERS = 760, 210, 190  # of the picture, and of the words on both sides of the bars
BAR, GAP, HEAD = 18, 6, 34
OURS, OTHERS = "#1f6feb", "#8b949e"  # legible on a light and on a dark page
STYLE = "text{font:13px system-ui,sans-serif;fill:#6e7781}.head{font-weight:600}.end{text-anchor:end}"


def steps_picture(rows: list[Row], names: dict[str, str], phase: str) -> str:
    """Return an SVG of the medians of a phase; bars of one panel have one scale."""
    parts, top = [], 0
    for batch in dict.fromkeys(row["batch"] for row in rows):
        panel = [row for row in rows if row["batch"] == batch]
        parts.append(f'<text class="head" x="0" y="{top + 20}">batch {batch}, ms a step</text>')
        top += HEAD
        most = max(row["phases"][phase]["p50_ms"] for row in panel)
        for row in panel:
            parts += _bar(row, names, phase, most, top)
            top += BAR + GAP
    title = "<title>Milliseconds a decoder step by engine and batch; shorter is faster</title>"
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    body = "\n".join([title, f"<style>{STYLE}</style>", *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{body}\n</svg>\n'


def _bar(row: Row, names: dict[str, str], phase: str, most: float, top: int) -> list[str]:
    """Return an engine's name, its bar, and what the bar says in numbers."""
    ms, times = row["phases"][phase]["p50_ms"], row["times_faster"][phase]
    name = f"{names[row['engine']].replace('`', '')}, {row['precision']}"
    length = max(1.0, ms / most * (WIDTH - NAMES - NUMBERS))
    colour = OURS if row["engine"] == "fatdeploy" else OTHERS
    said = f"{ms:.2f}" if times is None else f"{ms:.2f} ({times:.2f} times as fast)"
    middle = top + BAR - 5
    return [
        f'<text class="end" x="{NAMES - 8}" y="{middle}">{escape(name)}</text>',
        f'<rect x="{NAMES}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
        f'<text x="{NAMES + length + 6:.1f}" y="{middle}">{escape(said)}</text>',
    ]
