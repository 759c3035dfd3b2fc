"""Small plots as inline SVG, as wide as a phone; the style of the page defines the colours."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 40
ROW_HEIGHT = 36  # of a spread and its label
N_COLOURS, N_DASHES, MAX_TICKS = 6, 4, 6


@dataclass(frozen=True)
class Scale:
    """Turns values into coordinates; a logarithmic scale shows ratios as distances."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        value, low, high = (math.log10(x) if self.log else x for x in (value, self.low, self.high))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return a few round numbers between low and high."""
        candidates = _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)
        for ticks in candidates:
            if len(ticks) <= MAX_TICKS:
                return ticks
        return ticks[:: math.ceil(len(ticks) / MAX_TICKS)]


@dataclass(frozen=True)
class Caption:
    """The title of a picture, what it shows in words, and the names of its axes."""

    title: str
    text: str
    x_name: str
    y_name: str = ""


@dataclass(frozen=True)
class Line:
    """Named points that a line joins, or a single dot."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dash: int = 0

    @property
    def look(self) -> str:
        return f"c{self.colour % N_COLOURS} d{self.dash % N_DASHES}"


@dataclass(frozen=True)
class Spread:
    """A thin line from low to high, a thick one from the dot to ``thick``, and the value in words."""

    name: str
    low: float
    dot: float
    thick: float
    high: float
    value: str
    colour: int


def x_scale(low: float, high: float, *, log: bool = False, margin: float = 0) -> Scale:
    """Return the horizontal scale of a line plot."""
    return Scale(low, high, LEFT + margin, WIDTH - RIGHT - margin, log)


def y_scale(low: float, high: float, *, log: bool = False, margin: float = 0) -> Scale:
    """Return the vertical scale of a line plot."""
    return Scale(low, high, HEIGHT - BOTTOM, TOP + margin, log)


def ends_of(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis with room on both sides; pictures to compare share them."""
    numbers = list(values)
    return min(numbers) / 1.25, max(numbers) * 1.25


def line_plot(
    caption: Caption, lines: Sequence[Line], scales: tuple[Scale, Scale], x_ticks: Sequence[float], radius: float = 0
) -> str:
    """Return lines, with dots of a radius at their points."""
    x, y = scales
    parts = [*_y_axis(y, caption.y_name), *_x_axis(x, x_ticks, caption.x_name, HEIGHT)]
    for line in lines:
        places = [(x.at(across), y.at(up)) for across, up in line.points]
        if len(places) > 1:
            joined = " ".join(f"{left},{down}" for left, down in places)
            parts.append(f'<polyline class="line {line.look}" points="{joined}"/>')
        if radius:
            parts += [f'<circle class="dot {line.look}" cx="{cx}" cy="{cy}" r="{radius}"/>' for cx, cy in places]
    return _svg(caption, HEIGHT, parts)


def spread_plot(
    caption: Caption, spreads: Sequence[Spread], ends: tuple[float, float], mark: float | None = None
) -> str:
    """Return spreads below each other over one logarithmic axis; ``mark`` is a value to compare them with."""
    height = TOP + ROW_HEIGHT * len(spreads) + BOTTOM
    x = Scale(*ends, 14, WIDTH - RIGHT, log=True)
    parts = _x_axis(x, x.ticks(), caption.x_name, height)
    if mark is not None:
        parts.append(_line("mark", (x.at(mark), TOP), (x.at(mark), height - BOTTOM)))
    for index, spread in enumerate(spreads):
        top, look = TOP + ROW_HEIGHT * index, f"c{spread.colour % N_COLOURS}"
        low, dot, thick, high = (
            (x.at(value), top + 26) for value in (spread.low, spread.dot, spread.thick, spread.high)
        )
        parts += [
            f'<text x="14" y="{top + 13}">{escape(spread.name)}</text>',
            f'<text class="value" x="{WIDTH - RIGHT}" y="{top + 13}">{escape(spread.value)}</text>',
            _line(f"thin {look}", low, high),
            _line(f"thick {look}", dot, thick),
            f'<circle class="dot {look}" cx="{dot[0]}" cy="{dot[1]}" r="4.5"/>',
        ]
    return _svg(caption, height, parts)


def swatch(line: Line) -> str:
    """Return how a line looks, for a legend."""
    shape = f'<line class="line {line.look}" x1="1" y1="6" x2="27" y2="6"/>'
    if len(line.points) == 1:
        shape = f'<circle class="dot {line.look}" cx="14" cy="6" r="5"/>'
    return f'<svg class="swatch" aria-hidden="true" viewBox="0 0 28 12">{shape}</svg>'


def _svg(caption: Caption, height: float, parts: Iterable[str]) -> str:
    """Return a picture with its description for those who cannot see it."""
    words = f"<title>{escape(caption.title)}</title><desc>{escape(caption.text)}</desc>"
    label = escape(f"{caption.title}. {caption.text}")
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height}">{words}{"".join(parts)}</svg>'


def _y_axis(y: Scale, name: str) -> list[str]:
    parts = []
    for value in y.ticks():
        down = y.at(value)
        parts.append(_line("grid", (LEFT, down), (WIDTH - RIGHT, down)))
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{down + 4:.1f}">{_short(value)}</text>')
    middle = (y.start + y.end) / 2
    return [*parts, f'<text class="axis" transform="translate(11 {middle}) rotate(-90)">{escape(name)}</text>']


def _x_axis(x: Scale, ticks: Sequence[float], name: str, height: float) -> list[str]:
    bottom = height - BOTTOM
    parts = [_line("grid", (x.at(value), TOP), (x.at(value), bottom)) for value in ticks]
    parts += [f'<text class="tick" x="{x.at(value)}" y="{bottom + 15}">{_short(value)}</text>' for value in ticks]
    return [*parts, f'<text class="axis" x="{(x.start + x.end) / 2}" y="{height - 6}">{escape(name)}</text>']


def _line(look: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    return f'<line class="{look}" x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"/>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _log_ticks(low: float, high: float) -> Iterator[list[float]]:
    """Yield fewer and fewer numbers between the ends of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        yield [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]


def _even_ticks(low: float, high: float) -> Iterator[list[float]]:
    """Yield fewer and fewer numbers between the ends of a plain axis."""
    size = 10 ** math.floor(math.log10((high - low) / 2))
    for step in (size, 2 * size, 5 * size, 10 * size):
        first = math.ceil(low / step - 1e-9)
        yield [first * step + step * index for index in range(math.floor((high - first * step) / step + 1e-9) + 1)]
