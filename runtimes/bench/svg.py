"""Small plots as inline SVG, as wide as a phone: lines, and rows of spreads. Colours are classes of the page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 40
N_COLOURS, N_DASHES = 6, 4
ROW = 36  # height of a spread and its label
MOST_TICKS = 6

Ends = tuple[float, float]  # of an axis; pictures that are compared have the same


@dataclass(frozen=True)
class Scale:
    """Turns values into places; a logarithmic one shows ratios as distances."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        share = (self._place(value) - self._place(self.low)) / (self._place(self.high) - self._place(self.low))
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return plain numbers between low and high, a few of them."""
        return _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)

    def _place(self, value: float) -> float:
        return math.log10(value) if self.log else value


@dataclass(frozen=True)
class Words:
    """What a picture is called, what it shows for those who cannot see it, and its axes."""

    title: str
    text: str
    across: str
    up: str = ""


@dataclass(frozen=True)
class Line:
    """Named points that are joined; lines of one colour and different dashes belong together."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dash: int = 0

    @property
    def look(self) -> str:
        return f"c{self.colour % N_COLOURS} d{self.dash % N_DASHES}"


@dataclass(frozen=True)
class Spread:
    """A row with a thin line from low to high, a thick one inside of it, and a dot; ``said`` is its value in words."""

    name: str
    low: float
    dot: float
    thick: float
    high: float
    said: str
    colour: int = 0


def room_for(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis, with room on both sides of positive values."""
    found = list(values)
    return min(found) / 1.25, max(found) * 1.25


def line_plot(words: Words, lines: Sequence[Line], x_ticks: Sequence[float], ends: Ends) -> str:
    """Return lines over a plain axis (positions), or a logarithmic one of the ticks (sizes); times are logarithmic."""
    height = 230
    numbers = [x for line in lines for x, _ in line.points]
    across = (min(numbers), max(numbers)) if max(numbers) > min(numbers) else (min(numbers) / 2, max(numbers) * 2)
    x = Scale(*across, LEFT + 10, WIDTH - RIGHT - 10, log=bool(x_ticks))
    y = Scale(*ends, height - BOTTOM, TOP, log=True)
    parts = [*_y_axis(y, words.up), *_x_axis(x, x_ticks or x.ticks(), words.across, height)]
    for line in lines:
        places = [(x.at(one), y.at(value)) for one, value in line.points]
        joined = " ".join(f"{left},{down}" for left, down in places)
        parts.append(f'<polyline class="line {line.look}" points="{joined}"/>')
        if x_ticks:
            parts += [f'<circle class="dot {line.look}" cx="{left}" cy="{down}" r="3"/>' for left, down in places]
    return svg(words, height, parts)


def spread_plot(words: Words, rows: Sequence[Spread], ends: Ends, mark: float | None = None) -> str:
    """Return a row for each spread over a common logarithmic axis; ``mark`` is a value that all are measured by."""
    height = TOP + ROW * len(rows) + BOTTOM
    x = Scale(*ends, 14, WIDTH - RIGHT, log=True)
    parts = _x_axis(x, x.ticks(), words.across, height)
    if mark is not None:
        parts.append(_upright(x.at(mark), TOP, height - BOTTOM, "mark"))
    for index, row in enumerate(rows):
        parts += _spread(row, x, TOP + ROW * index)
    return svg(words, height, parts)


def dot_plot(words: Words, dots: Sequence[Line], most: float, fewest: float) -> str:
    """Return named dots: sizes from 0 to ``most`` across, percents from ``fewest`` to 100 up."""
    height = 230
    up = Scale(fewest, 100, height - BOTTOM, TOP + 8)
    across = Scale(0, most, LEFT, WIDTH - RIGHT)
    parts = [*_y_axis(up, words.up), *_x_axis(across, across.ticks(), words.across, height)]
    for dot in dots:
        [(value, share)] = dot.points
        parts.append(f'<circle class="dot {dot.look}" cx="{across.at(value)}" cy="{up.at(share)}" r="6"/>')
    return svg(words, height, parts)


def svg(words: Words, height: float, parts: Iterable[str]) -> str:
    """Return a picture with its text for those who cannot see it."""
    told = f"<title>{escape(words.title)}</title><desc>{escape(words.text)}</desc>"
    label = escape(f"{words.title}. {words.text}")
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height}">{told}{"".join(parts)}</svg>'


def swatch(line: Line) -> str:
    """Return how a line looks, for a legend."""
    shape = f'<line class="line {line.look}" x1="1" y1="6" x2="27" y2="6"/>'
    if len(line.points) == 1:
        shape = f'<circle class="dot {line.look}" cx="14" cy="6" r="5"/>'
    return f'<svg class="swatch" aria-hidden="true" viewBox="0 0 28 12">{shape}</svg>'


def plain(value: float) -> str:
    """Return a number of an axis as short as it can be."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _spread(row: Spread, x: Scale, top: float) -> list[str]:
    middle, look = top + 26, f"c{row.colour % N_COLOURS}"
    return [
        f'<text x="14" y="{top + 13}">{escape(row.name)}</text>',
        f'<text class="said" x="{WIDTH - RIGHT}" y="{top + 13}">{escape(row.said)}</text>',
        f'<line class="thin {look}" x1="{x.at(row.low)}" y1="{middle}" x2="{x.at(row.high)}" y2="{middle}"/>',
        f'<line class="thick {look}" x1="{x.at(row.dot)}" y1="{middle}" x2="{x.at(row.thick)}" y2="{middle}"/>',
        f'<circle class="dot {look}" cx="{x.at(row.dot)}" cy="{middle}" r="4.5"/>',
    ]


def _y_axis(y: Scale, name: str) -> list[str]:
    parts = []
    for value in y.ticks():
        down = y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{down}" x2="{WIDTH - RIGHT}" y2="{down}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{down + 4:.1f}">{plain(value)}</text>')
    middle = (y.start + y.end) / 2
    turned = f'<text class="axis" transform="translate(11 {middle}) rotate(-90)">{escape(name)}</text>'
    return [*parts, turned]


def _x_axis(x: Scale, ticks: Sequence[float], name: str, height: float) -> list[str]:
    bottom = height - BOTTOM
    parts = [_upright(x.at(value), TOP, bottom, "grid") for value in ticks]
    parts += [f'<text class="tick" x="{x.at(value)}" y="{bottom + 15}">{plain(value)}</text>' for value in ticks]
    return [*parts, f'<text class="axis" x="{(x.start + x.end) / 2}" y="{height - 6}">{escape(name)}</text>']


def _upright(x: float, top: float, bottom: float, look: str) -> str:
    return f'<line class="{look}" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= MOST_TICKS:
            return ticks
    return ticks[:: math.ceil(len(ticks) / MOST_TICKS)]


def _even_ticks(low: float, high: float) -> list[float]:
    size = 10 ** math.floor(math.log10((high - low) / 2))
    for step in (size, 2 * size, 5 * size, 10 * size):
        first = math.ceil(low / step - 1e-9)
        ticks = [first * step + step * index for index in range(math.floor((high - first * step) / step + 1e-9) + 1)]
        if len(ticks) <= MOST_TICKS:
            break
    return ticks
