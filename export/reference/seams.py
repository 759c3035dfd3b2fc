"""The seams of the reference: the few places where a target computes in its own way what PyTorch does in tensor code.

The reference calls ``seams()``. In PyTorch this is ``Seams`` itself; an exporter replaces it with a dialect while it
traces, so that every graph comes from the same model code and no patterns have to be matched afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.attention import (
    FeatureMap,
    LayerState,
    Scores,
    Visible,
    attended,
    linear_state,
    merge_heads,
    slow_scores,
    split_heads,
)
from fatdeploy.export.reference.recurrent.cells import Cell, ConnectedCell, connected, recurred

# A number in PyTorch; in a graph a tensor without axes, or [R] if rows may be at different positions.
Position = int | Tensor
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Added:
    """Scores of target positions with source positions or source tokens, added to those of queries and keys."""

    table: Tensor  # [max_target, max_source or V]
    at: Tensor  # [t] or [R, t], the positions of a call
    ids: Tensor | None = None  # [B, S] of the source, the columns of a table over the vocabulary


def token_scores(table: Tensor, at: Tensor, ids: Tensor) -> Tensor:
    """Return the numbers of a table [T, V] at positions [..., t] and ids [..., S], as [..., t, S]."""
    # By their places in the flat table, so that a graph gathers just these numbers.
    places = at[..., None] * table.shape[1] + ids[..., None, :]
    return functional.embedding(places, table.reshape(-1, 1)).squeeze(-1)


class Seams:
    """What the seams do in PyTorch."""

    # Whether to compute separately what depends only on weights, so that an optimiser does it once.
    folds = False

    def n_keys(self, position: Position, steps: int, capacity: int) -> int:  # noqa: ARG002
        """Return how many target positions the queries of a call are compared with: all that are written after it."""
        return int(position) + steps

    def slow_scores(self, queries: Tensor, keys: Tensor, longest: int) -> Tensor:  # noqa: ARG002
        """Return the slow attention's scores [B, H, I, J] from [B, I, H, D] and [B, J, H, D], J at most ``longest``."""
        return slow_scores(queries.transpose(1, 2), keys.transpose(1, 2))

    def weights(self, visible: Visible, scores: Tensor) -> Tensor:
        """Return the weights of scores [B, H, I, J] over the visible keys."""
        return visible.weights(scores)

    def attend(self, qkv: Tensor, scores: Scores, visible: Visible, dropout: nn.Dropout) -> Tensor:
        """Return self-attention [B, L, M] of packed queries, keys and values [B, L, 3M]."""
        q, k, v = (split_heads(part, scores.heads) for part in qkv.chunk(3, -1))
        return attended((q, k, v), scores, visible, dropout)

    def attend_cached(
        self, qkv: Tensor, scores: Scores, visible: Visible, state: LayerState, position: Position
    ) -> tuple[Tensor, LayerState]:
        """Write the keys and values of this call into their caches, in place, and attend to all written positions."""
        q, k, v = (split_heads(part, scores.heads) for part in qkv.chunk(3, -1))
        start, end = int(position), int(position) + k.shape[2]
        for cache, new in zip(state, (k, v), strict=True):
            cache[:, :, start:end] = new
        keys, values = (cache[:, :, :end] for cache in state)
        return attended((q, keys, values), scores, visible), state

    def attend_recurrent(
        self, qkv: Tensor, features: FeatureMap, heads: int, state: LayerState, keep: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        """Return causal linear attention [R, t, M] of packed queries, keys and values, and the next state.

        Positions where ``keep`` [R, t, 1] is 0 leave nothing in the state.
        """
        q, k, v = (split_heads(part, heads) for part in qkv.chunk(3, -1))
        keys = features.keys(k) if keep is None else features.keys(k) * keep[:, None]
        sums, normaliser, state = linear_state(features.queries(q), keys, v, state)
        return merge_heads(features.quotient(sums, normaliser)), state

    def recur(self, x: Tensor, cell: Cell, valid: Tensor | None, past: LayerState) -> tuple[Tensor, LayerState]:
        """Return a recurrent cell's states [R, L, M], and its last; ``valid`` [R, L] is False at padding."""
        return recurred(x, cell, valid, past)

    def recur_connected(self, x: Tensor, cell: ConnectedCell, context: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return AT's states [R, t, M] after inputs x, and its last; rows of one source share its context [B, M]."""
        grouped, scored = (self.by_source(part, context) for part in (x, cell.from_input(x)))
        states, last = self.connected(grouped, scored, cell, context, self.by_source(hidden, context))
        return self.by_row(states, x), self.by_row(last, hidden)

    def connected(
        self, x: Tensor, scored: Tensor, cell: ConnectedCell, context: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return AT's states [B, n, t, M] and its last [B, n, M], by a loop over the tokens of a call."""
        return connected(x, scored, cell, context, hidden)

    def repeated(
        self, advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], state: Tensor, inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the last state and the outputs [t, …] of ``advance``, which reads a state and one of inputs [t, …]."""
        outputs = []
        for value in inputs.unbind(0):
            state, output = advance(state, value)
            outputs.append(output)
        return state, torch.stack(outputs)

    def attend_memory(
        self,
        q: Tensor,  # noqa: ARG002
        memory: tuple[Tensor, Tensor],  # noqa: ARG002
        scores: Scores,  # noqa: ARG002
        valid: Tensor,  # noqa: ARG002
        added: Added | None,  # noqa: ARG002
    ) -> Tensor | None:
        """Return attention [R, t, M] to the source's keys and values [B, H, S, D] if the target has one op for it.

        None if it has not, and single ops are needed.
        """
        return None

    def in_source(self, tokens: Tensor, source: Tensor, valid: Tensor, like: Tensor) -> Tensor:
        """Return 1 for tokens [R, t] that occur in their source, padding aside, else 0, in the shape of ``like``."""
        equal = self.by_source(tokens, source)[..., None] == source[:, None, None, :]  # [B, n, t, S]
        return (equal & valid[:, None, None, :]).any(-1).to(like.dtype).reshape(like.shape)

    def by_source(self, x: Tensor, batch: Tensor) -> Tensor:
        """Return [R, t, …] as [B, n, t, …], n rows for each of the sources in ``batch`` [B, …]."""
        return x.view(len(batch), -1, *x.shape[1:])

    def by_row(self, x: Tensor, like: Tensor) -> Tensor:
        """Return x in the shape of ``like``: the inverse of ``by_source``."""
        return x.reshape(like.shape)

    def weights_by_row(self, weights: Tensor, rows: Tensor, valid: Tensor) -> Tensor:  # noqa: ARG002
        """Return weights [B, H, n, t, S] as [R, H, t, S], for ``rows`` [R, t, …] and the sources' mask [B, S]."""
        return weights.transpose(1, 2).flatten(0, 1)

    def unless(self, idle: Tensor, act: Callable[[], Outputs], blank: Callable[[], Outputs]) -> Outputs | None:  # noqa: ARG002
        """Return what ``act`` returns; if ``idle`` is true it does not run, and None or ``blank`` replaces it."""
        return None if bool(idle) else act()

    def project(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """Return hidden [R, t, M] times the transpose of the output matrix [V, M]."""
        return hidden @ matrix.T

    def copied(self, probability: Tensor, weights: Tensor, source: Tensor) -> Tensor:
        """Return probability [R, t, V] with weights [R, t, S] added at the source's ids [B, S]."""
        ids = source.repeat_interleave(len(weights) // len(source), 0)
        return probability.scatter_add(-1, ids[:, None, :].expand_as(weights), weights)


# Not a ContextVar: torch cannot read one while it traces the branches of a condition.
_current = Seams()


def seams() -> Seams:
    """Return the current seams."""
    return _current


@contextmanager
def speaking(dialect: Seams) -> Iterator[None]:
    """Replace PyTorch's seams with a dialect, for the whole process, while a graph is traced."""
    global _current  # noqa: PLW0603
    before, _current = _current, dialect
    try:
        yield
    finally:
        _current = before
