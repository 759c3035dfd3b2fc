"""What is wrong with arrays of ids and masks that a caller passes to a model, as reasons."""

import numpy as np
from numpy.typing import NDArray

FEW_IDS = 32


def wrong_ids(name: str, ids: NDArray[np.int64], n_ids: int) -> list[str]:
    """Return why ids are not those of a vocabulary."""
    low, high = _extremes(ids)
    if low >= 0 and high < n_ids:
        return []
    return [f"{name} ids must lie in 0…{n_ids - 1}, found {low if low < 0 else high}"]


def wrong_form(name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> list[str]:
    """Return why an array is not of this type with two axes."""
    reasons = []
    if array.dtype != dtype:
        reasons.append(f"{name} must be {dtype}, found {array.dtype}")
    if array.ndim != 2:
        reasons.append(f"{name} must have two axes (rows, positions), found shape {array.shape}")
    elif not array.size:
        reasons.append(f"{name} is empty: shape {array.shape}")
    return reasons


def _extremes(ids: NDArray[np.int64]) -> tuple[int, int]:
    """Return the least and the largest id; for the few ids of a step a list is faster than an array."""
    if ids.size > FEW_IDS:
        return int(ids.min()), int(ids.max())
    listed = ids.ravel().tolist()
    return min(listed), max(listed)


def wrong_padding(mask: NDArray[np.bool_]) -> list[str]:
    """Return why a mask is not that of right-padded sources."""
    if mask.all():
        return []
    reasons = []
    empty = np.flatnonzero(~mask.any(axis=1))
    if empty.size:
        reasons.append(f"row {empty[0]} has no real token")
    ragged = np.flatnonzero((mask[:, 1:] & ~mask[:, :-1]).any(axis=1))
    if ragged.size:
        reasons.append(f"row {ragged[0]} of the mask is not a run of True followed by a run of False (right padding)")
    return reasons
