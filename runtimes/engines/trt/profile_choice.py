"""Which profile of a plan a call runs in, and the sizes that sources are padded to so that few shapes are recorded."""

import math
from collections.abc import Mapping, Sequence

from fatdeploy.errors import SpecMismatch, in_one_line
from fatdeploy.plans import PlanRecord, Profile, axes_of
from fatdeploy.spec import TensorSpec

# Sources are padded to a multiple of so many tokens: each shape is a recording of its own.
SOURCE_STEP = 16


def fitting_profile(profiles: Sequence[Profile], axes: Sequence[str], sizes: Mapping[str, int]) -> int | None:
    """Return the profile that takes these sizes, the one for the least work where several do; None if none does."""
    fitting = [index for index, profile in enumerate(profiles) if not _outside(profile, axes, sizes)]
    return min(fitting, key=lambda index: _most_work(profiles[index], axes), default=None)


def chosen_profile(record: PlanRecord, tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
    """Return the profile that a call of these sizes runs in; name every tensor and axis that none takes."""
    axes = axes_of(tensors)
    found = fitting_profile(record.profiles, axes, sizes)
    if found is None:
        raise no_profile(record, tensors, sizes)
    return found


def no_profile(record: PlanRecord, tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> SpecMismatch:
    """Return what to say of sizes that no profile takes: each profile with the axes that stand against it."""
    reasons, needed = [], {}
    for index, profile in enumerate(record.profiles):
        for axis in _outside(profile, axes_of(tensors), sizes):
            needed[axis] = f"{axis}=1:{sizes[axis]}"
            one = next(tensor for tensor in tensors if axis in tensor.shape)
            allowed = profile.sizes[axis]
            reasons.append(
                f"profile {index} takes {allowed.least}…{allowed.most} {_PLURAL[axis]} "
                f"(axis {one.shape.index(axis)} of {one.name}), found {sizes[axis]}"
            )
    return SpecMismatch(
        f"{in_one_line(f'{record.part} refused, no profile of {record.file} fits', reasons)}. "
        f"Give it less at once, or build it for more: fatdeploy build BUNDLE --profile {','.join(needed.values())}"
    )


def padded_sizes(profiles: Sequence[Profile], batch: int, source: int, rows_per_source: int) -> tuple[int, int] | None:
    """Return how many sources of which length the device is given for those that there are; None if none will do.

    Batches are padded to a power of two, and sources to a multiple of SOURCE_STEP, as far as a profile takes them.
    """
    found = []
    for profile in profiles:
        n_sources, length = (
            _within(profile, axis, size)
            for axis, size in (("batch", power_of_two(batch)), ("source", -(-source // SOURCE_STEP) * SOURCE_STEP))
        )
        n_sources = max(min(n_sources, _most(profile, "rows") // rows_per_source), _least(profile, "batch"))
        sizes = {"batch": n_sources, "source": length, "rows": n_sources * rows_per_source}
        if n_sources >= batch and length >= source and not _outside(profile, tuple(sizes), sizes):
            found.append((n_sources * length, n_sources, length))
    return min(found)[1:] if found else None


def most_sources(profiles: Sequence[Profile], source: int, rows_per_source: int) -> int:
    """Return how many sources of at most this length one batch may have; 0 if no profile takes even one."""
    fitting = [one for one in profiles if source <= _most(one, "source")]
    return max((min(_most(one, "batch"), _most(one, "rows") // rows_per_source) for one in fitting), default=0)


def most_steps(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """Return how many tokens a row one call may have beside these sizes; 0 if no profile takes these."""
    fitting = [one for one in profiles if not _outside(one, ("batch", "rows", "source"), sizes)]
    return max((_most(one, "step") for one in fitting), default=0)


def power_of_two(size: int) -> int:
    """Return the least power of two from a size up."""
    return 1 << (size - 1).bit_length()


def _outside(profile: Profile, axes: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Return the axes whose size a profile does not take; an axis that a call has not decided yet has none."""
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


_PLURAL = {"batch": "sources", "rows": "rows", "source": "source tokens", "step": "tokens a step"}
