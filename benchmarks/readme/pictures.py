"""The pictures of README and docs, drawn with matplotlib as SVG that reads well on light and dark pages."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

Row = Mapping[str, Any]

# Mid tones have enough contrast with white and with black; the page itself is the background.
OURS, OTHERS, INK, SOFT = "#2f81f7", "#8b949e", "#737c87", "#737c8714"
LINES = (OURS, OTHERS, "#bf8700", "#8250df")
# Text stays text, in whatever sans serif the reader has, and ids do not change from run to run.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fatdeploy", "font.family": "sans-serif", "text.color": INK}
NO_DATE = {"Date": None, "Creator": None}


def speed_picture(rows: Sequence[Row], names: Mapping[str, str], phase: str) -> str:
    """Return the median of a phase for every engine as SVG, with one panel and one scale per batch size."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 0.5 + 1.45 * len(batches)), layout="constrained")
        panels = figure.subplots(len(batches), squeeze=False)[:, 0]
        for batch, axes in zip(batches, panels, strict=True):
            draw_bars(axes, [row for row in rows if row["batch"] == batch], names, phase)
            title = f"batch {batch}: ms per step (speed, CTranslate2 = 1)"
            axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
        return svg(figure)


def draw_bars(axes: Axes, rows: Sequence[Row], names: Mapping[str, str], phase: str) -> None:
    """Draw one bar per engine, with its name before it and its time behind it."""
    times = [row["phases"][phase]["p50_ms"] for row in rows]
    labels = [f"{names[row['engine']].replace('`', '')}, {row['precision']}" for row in rows]
    colours = [OURS if row["engine"] == "fatdeploy" else OTHERS for row in rows]
    bars = axes.barh(range(len(rows)), times, color=colours, height=0.72)
    axes.bar_label(bars, [time_label(row, phase) for row in rows], padding=4, fontsize=9, color=INK)
    axes.set_yticks(range(len(rows)), labels, fontsize=9, color=INK)
    axes.set_xlim(0, max(times) * 1.2)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)


def time_label(row: Row, phase: str) -> str:
    """Return a time, and how it compares with CTranslate2's best."""
    ms, times = row["phases"][phase]["p50_ms"], row["times_faster"][phase]
    return f"{ms:.2f}" if times is None else f"{ms:.2f}  ({times:.2f}×)"


def lengths_picture(rows: Sequence[Row], lengths: Sequence[int]) -> str:
    """Return the mean time of a step by length of the target as SVG, with one panel per batch and a line per model."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * len(batches), 2.6), layout="constrained")
        panels = figure.subplots(1, len(batches), squeeze=False)[0]
        for batch, axes in zip(batches, panels, strict=True):
            draw_lines(axes, [row for row in rows if row["batch"] == batch], lengths)
            axes.set_title(f"batch {batch}", loc="left", fontsize=10, color=INK, fontweight="bold")
        panels[0].set_ylabel("ms per step, on average", fontsize=9, color=INK)
        return svg(figure)


def draw_lines(axes: Axes, rows: Sequence[Row], lengths: Sequence[int]) -> None:
    """Draw one line per model, with its name at the end."""
    for row, colour in zip(rows, LINES, strict=False):
        axes.plot(lengths, row["mean_ms"], color=colour, marker="o", markersize=3, linewidth=1.6)
        name, _, _ = row["model"].rpartition("-")
        end = (lengths[-1], row["mean_ms"][-1])
        axes.annotate(name, end, (0, 4), textcoords="offset points", ha="right", fontsize=9, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=7, rotation=45)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the target", fontsize=9, color=INK)
    axes.tick_params(colors=INK, labelsize=8)
    axes.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(INK)


# Left edge, top edge, width, title, lines below it. One unit is a tenth of an inch.
BOXES = (
    (0, 30, 17, "your model", ("preset, checkpoint or", "PyTorch module")),
    (23, 30, 30, "export/  (torch)", ("trace → simplify → quantize", "prove: same tokens as PyTorch")),
    (59, 30, 17, "bundle", ("graphs, weights, probes,", "certificate")),
    (0, 14, 17, "tokens, text", ("generate, stream,", "verify")),
    (23, 14, 30, "one decode loop", ("greedy, beams, sampling, stops", "chooses tokens, knows no engine")),
    (59, 14, 17, "engine", ("encode · step · reorder", "owns caches and state")),
)
HEIGHT = 10
# From, to, and the words beside the arrow.
ARROWS = (
    ((17, 25), (23, 25), ""),
    ((53, 25), (59, 25), ""),
    ((67.5, 20), (67.5, 14), "on the device: runtimes/, no torch"),
    ((59, 9), (53, 9), ""),
    ((23, 9), (17, 9), ""),
)
ENGINES_LINE = "engines: ONNX Runtime CPU and CUDA · TensorRT · TensorRT-RTX · the PyTorch reference"


def architecture_picture() -> str:
    """Return how a model becomes a bundle, and a bundle becomes tokens, as SVG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.8, 3.5))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xlim=(-0.5, 76.5), ylim=(0, 31))
        axes.axis("off")
        for left, top, width, title, lines in BOXES:
            draw_box(axes, left, top, width, title, lines)
        for start, end, words in ARROWS:
            axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=INK, linewidth=1.4))
            axes.text(start[0] - 1.5, (start[1] + end[1]) / 2, words, ha="right", va="center", fontsize=9, color=INK)
        axes.text(76, 1.5, ENGINES_LINE, ha="right", va="center", fontsize=9, color=INK)
        return svg(figure)


def draw_box(axes: Axes, left: float, top: float, width: float, title: str, lines: Sequence[str]) -> None:
    """Draw a box with a title and smaller lines below it."""
    box = FancyBboxPatch((left, top - HEIGHT), width, HEIGHT, boxstyle="round,pad=0,rounding_size=1.2")
    box.set(facecolor=SOFT, edgecolor=OURS, linewidth=1.4)
    axes.add_patch(box)
    middle = left + width / 2
    axes.text(middle, top - 2.2, title, ha="center", va="center", fontsize=11, color=OURS, fontweight="bold")
    for index, line in enumerate(lines):
        axes.text(middle, top - 5.2 - 2.6 * index, line, ha="center", va="center", fontsize=8.5, color=INK)


def svg(figure: Figure) -> str:
    """Return a figure as SVG without a background, the same bytes for the same drawing."""
    figure.patch.set_visible(False)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=NO_DATE)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
