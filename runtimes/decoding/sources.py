"""Which sources are decoded together: those of similar lengths, as many as a budget of positions allows."""

from collections.abc import Callable, Sequence

# Of the longest source's length and the rows a source: how many an engine takes at once.
MostSources = Callable[[int, int], int]


def batches_of(
    lengths: Sequence[int],
    rows_per_source: int,
    target_positions: int,
    budget: int,
    most: MostSources | None = None,
) -> list[list[int]]:
    """Return the sources' places, the longest source first, cut into batches.

    A batch has at most ``budget`` positions, rows times the longest source and the target, and no more sources than
    ``most`` says, but always one.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches = []
    start = 0
    while start < len(order):
        # The first source is the longest one of its batch.
        longest = lengths[order[start]]
        size = budget // (rows_per_source * (longest + target_positions))
        end = start + max(1, size if most is None else min(size, most(longest, rows_per_source)))
        batches.append(order[start:end])
        start = end
    return batches
