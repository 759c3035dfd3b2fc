"""The decode loop, the only one: a search chooses tokens, an engine of any kind computes them. numpy alone."""

from collections.abc import Sequence
from time import monotonic
from typing import Any, Self

import numpy as np

from fatdeploy.runtimes.closing import ClosedOnExit
from fatdeploy.runtimes.decoding.beams.beam_search import BeamSearch
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis, hypothesis_from_raw
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.chain import processors_of
from fatdeploy.runtimes.decoding.prompts import PrefixIds, prompts_of
from fatdeploy.runtimes.decoding.refilling import Refill, Waiting
from fatdeploy.runtimes.decoding.rows.parallel_search import ParallelSearch
from fatdeploy.runtimes.decoding.rows.row_search import RowSearch
from fatdeploy.runtimes.decoding.scoring import Scorer
from fatdeploy.runtimes.decoding.search import Refillable, Search, Task
from fatdeploy.runtimes.decoding.sources import CheckedSources, SourceIds, checked_sources, padded
from fatdeploy.runtimes.decoding.stops import Stops, TextOf
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Refilling, State, Want
from fatdeploy.runtimes.shortlist.lists import SourceLists, shortlists_of
from fatdeploy.spec import ModelSpec, Tokens


def decode(
    engine: Engine[State],
    sources: Sequence[SourceIds],
    options: DecodeOptions | None = None,
    *,
    prefixes: Sequence[PrefixIds | None] | None = None,
    table: SourceLists | None = None,
) -> list[Hypothesis]:
    """Return the best target of each source; a result does not depend on what else is in the batch."""
    with Decoding(engine, sources, options or DecodeOptions(), prefixes=prefixes, table=table) as decoding:
        return decoding.run()


def task_of(
    spec: ModelSpec,
    sources: Sequence[SourceIds] | CheckedSources,
    options: DecodeOptions,
    *,
    prefixes: Sequence[PrefixIds | None] | None = None,
    text_of: TextOf | None = None,
    table: SourceLists | None = None,
) -> Task:
    """Return what is to be decoded, checked.

    ``prefixes`` are the sources' own: ids in the order of generation, or None for the prefix of the options.
    ``text_of`` turns tokens into text, which stop sequences that are text need. ``table`` is what ``shortlist="auto"``
    reads.
    """
    n_sources = len(sources.rows if isinstance(sources, CheckedSources) else sources)
    prompts = prompts_of(options, spec, prefixes, n_sources)
    checked = checked_sources(sources, spec)
    stops = Stops(options, text_of, [prompt.prefix for prompt in prompts])
    return Task(options, spec, checked.rows, prompts, stops, table)


def refills(engine: Engine[Any], task: Task) -> bool:
    """Whether sources of a task can take the places of finished ones while others go on."""
    return (
        isinstance(engine, Refilling)
        and engine.refills
        and task.spec.decoding == "autoregressive"
        and all(processor.ragged for processor in processors_of(task))
    )


