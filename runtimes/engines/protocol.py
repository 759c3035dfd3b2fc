"""What a backend does for the decode loop. The loop owns token choice, the engine owns caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import SpecMismatch
from fatdeploy.spec import Mask, ModelSpec, Tokens

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Ids = NDArray[np.int64]
State = TypeVar("State")


class Want(IntEnum):
    """What a step must compute beyond the hidden state; what is not wanted is not computed."""

    HIDDEN = 0
    LOGITS = 1
    TOPK = 2


@dataclass(frozen=True)
class Capacity:
    """How far a state may grow: rows a source, and target positions."""

    rows_per_source: int
    target_positions: int


@dataclass(frozen=True)
class StepOut:
    """Result of a step on t tokens a row; arrays belong to the engine and are valid until its next step."""

    hidden: Floats | None = None  # [R, t, M], what the output matrix multiplies; None of models that do not tell it
    logits: Floats | None = None  # [R, t, V]
    top_log_probs: Floats | None = None  # [R, t, k], best first
    top_ids: Tokens | None = None  # [R, t, k]
    attention: Floats | None = None  # [R, H, t, S], cross weights of the layer that was exported with them


def copied(out: StepOut) -> StepOut:
    """Return a result as the caller's own."""
    return StepOut(**{name: None if array is None else array.copy() for name, array in vars(out).items()})


def joined(outs: Sequence[StepOut]) -> StepOut:
    """Return the result of one step for those of several, each on the tokens that follow."""
    along = {name: 2 if name == "attention" else 1 for name in vars(outs[0])}
    parts = {name: [getattr(out, name) for out in outs] for name in along}
    return StepOut(
        **{name: None if found[0] is None else np.concatenate(found, along[name]) for name, found in parts.items()}
    )


class Stepper(Protocol[State]):
    """What it takes to follow a decode whose tokens are known: no row is moved."""

    @property
    def spec(self) -> ModelSpec:
        """The contract of the model."""
        ...

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> State:
        """Read the source [B, S] and return a state with one row a source, before the first token."""
        ...

    def step(self, tokens: Tokens, state: State, want: Want) -> StepOut:
        """Feed tokens [R, t] and return what is wanted of their positions."""
        ...

    def release(self, state: State) -> None:
        """Take back a state that nobody will use any more; its memory may serve the next one."""
        ...


class Engine(Stepper[State], Protocol[State]):
    """A model behind three verbs. The state is the engine's own; ``step`` and ``reorder`` update it in place."""

    def reorder(self, state: State, rows: Rows) -> None:
        """Make new row i continue old row rows[i]. Rows of one source stay side by side, equally many for each."""
        ...

    def length_log_probs(self, state: State) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up; only models with a length head."""
        ...

    def output_rows(self, ids: Ids) -> Floats | None:
        """Return the rows of the output matrix that belong to ids, [n, M], as the caller's own.

        None if logits are not the hidden state times a matrix.
        """
        ...

    def close(self) -> None:
        """Give back everything; the engine cannot be used afterwards."""
        ...


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
