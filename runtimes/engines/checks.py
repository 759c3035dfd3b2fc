"""What every engine refuses, in one place: rows, tokens, ids and results that its model or state does not support."""

import numpy as np

from fatdeploy.errors import SpecMismatch
from fatdeploy.runtimes.engines.protocol import Capacity, Ids, Rows, Want
from fatdeploy.spec import ModelSpec, Tokens


def sources_of_rows(rows: Rows, rows_per_source: int) -> tuple[Rows, int]:
    """Return which sources ``rows`` keep, in order, and how many rows each then has; refuse an uneven split."""
    owners = [row // rows_per_source for row in rows.tolist()]
    kept = list(dict.fromkeys(owners))
    per_source = len(owners) // max(1, len(kept))
    if not owners or owners != [owner for owner in kept for _ in range(per_source)]:
        raise SpecMismatch(
            "reorder refused: rows of one source must be adjacent, and every source must have the same number; found "
            f"{rows.tolist()} with {rows_per_source} rows per source"
        )
    return np.array(kept), per_source


def checked_move(rows: Rows, n_rows: int, n_sources: int, capacity: Capacity) -> tuple[Rows, int]:
    """Return which sources a reorder keeps and how many rows each then has; refuse rows that the state cannot have."""
    listed = rows.tolist()
    if listed and not 0 <= min(listed) <= max(listed) < n_rows:
        raise SpecMismatch(f"reorder refused: the state has rows 0…{n_rows - 1}, found {listed}")
    kept, per_source = sources_of_rows(rows, n_rows // n_sources)
    if per_source > capacity.rows_per_source:
        raise SpecMismatch(
            f"reorder refused: {per_source} rows per source, the state was encoded for a capacity of "
            f"rows_per_source = {capacity.rows_per_source}"
        )
    return kept, per_source


def check_step(spec: ModelSpec, tokens: Tokens, n_rows: int, position: int, limit: int) -> None:
    """Raise unless a state with ``n_rows`` rows can take these tokens at its position."""
    spec.check_tokens(tokens, position, limit)
    if len(tokens) != n_rows:
        raise SpecMismatch(f"step refused: {len(tokens)} rows of tokens, the state has {n_rows}")


def check_refill(places: Rows, n_sources: int, n_newcomers: int) -> None:
    """Raise unless ``places`` are different sources of a state, one per newcomer."""
    listed = places.tolist() if places.dtype == np.int64 and places.ndim == 1 else None
    if not listed:
        found = f"{places.dtype} {list(places.shape)}"
        raise SpecMismatch(f"refill refused: places must be int64 [n], one per new source, found {found}")
    if not 0 <= min(listed) <= max(listed) < n_sources or len(set(listed)) < len(listed):
        raise SpecMismatch(f"refill refused: places must be different sources in 0…{n_sources - 1}, found {listed}")
    if len(listed) != n_newcomers:
        raise SpecMismatch(f"refill refused: {n_newcomers} new sources for {len(listed)} places")


def check_newcomers(lengths: Rows, longest: int, *, started: bool) -> None:
    """Raise unless new sources were just encoded and fit a state that was encoded for ``longest`` source tokens."""
    if started:
        raise SpecMismatch("refill refused: the new sources must come from a state that was just encoded, found steps")
    if int(lengths.max()) > longest:
        raise SpecMismatch(
            f"refill refused: a new source has {int(lengths.max())} tokens, the state was encoded for sources of at "
            f"most {longest}: encode it in a batch of its own, or begin with the longest sources"
        )


def check_length_head(spec: ModelSpec) -> None:
    """Raise if the model does not predict target lengths."""
    if not spec.length_log_probs:
        raise SpecMismatch("this model has no length head: its targets end with EOS")


def released_state() -> SpecMismatch:
    """Return the error for a released state: its memory may belong to another decode by now."""
    return SpecMismatch("this state was released and cannot be used any more: encode the source again")


def check_want(spec: ModelSpec, want: Want) -> None:
    """Raise if only the hidden state is wanted and the model does not return it."""
    if want is Want.HIDDEN and not spec.hidden:
        raise SpecMismatch("this model returns logits only: its hidden state is not available")


def check_ids(spec: ModelSpec, ids: Ids) -> None:
    """Raise SpecMismatch unless ids are a row of tokens: numpy would count a negative one from the end."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise SpecMismatch(f"output rows refused: ids must be int64 [n], found {ids.dtype} {list(ids.shape)}")
    if ids.size and not (ids.min() >= 0 and ids.max() < spec.vocab_size):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise SpecMismatch(f"output rows refused: ids must lie in 0…{spec.vocab_size - 1}, found {wrong}")
