"""Which profile of a plan a call runs in, and the sizes that sources are padded to so that few shapes are recorded."""

import math
from collections.abc import Mapping, Sequence

from fatdeploy.errors import SpecMismatch, in_one_line
from fatdeploy.plans import PlanRecord, Profile, axes_of
from fatdeploy.spec import TensorSpec

# Sources are padded to a multiple of this many tokens, because each shape needs a recording.
SOURCE_STEP = 16


def fitting_profile(profiles: Sequence[Profile], axes: Sequence[str], sizes: Mapping[str, int]) -> int | None:
    """Return the profile that takes these sizes, the smallest if several do; None if none does."""
    fitting = [index for index, profile in enumerate(profiles) if not _outside(profile, axes, sizes)]
    return min(fitting, key=lambda index: _most_work(profiles[index], axes), default=None)


def chosen_profile(record: PlanRecord, tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
    """Return the profile that a call of these sizes runs in; raise with every tensor and axis that does not fit."""
    axes = axes_of(tensors)
    profile = fitting_profile(record.profiles, axes, sizes)
    if profile is None:
        raise no_profile(record, tensors, sizes)
    return profile


def no_profile(record: PlanRecord, tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> SpecMismatch:
    """Return the error for sizes that no profile takes: each profile with the axes that do not fit."""
    reasons, needed = [], {}
    for index, profile in enumerate(record.profiles):
        for axis in _outside(profile, axes_of(tensors), sizes):
            needed[axis] = f"{axis}=1:{sizes[axis]}"
            axis_tensor = next(tensor for tensor in tensors if axis in tensor.shape)
            allowed = profile.sizes[axis]
            reasons.append(
                f"profile {index} takes {allowed.least}…{allowed.most} {_PLURAL[axis]} "
                f"(axis {axis_tensor.shape.index(axis)} of {axis_tensor.name}), found {sizes[axis]}"
            )
    return SpecMismatch(
        f"{in_one_line(f'{record.part} refused, no profile of {record.file} fits', reasons)}. "
        f"Pass less at once, or build it for more: fatdeploy build BUNDLE --profile {','.join(needed.values())}"
    )


def padded_sizes(profiles: Sequence[Profile], batch: int, source: int, rows_per_source: int) -> tuple[int, int] | None:
    """Return the number and length that sources are padded to on the device; None if no profile takes them.

    Batches are padded to a power of two, and sources to a multiple of SOURCE_STEP, as far as a profile takes them.
    """
    fitting = []
    for profile in profiles:
        n_sources, length = (
            _within(profile, axis, size)
            for axis, size in (("batch", power_of_two(batch)), ("source", -(-source // SOURCE_STEP) * SOURCE_STEP))
        )
        n_sources = max(min(n_sources, _most(profile, "rows") // rows_per_source), _least(profile, "batch"))
        sizes = {"batch": n_sources, "source": length, "rows": n_sources * rows_per_source}
        if n_sources >= batch and length >= source and not _outside(profile, tuple(sizes), sizes):
            fitting.append((n_sources * length, n_sources, length))
    return min(fitting)[1:] if fitting else None


def most_sources(profiles: Sequence[Profile], source: int, rows_per_source: int) -> int:
    """Return how many sources of at most this length one batch may have; 0 if no profile takes even one."""
    fitting = [profile for profile in profiles if source <= _most(profile, "source")]
    return max(
        (min(_most(profile, "batch"), _most(profile, "rows") // rows_per_source) for profile in fitting), default=0
    )


def most_steps(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """Return how many tokens per row a call of these sizes may have; 0 if no profile takes the sizes."""
    fitting = [profile for profile in profiles if not _outside(profile, ("batch", "rows", "source"), sizes)]
    return max((_most(profile, "step") for profile in fitting), default=0)


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def _outside(profile: Profile, axes: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Return the axes whose size a profile does not take; axes without a size are left out."""
    return [
        axis for axis in axes if axis in profile.sizes and axis in sizes and not profile.sizes[axis].holds(sizes[axis])
    ]


def _most_work(profile: Profile, axes: Sequence[str]) -> int:
    return math.prod(_most(profile, axis) for axis in axes if axis in profile.sizes)


def _within(profile: Profile, axis: str, size: int) -> int:
    return max(_least(profile, axis), min(size, _most(profile, axis)))


def _least(profile: Profile, axis: str) -> int:
    return profile.sizes[axis].least


def _most(profile: Profile, axis: str) -> int:
    return profile.sizes[axis].most


_PLURAL = {"batch": "sources", "rows": "rows", "source": "source tokens", "step": "tokens per step"}