class Decoding(ClosedOnExit):
    """One batch being decoded, step by step; closing it returns the state to the engine at once.

    ``prefixes``, ``text_of`` and ``table`` are those of ``task_of``. ``deadline`` is a time of the monotonic clock; the
    default follows from ``timeout_s``.
    """

    def __init__(
        self,
        engine: Engine[Any],
        sources: Sequence[SourceIds] | CheckedSources,
        options: DecodeOptions,
        *,
        prefixes: Sequence[PrefixIds | None] | None = None,
        deadline: float | None = None,
        text_of: TextOf | None = None,
        table: SourceLists | None = None,
    ) -> None:
        task = task_of(engine.spec, sources, options, prefixes=prefixes, text_of=text_of, table=table)
        if deadline is None and options.timeout_s is not None:
            deadline = monotonic() + options.timeout_s
        self._begin(engine, task, range(len(task.sources)), deadline)

    @classmethod
    def of_task(
        cls,
        engine: Engine[Any],
        task: Task,
        first: Sequence[int],
        *,
        deadline: float | None = None,
        waiting: Waiting | None = None,
    ) -> Self:
        """Return a decode of some sources of a task, and of those that wait for their places if it ``refills``."""
        decoding = cls.__new__(cls)
        if waiting is None:
            task, first = task.part(first), range(len(first))
        decoding._begin(engine, task, first, deadline, waiting)
        return decoding

    def _begin(
        self,
        engine: Engine[Any],
        task: Task,
        first: Sequence[int],
        deadline: float | None,
        waiting: Waiting | None = None,
    ) -> None:
        self._engine, self._task, self._deadline = engine, task, deadline
        self._arrivals = list(first)
        # The last token of a target is never read.
        self._state = self._encoded(first, int(task.ends.max()) - 1)
        self._owns_state = True
        self._tokens: Tokens | None = None
        self._refill: Refill | None = None
        try:
            self._search = self._chosen_search() if waiting is None else self._refilled_search(waiting)
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def arrivals(self) -> Sequence[int]:
        """The sources of the task that have begun, in the order of ``results``."""
        return self._arrivals

    def run(self) -> list[Hypothesis]:
        """Make all steps and return the result of each source."""
        while self.advance():
            pass
        return self.results()

    def advance(self) -> bool:
        """Make one step; False when decoding is complete or the deadline has passed."""
        if self._tokens is None or (self._deadline is not None and monotonic() >= self._deadline):
            return False
        move = self._search.advance(self._engine.step(self._tokens, self._state, self._search.want))
        if move is not None and move.parents is not None:
            self._engine.reorder(self._state, move.parents)
        if move is not None and self._refill is not None:
            move, newcomers = self._refill.refilled(self._state, move)
            self._arrivals += newcomers
        self._tokens = None if move is None else move.tokens
        return move is not None

    def tokens_so_far(self, source: int = 0) -> tuple[int, ...]:
        """Return a source's tokens so far in the order of generation, including the prefix."""
        return (*self._task.prompts[source].prefix, *self._search.tokens_so_far(source))

    def results(self) -> list[Hypothesis]:
        """Return the result of each source that has begun; unfinished ones are cancelled."""
        return [
            hypothesis_from_raw(targets, self._task.prompts[source].prefix, self._engine.spec)
            for source, targets in zip(self._arrivals, self._search.results(), strict=True)
        ]

    def close(self) -> None:
        """Return the state to the engine."""
        if self._refill is not None:
            self._refill.close()
        if self._owns_state:
            self._owns_state = False
            self._engine.release(self._state)

    def _encoded(self, sources: Sequence[int], positions: int) -> Any:
        """Return the state of sources of the task that has room for a number of target positions."""
        spec = self._engine.spec
        source, mask = padded(CheckedSources([self._task.sources[index] for index in sources]), spec)
        return self._engine.encode(source, mask, Capacity(self._task.options.rows_per_source(spec), positions))

    def _start(self) -> None:
        """Read all but the last of the search's first tokens."""
        move = self._search.start()
        self._tokens = move.tokens
        if self._engine.spec.decoding == "autoregressive" and move.tokens.shape[1] > 1:
            # One call that skips the vocabulary: nobody needs the logits inside the prefix. A row per source reads it.
            want = Want.HIDDEN if self._engine.spec.hidden else Want.LOGITS
            rows = slice(None) if move.parents is None else np.flatnonzero(np.diff(move.parents, prepend=-1))
            self._engine.step(np.ascontiguousarray(move.tokens[rows, :-1]), self._state, want)
            self._tokens = np.ascontiguousarray(move.tokens[:, -1:])
        if move.parents is not None:
            self._engine.reorder(self._state, move.parents)

    def _chosen_search(self) -> Search:
        spec, task = self._engine.spec, self._task
        if spec.decoding == "parallel":
            length_log_probs = self._engine.length_log_probs(self._state) if spec.length == "head" else None
            return ParallelSearch(task, length_log_probs)
        return (RowSearch if task.options.num_beams == 1 else BeamSearch)(task, self._scorer())

    def _refilled_search(self, waiting: Waiting) -> Refillable:
        if not isinstance(self._engine, Refilling):
            raise TypeError(f"{type(self._engine).__name__} cannot replace finished sources")
        kind = RowSearch if self._task.options.num_beams == 1 else BeamSearch
        search: Refillable = kind(self._task, self._scorer(), self._arrivals)
        self._refill = Refill(self._engine, search, waiting, len(self._arrivals), lambda new: self._encoded(new, 1))
        return search

    def _scorer(self) -> Scorer:
        task = self._task
        lists = shortlists_of(task.options, task.spec, task.sources, task.table)
        return Scorer(self._engine, task.options, processors_of(task), lists)
