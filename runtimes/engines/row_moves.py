"""Rows that change places in memory: which are copied, and in which order, so that none is lost before it was read."""

from collections.abc import Sequence

SPARE = -1  # the row beside the others that one of a circle waits in


def planned_moves(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Return copies (to, from) after which row i is what row parents[i] was; rows that stay are not touched.

    A row is written when nobody reads it any more. What is left are circles, which a copy to the spare row opens.
    """
    missing = {row: parent for row, parent in enumerate(parents) if row != parent}
    readers = [0] * (1 + max([len(parents), *(parent + 1 for parent in parents)], default=0))
    for parent in missing.values():
        readers[parent] += 1
    moves: list[tuple[int, int]] = []
    ready = [row for row in missing if not readers[row]]
    while missing:
        if not ready:
            row = next(iter(missing))
            moves.append((SPARE, row))
            missing.update({child: SPARE for child, parent in missing.items() if parent == row})
            ready.append(row)
        row = ready.pop()
        parent = missing.pop(row)
        moves.append((row, parent))
        if parent != SPARE:
            readers[parent] -= 1
            if not readers[parent] and parent in missing:
                ready.append(parent)
    return moves
