"""Greedy decoding and sampling: rows that do not depend on each other."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import Finish, RawTarget
from fatdeploy.runtimes.decoding.processors.protocol import rectangular
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.decoding.scoring import Scorer, check_something_is_left
from fatdeploy.runtimes.decoding.search import ALL, Move, Selection, Task, stays
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import Tokens


class RowSearch:
    """Greedy decoding and sampling: one row per target, and every row is independent.

    All rows are at the same place. A row that is still inside its prompt reads that instead of a token of its choice.
    """

    def __init__(self, task: Task, scorer: Scorer) -> None:
        self.task, self.scorer = task, scorer
        options = task.options
        self.rows_per_source = options.num_return_sequences
        n_rows = len(task.sources) * self.rows_per_source
        self.sampler = Sampler(options, task.sources) if options.sample else None
        self.begins, self.ends = (np.repeat(places, self.rows_per_source) for places in (task.begins, task.ends))
        self.tokens: Tokens = np.full((n_rows, int(self.ends.max())), task.spec.pad_id, np.int64)
        for source, prompt in enumerate(task.prompts):
            rows = slice(source * self.rows_per_source, (source + 1) * self.rows_per_source)
            self.tokens[rows, : len(prompt.tokens)] = prompt.tokens
        self._read: Tokens | None = None  # tokens of the rows that are left, for processors
        self._eos_ids = frozenset(task.eos_ids)
        self.place = self._first_begin = int(self.begins.min())  # the column that is written next
        self._last_begin, self._first_end = int(self.begins.max()), int(self.ends.min())
        self.kept = [0] * n_rows  # new tokens that count, per finished row
        self.finishes: list[Finish] = ["cancelled"] * n_rows
        self.rows = np.arange(n_rows)  # the target that each row of the engine writes
        self.running = np.ones(n_rows, bool)  # whether each row of the engine is unfinished
        self.n_running = n_rows
        self.log_probs = np.zeros(self.tokens.shape, np.float32) if options.scores else None
        self.alignments: Floats | None = None

    @property
    def want(self) -> Want:
        """The logits, or the hidden state that a shortlist multiplies."""
        return self.scorer.want

    def start(self) -> Move:
        """Return what all prompts have room for, one row per source."""
        return Move(self.task.first_tokens())

    def advance(self, out: StepOut) -> Move | None:
        """Choose a token for each row; finished sources leave the batch when that pays."""
        rows = self._choosing()
        chosen = self._chosen(out, rows)
        if out.attention is not None:
            self._align(out.attention)
        # A slice costs a third of what the list of all rows costs.
        self.tokens[ALL if self._all_are_left else self.rows, self.place] = chosen
        self.place += 1
        n_before = self.n_running
        self._finish(chosen, rows)
        return self._move(chosen, ended=self.n_running < n_before) if self.n_running else None

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the new tokens of a source's first row so far."""
        return self._target(source * self.rows_per_source).tokens

    def results(self) -> list[list[RawTarget]]:
        """Return each source's targets, samples in the order in which they were drawn."""
        targets = [self._target(row) for row in range(len(self.finishes))]
        return [targets[start : start + self.rows_per_source] for start in range(0, len(targets), self.rows_per_source)]

    @property
    def _is_first(self) -> bool:
        """Whether the engine has one row per source, however many samples there will be."""
        return self.place == self._first_begin

    def _choosing(self) -> Selection:
        """Return the rows that choose a token; the others are still inside their prompts."""
        if self.place >= self._last_begin:
            return ALL
        return np.flatnonzero(self.running & (self.begins[self.rows] <= self.place))

    def _chosen(self, out: StepOut, rows: Selection) -> Tokens:
        """Return the next token of every row, and record the log-probabilities of those that chose."""
        if not isinstance(rows, slice) and not len(rows):
            prompted: Tokens = self.tokens[self.rows, self.place]
            return prompted
        scores = self._scores(out, rows)
        columns = scores.argmax(-1)
        # The arg-max of NaNs is the first of them, which is hardly ever EOS: such a row reaches the limit.
        if self.scorer.processors or self.sampler is not None or self.place + 1 >= self._first_end:
            # Finished rows are left out: processors may forbid every token of theirs.
            running, targets = self.running[rows], self.rows[rows]
            best = scores[np.arange(len(scores)), columns]
            check_something_is_left(best[running], self.place - self.begins[targets[running]])
        if self.sampler is not None:
            columns = self._drawn(scores, self.sampler, rows)
        if self.log_probs is not None:
            self.log_probs[self.rows[rows], self.place] = self.scorer.log_probs_of(scores, columns)
        chosen: Tokens = columns if self.scorer.ids is None else self.scorer.ids[columns]
        if isinstance(rows, slice):
            return chosen
        tokens: Tokens = self.tokens[self.rows, self.place]
        tokens[rows] = chosen
        return tokens

    def _scores(self, out: StepOut, rows: Selection) -> Floats:
        """Return the scores of the rows that choose; several samples of a source share a row at first."""
        count = self.rows_per_source if self._is_first else 1
        if count > 1 and not isinstance(rows, slice):
            rows = rows[::count] // count
        sources = self.rows[::count] // self.rows_per_source
        scores = self.scorer.logits(out, sources)[rows]
        if self.scorer.processors:
            scores = self.scorer.processed(scores, rectangular(self._read_tokens()[rows], sources[rows]))
        return np.repeat(scores, count, 0) if count > 1 else scores

    def _read_tokens(self) -> Tokens:
        """Return the tokens that each row of the engine has read."""
        if self._is_first:
            return self.tokens[:: self.rows_per_source, : self.place]
        if self._all_are_left:
            return self.tokens[:, : self.place]
        if self._read is None:
            self._read = np.empty_like(self.tokens)
        # The rows are within range; in its checking mode numpy would make a copy first.
        np.take(self.tokens, self.rows, 0, out=self._read[: len(self.rows)], mode="clip")
        return self._read[: len(self.rows), : self.place]

    @property
    def _all_are_left(self) -> bool:
        return len(self.rows) == len(self.tokens)

    def _drawn(self, scores: Floats, sampler: Sampler, rows: Selection) -> NDArray[np.int64]:
        columns = np.zeros(len(scores), np.int64)
        targets = self.rows[rows].tolist()
        for row in np.flatnonzero(self.running[rows]).tolist():
            columns[row] = sampler.column(scores[row], targets[row])
        return columns

    def _align(self, attention: Floats) -> None:
        """Record the weights of every row; nothing reads those of finished rows and of prompts."""
        mean = attention[:, :, -1].mean(1)
        if self.alignments is None:
            self.alignments = np.zeros((*self.tokens.shape, mean.shape[-1]), np.float32)
        self.alignments[self.rows, self.place] = np.repeat(mean, len(self.rows) // len(mean), 0)

    def _finish(self, chosen: Tokens, rows: Selection) -> None:
        # Sets are faster than arrays for a few tokens.
        if not self._eos_ids.isdisjoint(chosen.tolist()):
            self._end(self._chose(np.isin(chosen, self.task.eos_ids) & self.running, rows), "eos", 1)
        if self.task.stops:
            self._stop(rows)
        if self.place >= self._first_end:
            self._end(np.flatnonzero((self.ends[self.rows] == self.place) & self.running), "length", 0)

    def _chose(self, which: NDArray[np.bool_], rows: Selection) -> Rows:
        """Return the rows among ``which`` whose last token was of their choice: EOS in a prompt ends nothing."""
        return np.flatnonzero(which) if isinstance(rows, slice) else rows[which[rows]]

    def _stop(self, rows: Selection) -> None:
        stops = self.task.stops
        begin = 1 if stops.reach is None else max(1, self.place - stops.reach)
        for row in self._chose(self.running, rows).tolist():
            target = int(self.rows[row])
            cut = stops.cut(self.tokens[target, begin : self.place].tolist(), target // self.rows_per_source)
            if cut is not None:
                self._end(np.array([row]), "stop", cut)

    def _end(self, rows: Rows, finish: Finish, dropped: int) -> None:
        """End rows that lose a number of their last tokens."""
        self.running[rows] = False
        self.n_running -= len(rows)
        for row in self.rows[rows].tolist():
            self.finishes[row], self.kept[row] = finish, max(0, self.place - dropped - int(self.begins[row]))

    def _move(self, chosen: Tokens, *, ended: bool) -> Move:
        """Return what the rows read next; sources can leave only when a row has just ended."""
        if self.n_running < len(self.rows):
            chosen[~self.running] = self.task.spec.pad_id
        count = self.rows_per_source
        n_sources = len(self.rows) // count
        is_second = self.place == self._first_begin + 1
        parents = np.repeat(np.arange(n_sources), count) if is_second and count > 1 else None
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
        finish, begin = self.finishes[row], int(self.begins[row])
        kept = max(0, self.place - begin) if finish == "cancelled" else self.kept[row]
        counted = kept + (finish == "eos")
        log_probs = None if self.log_probs is None else self.log_probs[row, begin:]
        alignments = None if self.alignments is None else self.alignments[row, begin:]
        return RawTarget(
            tuple(self.tokens[row, begin : begin + kept].tolist()),
            finish,
            score=None if log_probs is None else float(log_probs[:counted].sum()),
            log_probs=None if log_probs is None else tuple(log_probs[:kept].tolist()),
            alignments=None if alignments is None else alignments[:kept, : self._source_length(row)],
        )
