"""The course of a training as a picture: losses and error rate per epoch, in an SVG without dependencies."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from fatdeploy.export.training.trainer import Epoch

WIDTH, HEIGHT, MARGIN = 720, 400, 56
COLOURS = {"training loss": "#4477aa", "validation loss": "#ee6677", "token error rate": "#228833"}


def curve_svg(epochs: Sequence[Epoch]) -> str:
    """Return losses (left scale) and token error rate in percent (right scale) of every epoch."""
    columns = {
        "training loss": [epoch.train_loss for epoch in epochs],
        "validation loss": [epoch.score.loss for epoch in epochs],
        "token error rate": [epoch.score.token_error_rate for epoch in epochs],
    }
    losses = [value for name, values in columns.items() if name != "token error rate" for value in values]
    tops = {name: _round_up(max(losses)) for name in columns}
    tops["token error rate"] = _round_up(max(columns["token error rate"]))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(len(epochs), tops["training loss"], tops["token error rate"]),
    ]
    for index, (name, values) in enumerate(columns.items()):
        points = [(_x(place, len(epochs)), _y(value / tops[name])) for place, value in enumerate(values)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        # A line of one point is invisible.
        parts.append(f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3" fill="{COLOURS[name]}"/>')
        parts.append(
            f'<text x="{MARGIN + 170 * index}" y="20" fill="{COLOURS[name]}">{escape(name)}: {values[-1]:.3g}</text>'
        )
    best = next((index for index in reversed(range(len(epochs))) if epochs[index].best), None)
    if best is not None:
        x = _x(best, len(epochs))
        parts.append(f'<line x1="{x:.1f}" y1="{_y(0)}" x2="{x:.1f}" y2="{_y(1)}" stroke="#999" stroke-dasharray="4"/>')
        anchor = "start" if x < WIDTH / 2 else "end"
        parts.append(
            f'<text x="{x:.1f}" y="{_y(1) - 4:.0f}" text-anchor="{anchor}" fill="#666">kept: epoch {best + 1}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(count: int, loss: float, rate: float) -> list[str]:
    left, right, bottom = MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN
    parts = [f'<path d="M{left} {MARGIN}V{bottom}H{right}V{MARGIN}" fill="none" stroke="#333"/>']
    for step in range(5):
        y = _y(step / 4)
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{loss * step / 4:.3g}</text>')
        parts.append(f'<text x="{right + 6}" y="{y + 4:.0f}">{rate * step / 4:.3g} %</text>')
    parts += [
        f'<text x="{_x(place, count):.1f}" y="{bottom + 18}" text-anchor="middle">{place + 1}</text>'
        for place in sorted({0, count // 2, count - 1})
    ]
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{bottom + 38}" text-anchor="middle">epoch</text>')
    return parts


def _x(place: int, count: int) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * (place / (count - 1) if count > 1 else 0.5)


def _y(share: float) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * min(share, 1.0)


def _round_up(value: float) -> float:
    """Return the next number with one digit, so that the axis has plain numbers."""
    digit = 10.0 ** (len(f"{int(value)}") - 1) if value >= 1 else 0.1
    return max(digit, -(-value // digit) * digit)
