"""Rows that change places: all end up right, none is copied needlessly, and one spare row is enough for any cycle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fatdeploy.runtimes.engines.row_moves import SPARE, planned_moves


def moved(parents: list[int], n_rows: int) -> list[int]:
    """Return what each row holds after the copies."""
    rows: dict[int, int] = {row: row for row in range(n_rows)}
    for to, source in planned_moves(parents):
        rows[to] = rows[source]
    return [rows[row] for row in range(len(parents))]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_every_row_holds_what_its_parent_held_and_only_rows_that_change_are_copied(parents: list[int]) -> None:
    assert moved(parents, 12) == parents
    written = [to for to, _ in planned_moves(parents) if to != SPARE]
    assert sorted(written) == [row for row, parent in enumerate(parents) if row != parent]


@given(st.permutations(range(8)))
def test_a_cycle_costs_one_extra_copy(parents: list[int]) -> None:
    assert moved(list(parents), 8) == list(parents)
    circles, seen = 0, set()
    for row in range(8):
        if row in seen or parents[row] == row:
            continue
        circles += 1
        while row not in seen:
            seen.add(row)
            row = parents[row]
    assert len(planned_moves(parents)) == len(seen) + circles


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        ([], []),
        ([0, 1, 2], []),
        ([1, 0], [(SPARE, 0), (0, 1), (1, SPARE)]),
        ([0, 0, 1], [(2, 1), (1, 0)]),
        ([3, 3], [(1, 3), (0, 3)]),
    ],
    ids=str,
)
def test_copies_are_ordered_so_that_no_row_is_lost(parents: list[int], expected: list[tuple[int, int]]) -> None:
    assert planned_moves(parents) == expected
