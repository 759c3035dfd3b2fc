"""What every engine refuses, in one place: rows, tokens, ids and wants that its model or state cannot take."""

import numpy as np

from fatdeploy.errors import SpecMismatch
from fatdeploy.runtimes.engines.protocol import Capacity, Ids, Rows, Want
from fatdeploy.spec import ModelSpec, Tokens


def sources_of_rows(rows: Rows, rows_per_source: int) -> tuple[Rows, int]:
    """Return which sources ``rows`` keep, in order, and how many rows each has from now on; refuse anything uneven."""
    owners = [row // rows_per_source for row in rows.tolist()]
    kept = list(dict.fromkeys(owners))
    each = len(owners) // max(1, len(kept))
    if not owners or owners != [owner for owner in kept for _ in range(each)]:
        raise SpecMismatch(
            f"reorder refused: rows of one source must stand together, equally many for each; found {rows.tolist()} "
            f"with {rows_per_source} rows a source"
        )
    return np.array(kept), each


def checked_move(rows: Rows, n_rows: int, n_sources: int, capacity: Capacity) -> tuple[Rows, int]:
    """Return which sources a reorder keeps and how many rows each has then; refuse rows that there cannot be."""
    listed = rows.tolist()
    if listed and not 0 <= min(listed) <= max(listed) < n_rows:
        raise SpecMismatch(f"reorder refused: the state has rows 0…{n_rows - 1}, found {listed}")
    kept, each = sources_of_rows(rows, n_rows // n_sources)
    if each > capacity.rows_per_source:
        raise SpecMismatch(
            f"reorder refused: {each} rows a source, the state was encoded for a capacity of "
            f"rows_per_source = {capacity.rows_per_source}"
        )
    return kept, each


def check_step(spec: ModelSpec, tokens: Tokens, n_rows: int, position: int, limit: int) -> None:
    """Raise unless a state of so many rows may be fed these tokens at its position."""
    spec.check_tokens(tokens, position, limit)
    if len(tokens) != n_rows:
        raise SpecMismatch(f"step refused: {len(tokens)} rows of tokens, the state has {n_rows}")


def check_length_head(spec: ModelSpec) -> None:
    """Raise if target lengths are asked of a model that does not tell them."""
    if not spec.length_log_probs:
        raise SpecMismatch("this model has no length head: its targets end with EOS")


def released_state() -> SpecMismatch:
    """Return what to say of a state that was given back: its memory may be another decode's by now."""
    return SpecMismatch("this state was released and cannot be used any more: encode the source again")


def check_want(spec: ModelSpec, want: Want) -> None:
    """Raise if a hidden state is all that is wanted of a model that does not tell it."""
    if want is Want.HIDDEN and not spec.hidden:
        raise SpecMismatch("this model gives logits alone: its hidden state cannot be had")


def check_ids(spec: ModelSpec, ids: Ids) -> None:
    """Raise SpecMismatch unless ids are a row of tokens: a negative one would be counted from the end."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise SpecMismatch(f"output rows refused: ids must be int64 [n], found {ids.dtype} {list(ids.shape)}")
    if ids.size and not (ids.min() >= 0 and ids.max() < spec.vocab_size):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise SpecMismatch(f"output rows refused: ids must lie in 0…{spec.vocab_size - 1}, found {wrong}")
