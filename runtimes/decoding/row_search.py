"""Greedy decoding and sampling: rows that do not depend on each other."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import Finish, RawTarget
from fatdeploy.runtimes.decoding.processors.protocol import History
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.decoding.scoring import Scorer, check_something_is_left
from fatdeploy.runtimes.decoding.search import Move, Task, stays
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import Tokens


class RowSearch:
    """Greedy decoding and sampling: one row per target, and every row is independent."""

    def __init__(self, task: Task, scorer: Scorer) -> None:
        self.task, self.scorer = task, scorer
        options = task.options
        self.rows_per_source = options.num_return_sequences
        n_rows = len(task.sources) * self.rows_per_source
        self.sampler = Sampler(options, task.sources) if options.sample else None
        self.tokens = np.full((n_rows, len(task.prompt) + task.limit), task.spec.pad_id, np.int64)
        self.tokens[:, : len(task.prompt)] = task.prompt
        self._read: Tokens | None = None  # tokens of the rows that are left, for processors
        self._eos_ids = frozenset(task.eos_ids)
        self.length = 0  # new tokens
        self.kept = [0] * n_rows  # new tokens that count, per finished row
        self.finishes: list[Finish] = ["cancelled"] * n_rows
        self.rows = np.arange(n_rows)  # the target that each row of the engine writes
        self.running = np.ones(n_rows, bool)  # whether each row of the engine is unfinished
        self.n_running = n_rows
        self.log_probs = np.zeros((n_rows, task.limit), np.float32) if options.scores else None
        self.alignments: Floats | None = None

    @property
    def want(self) -> Want:
        """The logits, or the hidden state that a shortlist multiplies."""
        return self.scorer.want

    def start(self) -> Move:
        """Return BOS and the prefix, one row per source."""
        return Move(self.tokens[:: self.rows_per_source, : len(self.task.prompt)].copy())

    def advance(self, out: StepOut) -> Move | None:
        """Choose a token for each row; finished sources leave the batch when that pays."""
        scores = self._scores(out)
        columns = scores.argmax(-1)
        # The arg-max of NaNs is the first of them, which is hardly ever EOS: such a row reaches the limit.
        if self.scorer.processors or self.sampler is not None or self.length + 1 == self.task.limit:
            # Finished rows are left out: processors may forbid every token of theirs.
            check_something_is_left(scores[np.arange(len(scores)), columns][self.running], self.length)
        if self.sampler is not None:
            columns = self._drawn(scores, self.sampler)
        chosen = columns if self.scorer.ids is None else self.scorer.ids[columns]
        self._write(chosen, scores, columns, out.attention)
        n_before = self.n_running
        self._finish(chosen)
        return self._move(chosen, ended=self.n_running < n_before) if self.n_running else None

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the new tokens of a source's first row so far."""
        return self._target(source * self.rows_per_source).tokens

    def results(self) -> list[list[RawTarget]]:
        """Return each source's targets, samples in the order in which they were drawn."""
        targets = [self._target(row) for row in range(len(self.finishes))]
        return [targets[start : start + self.rows_per_source] for start in range(0, len(targets), self.rows_per_source)]

    def _scores(self, out: StepOut) -> Floats:
        scores = self.scorer.logits(out)
        if self.scorer.processors:
            scores = self.scorer.processed(scores, self._history())
        repeated = self.length == 0 and self.rows_per_source > 1
        return np.repeat(scores, self.rows_per_source, 0) if repeated else scores

    def _history(self) -> History:
        """Return what the rows of the engine have read."""
        if self.length == 0:
            # One row per source so far, however many samples there will be.
            return History(self.tokens[:: self.rows_per_source, : self._place], np.arange(len(self.task.sources)))
        return History(self._read_tokens(), self.rows // self.rows_per_source)

    def _read_tokens(self) -> Tokens:
        if self._all_are_left:
            return self.tokens[:, : self._place]
        if self._read is None:
            self._read = np.empty_like(self.tokens)
        # The rows are within range; in its checking mode numpy would make a copy first.
        np.take(self.tokens, self.rows, 0, out=self._read[: len(self.rows)], mode="clip")
        return self._read[: len(self.rows), : self._place]

    @property
    def _all_are_left(self) -> bool:
        return len(self.rows) == len(self.tokens)

    def _drawn(self, scores: Floats, sampler: Sampler) -> NDArray[np.int64]:
        columns = np.zeros(len(scores), np.int64)
        for row in np.flatnonzero(self.running).tolist():
            columns[row] = sampler.column(scores[row], int(self.rows[row]))
        return columns

    @property
    def _place(self) -> int:
        """The column that is written next."""
        return len(self.task.prompt) + self.length

    def _write(self, chosen: Tokens, scores: Floats, columns: NDArray[np.int64], attention: Floats | None) -> None:
        """Record the chosen tokens; nothing reads those of finished rows."""
        # A slice costs a third of what the list of all rows costs.
        self.tokens[slice(None) if self._all_are_left else self.rows, self._place] = chosen
        if self.log_probs is not None:
            self.log_probs[self.rows, self.length] = self.scorer.log_probs_of(scores, columns)
        if attention is not None:
            mean = attention[:, :, -1].mean(1)
            if self.alignments is None:
                self.alignments = np.zeros((len(self.finishes), self.task.limit, mean.shape[-1]), np.float32)
            self.alignments[self.rows, self.length] = np.repeat(mean, len(self.rows) // len(mean), 0)
        self.length += 1

    def _finish(self, chosen: Tokens) -> None:
        # Sets are faster than arrays for a few tokens.
        if not self._eos_ids.isdisjoint(chosen.tolist()):
            self._end(np.flatnonzero(np.isin(chosen, self.task.eos_ids) & self.running), "eos", self.length - 1)
        if self.task.stops:
            self._stop()
        if self.length == self.task.limit:
            self._end(np.flatnonzero(self.running), "length", self.length)

    def _stop(self) -> None:
        stops = self.task.stops
        begin = 1 if stops.reach is None else max(1, self._place - stops.reach)
        for row in np.flatnonzero(self.running).tolist():
            cut = stops.cut(self.tokens[self.rows[row], begin : self._place].tolist())
            if cut is not None:
                self._end(np.array([row]), "stop", max(0, self.length - cut))

    def _end(self, rows: Rows, finish: Finish, kept: int) -> None:
        self.running[rows] = False
        self.n_running -= len(rows)
        for row in self.rows[rows].tolist():
            self.finishes[row], self.kept[row] = finish, kept

    def _move(self, chosen: Tokens, *, ended: bool) -> Move:
        """Return what the rows read next; sources can leave only when a row has just ended."""
        if self.n_running < len(self.rows):
            chosen[~self.running] = self.task.spec.pad_id
        count = self.rows_per_source
        n_sources = len(self.rows) // count
        parents = np.repeat(np.arange(n_sources), count) if self.length == 1 and count > 1 else None
        if not ended:
            return Move(chosen[:, None], parents)
        alive: NDArray[np.bool_] = np.logical_or.reduce(self.running.reshape(n_sources, count), 1)
        if stays(alive):
            return Move(chosen[:, None], parents)
        kept = np.flatnonzero(np.repeat(alive, count))
        self.rows, self.running = self.rows[kept], self.running[kept]
        return Move(chosen[kept, None], kept if parents is None else parents[kept])

    def _source_length(self, row: int) -> int:
        return len(self.task.sources[row // self.rows_per_source])

    def _target(self, row: int) -> RawTarget:
        finish = self.finishes[row]
        kept = self.length if finish == "cancelled" else self.kept[row]
        begin = len(self.task.prompt)
        counted = kept + (finish == "eos")
        log_probs = None if self.log_probs is None else self.log_probs[row]
        return RawTarget(
            tuple(self.tokens[row, begin : begin + kept].tolist()),
            finish,
            score=None if log_probs is None else float(log_probs[:counted].sum()),
            log_probs=None if log_probs is None else tuple(log_probs[:kept].tolist()),
            alignments=None if self.alignments is None else self.alignments[row, :kept, : self._source_length(row)],
        )
