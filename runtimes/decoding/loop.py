"""The decode loop, the only one: a search chooses tokens, an engine of any kind computes them. numpy alone."""

from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np

from fatdeploy.runtimes.closing import ClosedOnExit
from fatdeploy.runtimes.decoding.beams.beam_search import BeamSearch
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis, hypothesis_from_raw
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.parallel_search import ParallelSearch
from fatdeploy.runtimes.decoding.processors.chain import processors_of
from fatdeploy.runtimes.decoding.prompts import PrefixIds, prompts_of
from fatdeploy.runtimes.decoding.row_search import RowSearch
from fatdeploy.runtimes.decoding.scoring import Scorer
from fatdeploy.runtimes.decoding.search import Search, Task
from fatdeploy.runtimes.decoding.sources import CheckedSources, SourceIds, checked_sources, padded
from fatdeploy.runtimes.decoding.stops import Stops, TextOf
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, State, Want
from fatdeploy.runtimes.shortlist.lists import SourceLists, shortlists_of
from fatdeploy.spec import Tokens


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


class Decoding(ClosedOnExit):
    """One batch being decoded, step by step; closing it returns the state to the engine at once.

    ``prefixes`` are the sources' own: ids in the order of generation, or None for the prefix of the options.
    ``deadline`` is a time of the monotonic clock; the default follows from ``timeout_s``. ``text_of`` turns tokens into
    text, which stop sequences that are text need. ``table`` is what ``shortlist="auto"`` reads.
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
        n_sources = len(sources.rows if isinstance(sources, CheckedSources) else sources)
        prompts = prompts_of(options, engine.spec, prefixes, n_sources)
        checked = checked_sources(sources, engine.spec)
        self._engine, self._options = engine, options
        stops = Stops(options, text_of, [prompt.prefix for prompt in prompts])
        self._task = Task(options, engine.spec, checked.rows, prompts, stops, table)
        self._deadline = deadline
        if deadline is None and options.timeout_s is not None:
            self._deadline = monotonic() + options.timeout_s
        # The last token of a target is never read.
        positions = max(prompt.end for prompt in prompts) - 1
        source, mask = padded(checked, engine.spec)
        self._state = engine.encode(source, mask, Capacity(options.rows_per_source(engine.spec), positions))
        self._owns_state = True
        self._tokens: Tokens | None = None
        try:
            self._search = self._started_search()
        except BaseException:
            self.close()
            raise

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
        if move is None:
            self._tokens = None
            return False
        if move.parents is not None:
            self._engine.reorder(self._state, move.parents)
        self._tokens = move.tokens
        return True

    def tokens_so_far(self, source: int = 0) -> tuple[int, ...]:
        """Return a source's tokens so far in the order of generation, including the prefix."""
        return (*self._task.prompts[source].prefix, *self._search.tokens_so_far(source))

    def results(self) -> list[Hypothesis]:
        """Return the result of each source; unfinished ones are cancelled."""
        return [
            hypothesis_from_raw(targets, prompt.prefix, self._engine.spec)
            for targets, prompt in zip(self._search.results(), self._task.prompts, strict=True)
        ]

    def close(self) -> None:
        """Return the state to the engine."""
        if self._owns_state:
            self._owns_state = False
            self._engine.release(self._state)

    def _started_search(self) -> Search:
        """Return the search for the options, after reading all but the last of its first tokens."""
        search = self._chosen_search()
        move = search.start()
        if move.parents is not None:
            self._engine.reorder(self._state, move.parents)
        self._tokens = move.tokens
        if self._engine.spec.decoding == "autoregressive" and move.tokens.shape[1] > 1:
            # One call that skips the vocabulary: nobody needs the logits inside the prefix.
            want = Want.HIDDEN if self._engine.spec.hidden else Want.LOGITS
            self._engine.step(np.ascontiguousarray(move.tokens[:, :-1]), self._state, want)
            self._tokens = np.ascontiguousarray(move.tokens[:, -1:])
        return search

    def _chosen_search(self) -> Search:
        spec, task = self._engine.spec, self._task
        if spec.decoding == "parallel":
            length_log_probs = self._engine.length_log_probs(self._state) if spec.length == "head" else None
            return ParallelSearch(task, length_log_probs)
        lists = shortlists_of(task.options, spec, task.sources, task.table)
        scorer = Scorer(self._engine, task.options, processors_of(task), lists)
        return RowSearch(task, scorer) if self._options.num_beams == 1 else BeamSearch(task, scorer)
