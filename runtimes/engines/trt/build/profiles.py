"""Sizes that an engine is built for: one range per axis, from the request and the model's limits."""

from collections.abc import Mapping, Sequence
from typing import get_args

from fatdeploy.errors import ConfigError, SpecMismatch, in_one_line
from fatdeploy.plans import SIZED, Part, Profile, Shape, SizeRange, axes_of, inputs_of, shapes_of
from fatdeploy.spec import ModelSpec

Ranges = dict[str, SizeRange]
Triple = tuple[Shape, Shape, Shape]

MOST_BATCH, MOST_BEAMS = 8, 4
USUAL_LENGTH = 32
# Tokens of a prefix that one call takes. Logits of all of them are computed, which costs memory.
MOST_STEP = 16
FORM = "AXIS=SIZE, AXIS=LEAST:MOST or AXIS=LEAST:USUAL:MOST, with commas between axes"


def profiles_from_text(texts: Sequence[str]) -> tuple[Ranges, ...]:
    """Return the ranges in options such as ``batch=1:8,source=1:32:128``; raise with everything that is wrong."""
    profiles, reasons = [], []
    for text in texts:
        ranges: Ranges = {}
        for part in text.split(","):
            axis, _, sizes = part.strip().partition("=")
            try:
                size_range = _range_from_text(sizes)
            except ValueError as error:
                reasons.append(f"{part.strip()!r}: {error}")
                continue
            if axis not in SIZED:
                reasons.append(f"{part.strip()!r}: the axes are {', '.join(SIZED)}")
            elif axis in ranges:
                reasons.append(f"{text!r}: {axis} has two ranges; pass --profile twice for two profiles")
            ranges[axis] = size_range
        profiles.append(ranges)
    if reasons:
        raise ConfigError(in_one_line("--profile refused", reasons))
    return tuple(profiles)


def _range_from_text(text: str) -> SizeRange:
    numbers = text.split(":")
    if not 1 <= len(numbers) <= 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"expected {FORM}")
    sizes = [int(number) for number in numbers]
    return SizeRange(least=sizes[0], usual=sizes[-2] if len(sizes) == 3 else sizes[-1], most=sizes[-1])


def profiles_of(spec: ModelSpec, requested: Sequence[Ranges]) -> tuple[Profile, ...]:
    """Return a model's profiles, by default a single one; axes that are not mentioned get their default range.

    Raise with everything that the model does not support.
    """
    axes = axes_of(inputs_of(spec, "decoder"))
    profiles, reasons = [], []
    for number, request in enumerate(requested or ({},), 1):
        ranges = {**_default_ranges(spec, request.get("batch")), **request}
        ranges = {axis: ranges[axis] for axis in SIZED if axis in axes or axis in request}
        reasons += [f"profile {number}: {reason}" for reason in _wrong(spec, axes, ranges)]
        profiles.append(Profile(sizes=ranges))
        if profiles[-1] in profiles[:-1]:
            reasons.append(f"profile {number}: it repeats profile {profiles.index(profiles[-1]) + 1}")
    if reasons:
        raise ConfigError(in_one_line("profiles refused", reasons))
    return tuple(profiles)


def _default_ranges(spec: ModelSpec, batch: SizeRange | None) -> Ranges:
    """Return the default ranges of a profile; beams multiply sources to rows."""
    batch = batch or SizeRange(least=1, usual=1, most=MOST_BATCH)
    length = min(USUAL_LENGTH, spec.max_source)
    step = SizeRange(least=1, usual=1, most=min(MOST_STEP, *_step_limit(spec).values()))
    if spec.decoding == "parallel":
        step = SizeRange(least=1, usual=min(USUAL_LENGTH, spec.max_target), most=spec.max_target)
    return {
        "batch": batch,
        "rows": SizeRange(least=batch.least, usual=batch.usual, most=batch.most * MOST_BEAMS),
        "source": SizeRange(least=1, usual=length, most=spec.max_source),
        "step": step,
    }


def _step_limit(spec: ModelSpec) -> dict[str, int]:
    """Return the most tokens of a call, under the name of the field that says so."""
    if spec.tokens_per_call is not None and spec.tokens_per_call < spec.max_target:
        return {"tokens_per_call": spec.tokens_per_call}
    return {"max_target": spec.max_target}


def _wrong(spec: ModelSpec, axes: Sequence[str], ranges: Ranges) -> list[str]:
    reasons = [f"no tensor of the model has the axis {axis}" for axis in ranges if axis not in axes]
    limits = {"source": {"max_source": spec.max_source}, "step": _step_limit(spec)}
    reasons += [
        f"{axis} goes to {ranges[axis].most}, past {name} = {limit}"
        for axis, limit_of_axis in limits.items()
        for name, limit in limit_of_axis.items()
        if axis in ranges and ranges[axis].most > limit
    ]
    if "rows" in ranges and "batch" in ranges:
        sizes = [
            (which, getattr(ranges["batch"], which), getattr(ranges["rows"], which))
            for which in ("least", "usual", "most")
        ]
        reasons += [
            f"every source has the same number of rows, so the {which} rows must be a multiple of the {which} batch; "
            f"found {rows} rows of {batch} sources"
            for which, batch, rows in sizes
            if rows % batch
        ]
    return reasons


def shapes_by_input(spec: ModelSpec, part: Part, profile: Profile) -> dict[str, Triple]:
    """Return the least, usual and largest shape of every input of a part."""
    fixed = spec.fixed_axes(branches=False)
    return {tensor.name: shapes_of(tensor, profile, fixed) for tensor in inputs_of(spec, part)}


def check_shapes(spec: ModelSpec, part: Part, shapes: Mapping[str, Triple]) -> None:
    """Raise for what TensorRT's builder silently accepts: names of no input, two ranges of one axis."""
    fixed = spec.fixed_axes(branches=False)
    inputs = {tensor.name: tensor.fixed(fixed) for tensor in inputs_of(spec, part)}
    reasons = [f"it has shapes for {name}, which is not an input" for name in shapes if name not in inputs]
    reasons += [f"it has no shapes for {name}" for name in inputs if name not in shapes]
    ranges: dict[str, dict[Shape, list[str]]] = {}
    for name, triple in shapes.items():
        axes = inputs[name].shape if name in inputs else ()
        if any(len(shape) != len(axes) for shape in triple):
            reasons += [f"{name} has {len(axes)} axes, not those of {triple}"] if name in inputs else []
            continue
        for place, axis in enumerate(axes):
            sizes = tuple(shape[place] for shape in triple)
            if isinstance(axis, int) and set(sizes) != {axis}:
                reasons.append(f"{name} must have {axis} at place {place}, found {sizes}")
            elif not isinstance(axis, int):
                ranges.setdefault(axis, {}).setdefault(sizes, []).append(name)
    for symbol, names_by_sizes in ranges.items():
        if len(names_by_sizes) > 1:
            shown = ", ".join(f"{sizes} in {' and '.join(names)}" for sizes, names in names_by_sizes.items())
            reasons.append(f"{symbol} must have one range, found {shown}")
    if reasons:
        raise SpecMismatch(in_one_line("optimization profile refused", reasons))


PARTS: tuple[Part, ...] = get_args(Part)
