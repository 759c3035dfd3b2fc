"""Sizes that an engine is built for: from what was asked and the model's limits to one range an axis."""

from collections.abc import Mapping, Sequence
from typing import get_args

from fatdeploy.errors import ConfigError, SpecMismatch, in_one_line
from fatdeploy.plans import SIZED, Part, Profile, Shape, SizeRange, axes_of, inputs_of, shapes_of
from fatdeploy.spec import ModelSpec

Ranges = dict[str, SizeRange]
Triple = tuple[Shape, Shape, Shape]

MOST_BATCH, MOST_BEAMS = 8, 4
USUAL_LENGTH = 32
# Tokens of a prefix that one call takes. Logits of all of them are computed, so that many cost memory.
MOST_STEP = 16
FORM = "AXIS=SIZE, AXIS=LEAST:MOST or AXIS=LEAST:USUAL:MOST, with commas between axes"


def profiles_from_text(given: Sequence[str]) -> tuple[Ranges, ...]:
    """Return the ranges that options such as ``batch=1:8,source=1:32:128`` say; all that is wrong is told at once."""
    found, reasons = [], []
    for text in given:
        ranges: Ranges = {}
        for part in text.split(","):
            axis, _, sizes = part.strip().partition("=")
            try:
                one = _range_from_text(sizes)
            except ValueError as error:
                reasons.append(f"{part.strip()!r}: {error}")
                continue
            if axis not in SIZED:
                reasons.append(f"{part.strip()!r}: the axes are {', '.join(SIZED)}")
            elif axis in ranges:
                reasons.append(f"{text!r}: {axis} has two ranges; say --profile twice for two profiles")
            ranges[axis] = one
        found.append(ranges)
    if reasons:
        raise ConfigError(in_one_line("--profile refused", reasons))
    return tuple(found)


def _range_from_text(text: str) -> SizeRange:
    numbers = text.split(":")
    if not 1 <= len(numbers) <= 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"expected {FORM}")
    sizes = [int(number) for number in numbers]
    return SizeRange(least=sizes[0], usual=sizes[-2] if len(sizes) == 3 else sizes[-1], most=sizes[-1])


def profiles_of(spec: ModelSpec, asked: Sequence[Ranges]) -> tuple[Profile, ...]:
    """Return a model's profiles: one of its own if nothing was asked; axes that nobody spoke of get their usual range.

    What the model cannot do is refused, all of it at once.
    """
    axes = axes_of(inputs_of(spec, "decoder"))
    profiles, reasons = [], []
    for number, given in enumerate(asked or ({},), 1):
        ranges = {**_usual(spec, given.get("batch")), **given}
        ranges = {axis: ranges[axis] for axis in SIZED if axis in axes or axis in given}
        reasons += [f"profile {number}: {reason}" for reason in _wrong(spec, axes, ranges)]
        profiles.append(Profile(sizes=ranges))
        if profiles[-1] in profiles[:-1]:
            reasons.append(f"profile {number}: it is profile {profiles.index(profiles[-1]) + 1} again")
    if reasons:
        raise ConfigError(in_one_line("engines cannot be built so", reasons))
    return tuple(profiles)


def _usual(spec: ModelSpec, batch: SizeRange | None) -> Ranges:
    """Return the ranges of a profile that nothing more is said of; beams make rows of sources."""
    batch = batch or SizeRange(least=1, usual=1, most=MOST_BATCH)
    length = min(USUAL_LENGTH, spec.max_source)
    step = SizeRange(least=1, usual=1, most=min(MOST_STEP, spec.max_target))
    if spec.decoding == "parallel":
        step = SizeRange(least=1, usual=min(USUAL_LENGTH, spec.max_target), most=spec.max_target)
    return {
        "batch": batch,
        "rows": SizeRange(least=batch.least, usual=batch.usual, most=batch.most * MOST_BEAMS),
        "source": SizeRange(least=1, usual=length, most=spec.max_source),
        "step": step,
    }


def _wrong(spec: ModelSpec, axes: Sequence[str], ranges: Ranges) -> list[str]:
    reasons = [f"no tensor of the model has the axis {axis}" for axis in ranges if axis not in axes]
    limits = {"source": ("max_source", spec.max_source), "step": ("max_target", spec.max_target)}
    for axis, (name, limit) in limits.items():
        if axis in ranges and ranges[axis].most > limit:
            reasons.append(f"{axis} goes to {ranges[axis].most}, past {name} = {limit}")
    if "rows" in ranges and "batch" in ranges:
        sizes = [
            (which, getattr(ranges["batch"], which), getattr(ranges["rows"], which))
            for which in ("least", "usual", "most")
        ]
        reasons += [
            f"every source has as many rows, so that the {which} rows are a multiple of the {which} batch; found "
            f"{rows} rows of {batch} sources"
            for which, batch, rows in sizes
            if rows % batch
        ]
    return reasons


def shapes_by_input(spec: ModelSpec, part: Part, profile: Profile) -> dict[str, Triple]:
    """Return the least, usual and largest shape of every input of a part."""
    fixed = spec.fixed_axes(branches=False)
    return {one.name: shapes_of(one, profile, fixed) for one in inputs_of(spec, part)}


def check_shapes(spec: ModelSpec, part: Part, shapes: Mapping[str, Triple]) -> None:
    """Raise for what TensorRT's builder would take without a word: names of no input, one axis with two ranges."""
    fixed = spec.fixed_axes(branches=False)
    known = {one.name: one.fixed(fixed) for one in inputs_of(spec, part)}
    reasons = [f"it has shapes of {name}, which is no input" for name in shapes if name not in known]
    reasons += [f"it has no shapes of {name}" for name in known if name not in shapes]
    ranges: dict[str, dict[Shape, list[str]]] = {}
    for name, triple in shapes.items():
        axes = known[name].shape if name in known else ()
        if any(len(shape) != len(axes) for shape in triple):
            reasons += [f"{name} has {len(axes)} axes, not those of {triple}"] if name in known else []
            continue
        for place, axis in enumerate(axes):
            sizes = tuple(shape[place] for shape in triple)
            if isinstance(axis, int) and set(sizes) != {axis}:
                reasons.append(f"{name} must have {axis} at place {place}, found {sizes}")
            elif not isinstance(axis, int):
                ranges.setdefault(axis, {}).setdefault(sizes, []).append(name)
    for symbol, found in ranges.items():
        if len(found) > 1:
            said = ", ".join(f"{sizes} in {' and '.join(names)}" for sizes, names in found.items())
            reasons.append(f"{symbol} must have one range, found {said}")
    if reasons:
        raise SpecMismatch(in_one_line("optimization profile refused", reasons))


PARTS: tuple[Part, ...] = get_args(Part)
