"""Which sources are decoded together: those of similar lengths, as many as a budget of positions allows."""

from collections.abc import Sequence


def batches_of(lengths: Sequence[int], rows_per_source: int, target_positions: int, budget: int) -> list[list[int]]:
    """Return the sources' places, the longest source first, cut into batches.

    A batch has at most ``budget`` positions, rows times the longest source and the target, but always a source.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches = []
    start = 0
    while start < len(order):
        # The first source is the longest one of its batch.
        positions = rows_per_source * (lengths[order[start]] + target_positions)
        end = start + max(1, budget // positions)
        batches.append(order[start:end])
        start = end
    return batches
