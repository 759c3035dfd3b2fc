"""The tokens that each row may choose: one list for all rows, or lists that follow from the sources.

Scores are computed for the union of the lists of a batch, and a row may choose only from its own list: it gets what it
would get alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF
from fatdeploy.runtimes.engines.protocol import Engine, Floats, Ids, Multiplying, OutputProduct, State
from fatdeploy.spec import ModelSpec

# The largest product, in multiplications, that OpenBLAS (numpy's library) runs in one thread: 65536 * 4, its defaults.
IN_ONE_THREAD = 2**18
NO_IDS: Ids = np.empty(0, np.int64)


class SourceLists(Protocol):
    """Which target tokens go with which source tokens, such as the table that comes with a bundle."""

    @property
    def frequent(self) -> Ids:
        """The target tokens that any source may have."""
        ...

    def targets_of(self, source: Ids) -> Ids:
        """Return the target tokens of a source's tokens."""
        ...


class Shortlists:
    """The lists of a decode's sources, and their union over the rows of a batch, which grows as sources join."""

    def __init__(
        self,
        base: Iterable[int],
        vocab_size: int,
        *,
        sources: Sequence[NDArray[np.generic]] = (),
        table: SourceLists | None = None,
        never: Iterable[int] = (),
        fewest: int = 1,
    ) -> None:
        """Every row may choose from ``base``; with a ``table``, also what the tokens of its source allow.

        ``never`` are tokens that no list has. There are at least ``fewest`` columns, even if no row may choose some.
        """
        self._sources, self._table = sources, table
        self._in_base = np.zeros(vocab_size, bool)
        self._in_base[np.fromiter(base, np.int64)] = True
        self._never = np.fromiter(never, np.int64)
        self._in_base[self._never] = False
        self._fewest = min(fewest, vocab_size)
        self._own: dict[int, Ids] = {}
        self._covered: set[int] = set()
        self._rows: NDArray[np.int64] | None = None  # the source of each row of the mask
        self._mask: Floats | None = None
        self.ids = self._padded(self._in_base)

    @property
    def per_source(self) -> bool:
        """Whether rows have different lists."""
        return self._table is not None

    def own(self, source: int) -> Ids:
        """Return what a source may choose beyond the tokens of all sources."""
        if source not in self._own:
            self._own[source] = self._own_of(source)
        return self._own[source]

    def cover(self, rows: NDArray[np.int64]) -> bool:
        """Let the columns be enough for the sources of these rows [R]; return whether they changed."""
        if self._table is None or (self._rows is not None and np.array_equal(rows, self._rows)):
            return False
        present = set(rows.tolist())
        changed = not present <= self._covered
        if changed:
            # The lists of sources that have left go, too.
            among = self._in_base.copy()
            for source in present:
                among[self.own(source)] = True
            self.ids, self._covered = self._padded(among), present
            self._own = {source: self._own[source] for source in present}
        self._rows, self._mask = rows.copy(), self._masked(rows)
        return changed

    def restrict(self, scores: Floats) -> None:
        """Forbid in place what a row's own list does not have; the rows are those that ``cover`` got."""
        if self._mask is not None:
            np.add(scores, self._mask, out=scores)

    def _own_of(self, source: int) -> Ids:
        if self._table is None:
            return NO_IDS
        ids = self._table.targets_of(np.asarray(self._sources[source], np.int64))
        ids = ids[~self._in_base[ids]]
        return np.setdiff1d(ids, self._never)

    def _masked(self, rows: NDArray[np.int64]) -> Floats:
        """Return what is added to the scores of rows: 0, or -inf where a row must not choose."""
        columns = np.zeros(len(self._in_base), np.int64)
        columns[self.ids] = np.arange(len(self.ids))
        everyone = np.where(self._in_base[self.ids], np.float32(0), NEG_INF)
        mask = np.repeat(everyone[None], len(rows), 0)
        for row, source in zip(mask, rows.tolist(), strict=True):
            row[columns[self.own(source)]] = 0
        return mask

    def _padded(self, among: NDArray[np.bool_]) -> Ids:
        """Return the ids among which a row may choose, in order, and others if they are too few to be compared."""
        missing = self._fewest - int(np.count_nonzero(among))
        if missing > 0 and self.per_source:
            among = among.copy()
            among[np.flatnonzero(~among)[:missing]] = True
        return np.flatnonzero(among)


