"""Rows of text as aligned columns."""

from collections.abc import Iterable, Iterator


def aligned(rows: Iterable[tuple[str, ...]], indent: int = 0) -> Iterator[str]:
    """Yield rows of equal length as lines, each column as wide as its widest cell."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield " " * indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
