"""Greedy decoding and sampling: rows that do not depend on each other."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import Finish, RawTarget
from fatdeploy.runtimes.decoding.processors.protocol import History, rectangular
from fatdeploy.runtimes.decoding.rows.row_targets import RowTargets
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.decoding.scoring import Scorer, check_something_is_left
from fatdeploy.runtimes.decoding.search import ALL, Move, Selection, Task, stays
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import Tokens


class RowSearch:
    """Greedy decoding and sampling: one row per target, and every row is independent.

    A row that is still inside its prompt reads that instead of a token of its choice. All rows are at the same place
    until a source joins.
    """

    def __init__(self, task: Task, scorer: Scorer, first: Sequence[int] | None = None) -> None:
        self.task, self.scorer = task, scorer
        self._awaits = first is not None
        self._first = range(len(task.sources)) if first is None else first
        self.sampler = Sampler(task.options) if task.options.sample else None
        self.targets = RowTargets(task, self._first, self.sampler)
        self.rows_per_source = task.options.num_return_sequences
        n_rows = len(self.targets.tokens)
        self._read: Tokens | None = None  # tokens of the rows that are left, for processors
        self._eos_ids = frozenset(task.eos_ids)
        begins, ends = self.targets.begins, self.targets.ends
        self._last_begin = int(begins.max())
        self._first_end = int(ends.min())
        # The column that is written next: of all rows, or of each row of the engine. Finished rows then write the first
        # column again and again: nothing reads it.
        self.place: int | NDArray[np.int64] = int(begins.min())
        self.rows = np.arange(n_rows)  # the slot that each row of the engine writes
        self.running = np.ones(n_rows, bool)  # whether each row of the engine is unfinished
        self.n_running = n_rows

    @property
    def want(self) -> Want:
        """The logits, or the hidden state that a shortlist multiplies."""
        return self.scorer.want

    def start(self) -> Move:
        """Return what all prompts have room for, the same for all samples of a source."""
        return self.task.first_move(self._first, self.rows_per_source)

    def advance(self, out: StepOut) -> Move | None:
        """Choose a token for each row; finished sources leave the batch when that pays."""
        rows = self._choosing()
        chosen = self._chosen(out, rows)
        if out.attention is not None:
            mean = out.attention[:, :, -1].mean(1)
            self.targets.align(self.rows, self.place, mean)
        # A slice costs a third of what the list of all rows costs.
        self.targets.tokens[ALL if self._all_at_one_place else self.rows, self.place] = chosen
        self.place = self.place + 1 if isinstance(self.place, int) else self.place + self.running
        before = self.running.copy() if self._rests else None
        n_before = self.n_running
        self._finish(chosen, rows)
        if not self.n_running and not self._awaits:
            return None
        ended = self.n_running < n_before
        return self._move(chosen, None if before is None or not ended else before & ~self.running, ended=ended)

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the new tokens of a source's first row so far."""
        return self.results()[source][0].tokens

    def results(self) -> list[list[RawTarget]]:
        """Return each source's targets, samples in the order in which they were drawn."""
        lengths = np.zeros(len(self.targets.tokens), np.int64)
        lengths[self.rows] = self.place
        return self.targets.results(lengths)

    def expect_no_more(self) -> None:
        """Let finished sources leave from now on."""
        self._awaits = False

    def free_places(self) -> Rows:
        """Return the places of finished sources."""
        return np.flatnonzero(~self._alive())

    def join(self, move: Move, places: Rows, sources: Sequence[int]) -> Move:
        """Let sources begin at the places of finished ones."""
        count = self.rows_per_source
        for place, source in zip(places.tolist(), sources, strict=True):
            self.targets.replace(place, source)
        if isinstance(self.place, int):
            self.place = self.place * self.running
        rows = (places[:, None] * count + np.arange(count)).ravel()
        self.place[rows], self.running[rows] = 1, True
        self.n_running += len(rows)
        tokens = move.tokens.copy()
        tokens[rows] = self.targets.tokens[rows, :1]
        return replace(move, tokens=tokens, resting=np.flatnonzero(~self.running))

    @property
    def _all_at_one_place(self) -> bool:
        return isinstance(self.place, int) and len(self.rows) == len(self.targets.tokens)

    @property
    def _rests(self) -> bool:
        """Whether rows may stay for longer than a target: sources come or came in the course of decoding."""
        return self._awaits or not isinstance(self.place, int)

    def _alive(self) -> NDArray[np.bool_]:
        """Return for each source of the engine whether it is unfinished."""
        count = self.rows_per_source
        alive: NDArray[np.bool_] = np.logical_or.reduce(self.running.reshape(len(self.rows) // count, count), 1)
        return alive

    def _choosing(self) -> Selection:
        """Return the rows that choose a token; the others are still inside their prompts."""
        if isinstance(self.place, int) and self.place >= self._last_begin:
            return ALL
        begun = self.targets.begins[self.rows] <= self.place
        return ALL if begun.all() else np.flatnonzero(self.running & begun)

    def _chosen(self, out: StepOut, rows: Selection) -> Tokens:
        """Return the next token of every row, and record the log-probabilities of those that chose."""
        if not isinstance(rows, slice) and not len(rows):
            prompted: Tokens = self.targets.tokens[self.rows, self.place]
            return prompted
        scores = self._scores(out, rows)
        columns = scores.argmax(-1)
        # The arg-max of NaNs is the first of them, which is hardly ever EOS: such a row reaches the limit.
        if self.scorer.processors or self.sampler is not None or self._at_an_end(1):
            self._check(scores[np.arange(len(scores)), columns], rows)
        if self.sampler is not None:
            columns = self._drawn(scores, self.sampler, rows)
        if self.targets.log_probs is not None:
            place = self.place if isinstance(self.place, int) else self.place[rows]
            self.targets.log_probs[self.rows[rows], place] = self.scorer.log_probs_of(scores, columns)
        chosen: Tokens = columns if self.scorer.ids is None else self.scorer.ids[columns]
        if isinstance(rows, slice):
            return chosen
        tokens: Tokens = self.targets.tokens[self.rows, self.place]
        tokens[rows] = chosen
        return tokens

    def _scores(self, out: StepOut, rows: Selection) -> Floats:
        """Return the scores of the rows that choose."""
        sources = self.targets.sources[self.rows]
        scores = self.scorer.logits(out, sources)[rows]
        return self.scorer.processed(scores, self._history(rows, sources[rows])) if self.scorer.processors else scores

    def _history(self, rows: Selection, sources: NDArray[np.int64]) -> History:
        """Return what rows of the engine have read; ``sources`` are those of the rows."""
        if isinstance(self.place, int):
            return rectangular(self._read_tokens(self.place)[rows], sources)
        lengths = np.maximum(self.place, 1)
        return History(self._read_tokens(int(lengths.max()))[rows], lengths[rows], sources)

    def _read_tokens(self, length: int) -> Tokens:
        """Return the first tokens of each row of the engine."""
        tokens = self.targets.tokens
        if len(self.rows) == len(tokens):
            return tokens[:, :length]
        if self._read is None:
            self._read = np.empty_like(tokens)
        # The rows are within range; in its checking mode numpy would make a copy first.
        np.take(tokens, self.rows, 0, out=self._read[: len(self.rows)], mode="clip")
        return self._read[: len(self.rows), :length]

    def _at_an_end(self, distance: int = 0) -> bool:
        """Whether the limit of a row is reached, or this near; it may be a finished row's."""
        if isinstance(self.place, int):
            return self.place + distance >= self._first_end
        return bool((self.place + distance == self.targets.ends[self.rows]).any())

    def _check(self, best: Floats, rows: Selection) -> None:
        """Raise if nothing is left to choose; finished rows are left out, as processors may forbid all their tokens."""
        running = self.running[rows]
        lengths = np.broadcast_to(self.place, self.rows.shape)[rows] - self.targets.begins[self.rows[rows]]
        check_something_is_left(best[running], lengths[running])

    def _drawn(self, scores: Floats, sampler: Sampler, rows: Selection) -> NDArray[np.int64]:
        columns = np.zeros(len(scores), np.int64)
        slots, generators = self.rows[rows].tolist(), self.targets.generators
        for row in np.flatnonzero(self.running[rows]).tolist():
            columns[row] = sampler.column(scores[row], generators[slots[row]])
        return columns

    def _finish(self, chosen: Tokens, rows: Selection) -> None:
        # Sets are faster than arrays for a few tokens.
        if not self._eos_ids.isdisjoint(chosen.tolist()):
            self._end(self._chose(np.isin(chosen, self.task.eos_ids) & self.running, rows), "eos", 1)
        if self.task.stops:
            self._stop(rows)
        if self._at_an_end():
            self._end(np.flatnonzero((self.targets.ends[self.rows] == self.place) & self.running), "length", 0)

    def _chose(self, which: NDArray[np.bool_], rows: Selection) -> Rows:
        """Return the rows among ``which`` whose last token was of their choice: EOS in a prompt ends nothing."""
        return np.flatnonzero(which) if isinstance(rows, slice) else rows[which[rows]]

    def _lengths(self, rows: Rows) -> list[int]:
        """Return how many tokens rows have, including those of their prompts."""
        return [self.place] * len(rows) if isinstance(self.place, int) else self.place[rows].tolist()

    def _stop(self, rows: Selection) -> None:
        stops, targets = self.task.stops, self.targets
        running = self._chose(self.running, rows)
        for row, length in zip(running.tolist(), self._lengths(running), strict=True):
            slot, begin = int(self.rows[row]), 1 if stops.reach is None else max(1, length - stops.reach)
            cut = stops.cut(targets.tokens[slot, begin:length].tolist(), int(targets.sources[slot]))
            if cut is not None:
                self._end(np.array([row]), "stop", cut)

    def _end(self, rows: Rows, finish: Finish, dropped: int) -> None:
        """End rows that lose a number of their last tokens."""
        self.running[rows] = False
        self.n_running -= len(rows)
        for slot, length in zip(self.rows[rows].tolist(), self._lengths(rows), strict=True):
            self.targets.end(slot, finish, length - dropped)
        if not isinstance(self.place, int):
            self.place[rows] = 0

    def _move(self, chosen: Tokens, resting: NDArray[np.bool_] | None, *, ended: bool) -> Move:
        """Return what the rows read next; sources can leave only when a row has just ended."""
        if self.n_running < len(self.rows):
            chosen[~self.running] = self.task.spec.pad_id
        count = self.rows_per_source
        if self._awaits or not ended or stays(alive := self._alive()):
            return Move(chosen[:, None], resting=None if resting is None else np.flatnonzero(resting))
        kept = np.flatnonzero(np.repeat(alive, count))
        self.rows, self.running = self.rows[kept], self.running[kept]
        if not isinstance(self.place, int):
            self.place = self.place[kept]
        resting = None if resting is None else resting[kept]
        return Move(chosen[kept, None], kept, None if resting is None else np.flatnonzero(resting))