def shortlists_of(
    options: DecodeOptions,
    spec: ModelSpec,
    sources: Sequence[NDArray[np.generic]] = (),
    table: SourceLists | None = None,
) -> Shortlists | None:
    """Return the lists that options request; None for the whole vocabulary."""
    ends = options.end_ids(spec)
    if options.shortlist is None:
        return None
    if not isinstance(options.shortlist, str):
        return Shortlists([*options.shortlist, *ends], spec.vocab_size)
    if table is None:
        raise ConfigError(
            "shortlist='auto' refused: the bundle has no shortlist; build one: fatdeploy shortlist BUNDLE FILE"
        )
    base = {*table.frequent.tolist(), *ends, *_forced(options)}
    never = {*never_chosen(options)} - {*ends, *_forced(options)}
    fewest = options.n_candidates(spec)
    return Shortlists(base, spec.vocab_size, sources=sources, table=table, never=never, fewest=fewest)


def never_chosen(options: DecodeOptions) -> list[int]:
    """Return the tokens that options forbid at every place."""
    return [*options.suppress_tokens, *(word[0] for word in options.bad_words if len(word) == 1)]


def without_never_chosen(options: DecodeOptions, spec: ModelSpec) -> DecodeOptions:
    """Return options whose processors need not forbid what the lists of sources leave out."""
    kept = {*options.end_ids(spec), *_forced(options)}
    return replace(
        options,
        suppress_tokens=[token for token in options.suppress_tokens if token in kept],
        bad_words=[word for word in options.bad_words if len(word) > 1 or word[0] in kept],
    )


def _forced(options: DecodeOptions) -> list[int]:
    single = [token for token in (options.forced_bos_id, options.forced_eos_id) if token is not None]
    return [*single, *(token for _, token in options.forced_tokens)]


class RowsProduct:
    """The product of an engine that has no faster one: numpy multiplies floats."""

    def __init__(self, engine: Engine[State]) -> None:
        self._engine = engine
        self._rows: Floats | None = None  # [n, M]
        self._bias: Floats | None = None  # [n]
        self._result: Floats = np.empty((0, 0), np.float32)

    def choose(self, ids: Ids) -> None:
        """Multiply with the rows of these ids from now on."""
        self._rows, self._bias = self._engine.output_rows(ids), self._engine.output_bias(ids)

    def __call__(self, hidden: Floats) -> Floats:
        """Return hidden states [R, M] times the chosen rows, plus their bias, [R, n]; valid until the next call."""
        if self._rows is None:
            raise ValueError("no rows were chosen")
        # For one row numpy's library uses another routine, which starts threads at a smaller size: two rows are faster.
        rows = hidden if len(hidden) > 1 else np.repeat(hidden, 2, 0)
        if self._result.shape != (len(rows), len(self._rows)):
            self._result = np.empty((len(rows), len(self._rows)), np.float32)
        multiply(rows, self._rows, self._result)
        if self._bias is not None:
            np.add(self._result, self._bias, out=self._result)
        return self._result[: len(hidden)]


def product_of(engine: Engine[State]) -> OutputProduct | None:
    """Return what multiplies hidden states with rows of an engine's output matrix; None if it has no matrix."""
    if isinstance(engine, Multiplying):
        return engine.output_product()
    return None if engine.output_rows(NO_IDS) is None else RowsProduct(engine)


def multiply(rows: Floats, matrix: Floats, out: Floats) -> None:
    """Write rows [R, M], two or more, times the rows of a matrix [n, M] into an array [R, n], in this thread only.

    For a large product numpy's library would wake its own threads, which wait for cores on which onnxruntime's threads
    spin: 5 ms instead of 0.05 were measured. So the product is cut into small ones. The matrix is used as it was read:
    transposing it takes longer than a few steps.
    """
    width = max(1, IN_ONE_THREAD // rows.size)
    for start in range(0, len(matrix), width):
        part = slice(start, start + width)
        np.matmul(rows, matrix[part].T, out=out[:, part])
