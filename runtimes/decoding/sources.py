"""Sources on their way into an engine: ids from text, checked once, padded, and batched by length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import SpecMismatch, in_one_line
from fatdeploy.spec import Mask, ModelSpec, Tokens

SourceIds = Sequence[int] | NDArray[np.generic]
SourceRow = NDArray[np.generic]

# From the length of the longest source and the rows per source: how many sources an engine takes at once.
MostSources = Callable[[int, int], int]


@dataclass(frozen=True)
class CheckedSources:
    """Sources that the model can read. Only ``checked_sources`` and owners of rows that it returned make one."""

    rows: Sequence[SourceRow]


def checked_sources(sources: Sequence[SourceIds] | CheckedSources, spec: ModelSpec) -> CheckedSources:
    """Return sources as arrays; raise, with every reason, unless the model can read all of them.

    Sources that were checked before are returned as they are.
    """
    if isinstance(sources, CheckedSources):
        return sources
    rows = [row_of(source) for source in sources]
    reasons = [f"source {index}: {reason}" for index, row in enumerate(rows) if (reason := wrong_source(row, spec))]
    if not rows:
        reasons.append("no source given")
    if reasons:
        raise SpecMismatch(in_one_line("cannot decode", reasons))
    return CheckedSources(rows)


def row_of(source: SourceIds) -> SourceRow:
    """Return a source as an array, whatever it contains: ``wrong_source`` says what is wrong with it."""
    try:
        return np.asarray(source)
    except ValueError:  # lists of different lengths
        return np.asarray(source, object)


def wrong_source(row: SourceRow, spec: ModelSpec) -> str:
    """Return why the model cannot read a source; empty if it can."""
    if row.ndim != 1:
        return f"expected one axis of ids, found shape {row.shape}"
    if not row.size:
        return "is empty"
    if row.dtype.kind not in "iu":
        return f"ids must be integers, found {row.dtype}"
    if len(row) > spec.max_source:
        return f"has {len(row)} tokens, more than max_source = {spec.max_source} (truncate=True, --truncate: cut it)"
    wrong = [int(token) for token in row.tolist() if not 0 <= token < spec.n_source_ids]
    return f"ids must lie in 0…{spec.n_source_ids - 1}, found {wrong[0]}" if wrong else ""


def padded(sources: Sequence[SourceIds] | CheckedSources, spec: ModelSpec) -> tuple[Tokens, Mask]:
    """Return sources of any lengths as ids [B, S] and mask, padded on the right; refuse those that cannot be read."""
    rows = checked_sources(sources, spec).rows
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    if min(lengths) == longest:
        return np.array(rows, np.int64), np.ones((len(rows), longest), bool)
    mask = np.arange(longest) < np.array(lengths)[:, None]
    ids = np.full(mask.shape, spec.pad_id, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def batches_of(
    lengths: Sequence[int],
    rows_per_source: int,
    target_positions: Sequence[int],
    budget: int,
    most_sources: MostSources | None = None,
) -> list[list[int]]:
    """Return the indices of the sources, longest source first, cut into batches.

    A batch has at most ``budget`` positions (rows times the longest source plus the longest target) and at most
    ``most_sources`` sources, but always one.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], -target_positions[index]))
    batches: list[list[int]] = []
    most = positions = 0
    for index in order:
        positions = max(positions, target_positions[index])
        # The first source of a batch is its longest.
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and len(batches[-1]) < min(most, budget // (rows_per_source * (longest + positions))):
            batches[-1].append(index)
            continue
        batches.append([index])
        positions = target_positions[index]
        most = budget if most_sources is None else most_sources(lengths[index], rows_per_source)
    return batches
