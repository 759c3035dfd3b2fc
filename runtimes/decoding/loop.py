"""The decode loop, the only one: a search chooses tokens, an engine of any kind computes them. numpy alone."""

from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import SpecMismatch, in_one_line
from fatdeploy.runtimes.decoding.beam_search import BeamSearch
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis, hypothesis_from_raw
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.parallel_search import ParallelSearch
from fatdeploy.runtimes.decoding.scoring import Scorer
from fatdeploy.runtimes.decoding.search import RowSearch, Search, Task
from fatdeploy.runtimes.decoding.stops import Stops, TextOf
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, State, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

Source = Sequence[int] | NDArray[np.generic]


def decode(engine: Engine[State], sources: Sequence[Source], options: DecodeOptions | None = None) -> list[Hypothesis]:
    """Return the best target of each source; a result does not depend on what else is in the batch."""
    with Decoding(engine, sources, options or DecodeOptions()) as one:
        while one.advance():
            pass
        return one.found()


class Decoding:
    """One batch being decoded, a step at a time; closing it gives the engine's state back at once.

    ``deadline`` is a time of the monotonic clock; without one it follows from ``timeout_s``. ``text_of`` turns tokens
    into text where stop sequences are text.
    """

    def __init__(
        self,
        engine: Engine[Any],
        sources: Sequence[Source],
        options: DecodeOptions,
        *,
        deadline: float | None = None,
        text_of: TextOf | None = None,
    ) -> None:
        limit = options.limit(engine.spec)
        source, mask = padded(sources, engine.spec)
        self._engine, self._options = engine, options
        rows = [row_of(one) for one in sources]
        self._task = Task(options, engine.spec, rows, limit, Stops(options, text_of))
        self._deadline = deadline
        if deadline is None and options.timeout_s is not None:
            self._deadline = monotonic() + options.timeout_s
        positions = len(options.prefix_ids) + limit
        self._state = engine.encode(source, mask, Capacity(options.rows_per_source(engine.spec), positions))
        self._held = True
        self._tokens: Tokens | None = None
        try:
            self._search = self._started_search()
        except BaseException:
            self.close()
            raise

    def advance(self) -> bool:
        """Make one step; False when all is said, or the deadline is past."""
        if self._tokens is None or (self._deadline is not None and monotonic() >= self._deadline):
            return False
        move = self._search.advance(self._engine.step(self._tokens, self._state, self._search.want))
        if move is None:
            self._tokens = None
            return False
        if move.parents is not None:
            self._engine.reorder(self._state, move.parents)
        self._tokens = move.tokens
        return True

    def said(self, source: int = 0) -> tuple[int, ...]:
        """Return a source's tokens so far, in the order of generation, the prefix included."""
        return (*self._options.prefix_ids, *self._search.said(source))

    def found(self) -> list[Hypothesis]:
        """Return the result of each source; those that are not finished are cancelled."""
        prefix, spec = self._options.prefix_ids, self._engine.spec
        return [hypothesis_from_raw(said, prefix, spec) for said in self._search.found()]

    def close(self) -> None:
        """Give the state back."""
        if self._held:
            self._held = False
            self._engine.release(self._state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _started_search(self) -> Search:
        """Return the search that the options ask for, with all but the last of its first tokens read."""
        search = self._chosen_search()
        move = search.start()
        if move.parents is not None:
            self._engine.reorder(self._state, move.parents)
        self._tokens = move.tokens
        if self._engine.spec.decoding == "autoregressive" and move.tokens.shape[1] > 1:
            # In one call, which computes no vocabulary: nobody asks what would follow inside of the prefix.
            want = Want.HIDDEN if self._engine.spec.hidden else Want.LOGITS
            self._engine.step(np.ascontiguousarray(move.tokens[:, :-1]), self._state, want)
            self._tokens = np.ascontiguousarray(move.tokens[:, -1:])
        return search

    def _chosen_search(self) -> Search:
        spec, task = self._engine.spec, self._task
        if spec.decoding == "parallel":
            head = self._engine.length_log_probs(self._state) if spec.length == "head" else None
            return ParallelSearch(task, head)
        scorer = Scorer(self._engine, self._options)
        return RowSearch(task, scorer) if self._options.num_beams == 1 else BeamSearch(task, scorer)


def padded(sources: Sequence[Source], spec: ModelSpec) -> tuple[Tokens, Mask]:
    """Return sources of any lengths as ids [B, S] and mask, padded on the right; refuse those that cannot be read."""
    rows = [row_of(source) for source in sources]
    check_sources(rows, spec)
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    if min(lengths) == longest:
        return np.array(rows, np.int64), np.ones((len(rows), longest), bool)
    mask = np.arange(longest) < np.array(lengths)[:, None]
    ids = np.full(mask.shape, spec.pad_id, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def row_of(source: Source) -> NDArray[np.generic]:
    """Return a source as an array, whatever is in it: what is wrong with it is said of all sources at once."""
    try:
        return np.asarray(source)
    except ValueError:  # lists of different lengths
        return np.asarray(source, object)


def check_sources(rows: Sequence[NDArray[np.generic]], spec: ModelSpec) -> None:
    """Raise, with every reason, unless the model can read all sources."""
    reasons = [f"source {index}: {reason}" for index, row in enumerate(rows) if (reason := wrong_source(row, spec))]
    if not rows:
        reasons.append("no source given")
    if reasons:
        raise SpecMismatch(in_one_line("cannot decode", reasons))


def wrong_source(row: NDArray[np.generic], spec: ModelSpec) -> str:
    """Return why ids are no source of the model; empty if they are one."""
    if row.ndim != 1:
        return f"expected one axis of ids, found shape {row.shape}"
    if not row.size:
        return "is empty"
    if row.dtype.kind not in "iu":
        return f"ids must be integers, found {row.dtype}"
    if len(row) > spec.max_source:
        return f"has {len(row)} tokens, more than max_source = {spec.max_source} (truncate=True, --truncate: cut it)"
    wrong = [int(token) for token in row.tolist() if not 0 <= token < spec.vocab_size]
    return f"ids must lie in 0…{spec.vocab_size - 1}, found {wrong[0]}" if wrong else ""
