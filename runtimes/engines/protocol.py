"""What a backend does for the decode loop. The loop owns token choice, the engine owns caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fatdeploy.spec import Mask, ModelSpec, Tokens

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Ids = NDArray[np.int64]
State = TypeVar("State")
ALL_SOURCES = slice(None)


class Want(IntEnum):
    """What a step must compute beyond the hidden state; nothing else is computed."""

    HIDDEN = 0
    LOGITS = 1
    TOPK = 2


@dataclass(frozen=True)
class Capacity:
    """How far a state may grow: rows per source, and target positions."""

    rows_per_source: int
    target_positions: int


@dataclass(frozen=True)
class StepOut:
    """Result of a step on t tokens per row; arrays belong to the engine and are valid until its next step.

    Whoever asked for the step may change the logits in place: no step reads those of an earlier one.
    """

    hidden: Floats | None = None  # [R, t, M], what the output matrix multiplies; None if the model does not return it
    logits: Floats | None = None  # [R, t, V]
    top_log_probs: Floats | None = None  # [R, t, k], best first
    top_ids: Tokens | None = None  # [R, t, k]
    attention: Floats | None = None  # [R, H, t, S], cross weights of the layer that was exported with them


def copied(out: StepOut) -> StepOut:
    """Return a copy of a result that the caller may keep."""
    return StepOut(**{name: None if array is None else array.copy() for name, array in vars(out).items()})


def joined(outs: Sequence[StepOut]) -> StepOut:
    """Return the results of steps on successive tokens as the result of one step on all of them."""
    axes = {name: 2 if name == "attention" else 1 for name in vars(outs[0])}
    parts = {name: [getattr(out, name) for out in outs] for name in axes}
    return StepOut(
        **{name: None if arrays[0] is None else np.concatenate(arrays, axes[name]) for name, arrays in parts.items()}
    )


def in_parts(tokens: Tokens, most: int | None, call: Callable[[Tokens], StepOut]) -> StepOut:
    """Return the result of a step on tokens [R, t], made in calls of at most ``most`` tokens, or in one call."""
    if most is None or tokens.shape[1] <= most:
        return call(tokens)
    parts = [tokens[:, start : start + most] for start in range(0, tokens.shape[1], most)]
    # Copies: the next call overwrites a result.
    return joined([copied(call(part)) for part in parts])


class Stepper(Protocol[State]):
    """The part of an engine that follows a decode whose tokens are known: no row is moved."""

    @property
    def spec(self) -> ModelSpec:
        """The contract of the model."""
        ...

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> State:
        """Read the source [B, S] and return a state with one row per source, before the first token."""
        ...

    def step(self, tokens: Tokens, state: State, want: Want) -> StepOut:
        """Feed tokens [R, t] and return what is wanted at their positions."""
        ...

    def release(self, state: State) -> None:
        """Take back a state that is no longer used; the next one may reuse its memory."""
        ...


class Engine(Stepper[State], Protocol[State]):
    """A model behind three verbs. The state is the engine's own; ``step`` and ``reorder`` update it in place."""

    def reorder(self, state: State, rows: Rows) -> None:
        """Make new row i continue old row rows[i]. Rows of one source stay adjacent, equally many per source."""
        ...

    def length_log_probs(self, state: State) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up; only models with a length head."""
        ...

    def output_rows(self, ids: Ids) -> Floats | None:
        """Return a copy of the rows of the output matrix that belong to ids, [n, M].

        None if logits are not the hidden state times a matrix.
        """
        ...

    def output_bias(self, ids: Ids) -> Floats | None:
        """Return what is added to the products with the output rows of ids, [n]; None if nothing is."""
        ...

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
        ...


class OutputProduct(Protocol):
    """Hidden states times chosen rows of the output matrix, computed in the caller's thread."""

    def choose(self, ids: Ids) -> None:
        """Multiply with the rows of these ids from now on."""
        ...

    def __call__(self, hidden: Floats) -> Floats:
        """Return hidden states [R, M] times the chosen rows, plus their bias, [R, n]; the caller may change it."""
        ...


@runtime_checkable
class Multiplying(Protocol):
    """An engine that multiplies hidden states with rows of its output matrix faster than numpy."""

    def output_product(self) -> OutputProduct | None:
        """Return a product that one decode uses; None if logits are not the hidden state times a matrix."""
        ...


@runtime_checkable
class Refilling(Engine[State], Protocol[State]):
    """An engine whose rows may be at different positions: new sources take the places of finished ones."""

    @property
    def refills(self) -> bool:
        """Whether this engine's model can do it."""
        ...

    def refill(self, state: State, places: Rows, newcomers: State, chosen: slice = ALL_SOURCES) -> None:
        """Let sources of a state that was just encoded take the places of sources of another.

        ``places`` are indices of sources, one per newcomer; ``chosen`` says which of ``newcomers`` join (default: all).
        All rows of these places are at position 0 afterwards; other rows stay as they are. A newcomer must not be
        longer than the longest source that the state was encoded with. The caller still owns ``newcomers`` and releases
        it.
        """
        ...

    def rest(self, state: State, rows: Rows) -> None:
        """Put rows whose targets are complete back to position 0: what they read until they leave has no meaning.

        So a row that waits for a newcomer, or for others to leave with it, never grows beyond the capacity.
        """
        ...


@runtime_checkable
class Ranking(Protocol):
    """An engine that knows whether its own top k pays; others are taken to be better at it than the loop.

    If it does not pay, the loop searches the logits and lets the engine normalise them.
    """

    @property
    def topk_pays(self) -> bool:
        """Whether a step with ``Want.TOPK`` is faster than one with ``Want.LOGITS`` and a search in the logits."""
        ...

    def log_softmax(self, scores: Floats, out: Floats) -> None:
        """Write the log-probabilities of contiguous scores [R, n] to another array.

        Rows are independent. A row that has no score above -inf becomes NaN.
        """
        ...
