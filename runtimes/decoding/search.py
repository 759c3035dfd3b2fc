"""How tokens are chosen: what every search does, and the one for rows that do not know of each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import Finish, RawTarget
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.decoding.scoring import Scorer, check_something_is_left
from fatdeploy.runtimes.decoding.stops import Stops
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import ModelSpec, Tokens


@dataclass(frozen=True)
class Move:
    """What comes next: the tokens that each row reads, and which old row each continues, if any row moved."""

    tokens: Tokens  # [R, t]
    parents: Rows | None = None


class Search(Protocol):
    """Turns what an engine says into tokens, until there is nothing left to say."""

    @property
    def want(self) -> Want:
        """What it needs of a step."""
        ...

    def start(self) -> Move:
        """Return what is read first."""
        ...

    def advance(self, out: StepOut) -> Move | None:
        """Choose the next tokens; None when all is said."""
        ...

    def said(self, source: int) -> tuple[int, ...]:
        """Return what the first target of a source says so far."""
        ...

    def found(self) -> list[list[RawTarget]]:
        """Return the targets of each source, best first; what is not finished is cancelled."""
        ...


@dataclass(frozen=True)
class Task:
    """What a search is told: the options, the sources, and how many new tokens there may be."""

    options: DecodeOptions
    spec: ModelSpec
    sources: Sequence[NDArray[np.generic]]
    limit: int
    stops: Stops

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        """What every target reads first."""
        return (self.spec.bos_id, *self.options.prefix_ids)


def stays(alive: NDArray[np.bool_]) -> bool:
    """Whether a batch of sources goes on as it is: leaving costs a copy, which pays when half of them are finished."""
    return bool(2 * np.count_nonzero(alive) > len(alive))


class RowSearch:
    """Greedy decoding and sampling: a row a target, none of which knows of the others."""

    def __init__(self, task: Task, scorer: Scorer) -> None:
        self.task, self.scorer = task, scorer
        options, count = task.options, task.options.num_return_sequences
        self.each = count
        n_rows = len(task.sources) * count
        self.sampler = Sampler(options, task.sources) if options.sample else None
        self.tokens = np.full((n_rows, len(task.prompt) + task.limit), task.spec.pad_id, np.int64)
        self.tokens[:, : len(task.prompt)] = task.prompt
        self._read: Tokens | None = None  # those of the rows that are left, for controls
        self.length = 0  # new tokens
        self.kept = [0] * n_rows  # new tokens that count of a finished row
        self.finishes: list[Finish] = ["cancelled"] * n_rows
        self.rows = np.arange(n_rows)  # what each row of the engine writes
        self.going = np.ones(n_rows, bool)  # the same, whether it still does
        self.n_going = n_rows
        self.log_probs = np.zeros((n_rows, task.limit), np.float32) if options.scores else None
        self.alignments: Floats | None = None

    @property
    def want(self) -> Want:
        """The logits, or the hidden state that a shortlist multiplies."""
        return self.scorer.want

    def start(self) -> Move:
        """Return BOS and the prefix, one row a source."""
        return Move(self.tokens[:: self.each, : len(self.task.prompt)].copy())

    def advance(self, out: StepOut) -> Move | None:
        """Choose a token for each row; sources that are finished leave when it pays."""
        scores = self._scores(out)
        columns = scores.argmax(-1)
        # Of scores that are no numbers the arg-max is the first, which is hardly ever EOS: such a row meets the limit.
        if self.scorer.processors or self.sampler is not None or self.length + 1 == self.task.limit:
            # Of a finished row controls may leave nothing: nobody asks it.
            check_something_is_left(scores[np.arange(len(scores)), columns][self.going], self.length)
        if self.sampler is not None:
            columns = self._drawn(scores, self.sampler)
        chosen = columns if self.scorer.ids is None else self.scorer.ids[columns]
        self._write(chosen, scores, columns, out.attention)
        n_before = self.n_going
        self._finish(chosen)
        return self._move(chosen, ended=self.n_going < n_before) if self.n_going else None

    def said(self, source: int) -> tuple[int, ...]:
        """Return what a source's first row says so far."""
        return self._said(source * self.each).tokens

    def found(self) -> list[list[RawTarget]]:
        """Return each source's targets, samples in the order in which they were asked for."""
        rows = [self._said(row) for row in range(len(self.finishes))]
        return [rows[start : start + self.each] for start in range(0, len(rows), self.each)]

    def _scores(self, out: StepOut) -> Floats:
        scores = self.scorer.logits(out)
        if self.scorer.processors:
            scores = self.scorer.controlled(scores, self._history())
        return np.repeat(scores, self.each, 0) if self.length == 0 and self.each > 1 else scores

    def _history(self) -> Tokens:
        """Return what each row of the engine has read."""
        if self.length == 0:
            # One row a source so far, whatever number of samples there will be.
            return self.tokens[:: self.each, : self._place]
        if self._all_are_left:
            return self.tokens[:, : self._place]
        if self._read is None:
            self._read = np.empty_like(self.tokens)
        # Rows are within range; told to check it, numpy would make a copy of its own first.
        np.take(self.tokens, self.rows, 0, out=self._read[: len(self.rows)], mode="clip")
        return self._read[: len(self.rows), : self._place]

    @property
    def _all_are_left(self) -> bool:
        return len(self.rows) == len(self.tokens)

    def _drawn(self, scores: Floats, sampler: Sampler) -> NDArray[np.int64]:
        columns = np.zeros(len(scores), np.int64)
        for row in np.flatnonzero(self.going).tolist():
            columns[row] = sampler.column(scores[row], int(self.rows[row]))
        return columns

    @property
    def _place(self) -> int:
        """The column that is written next."""
        return len(self.task.prompt) + self.length

    def _write(self, chosen: Tokens, scores: Floats, columns: NDArray[np.int64], attention: Floats | None) -> None:
        """Record what was chosen; what finished rows say is never looked at."""
        # A slice costs a third of the list of all rows.
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
        eos_id = self.task.spec.eos_id
        # Of the few that there are a list is asked sooner than an array.
        if eos_id in chosen.tolist():
            self._end(np.flatnonzero((chosen == eos_id) & self.going), "eos", self.length - 1)
        if self.task.stops:
            self._stop()
        if self.length == self.task.limit:
            self._end(np.flatnonzero(self.going), "length", self.length)

    def _stop(self) -> None:
        stops = self.task.stops
        begin = 1 if stops.reach is None else max(1, self._place - stops.reach)
        for row in np.flatnonzero(self.going).tolist():
            cut = stops.cut(self.tokens[self.rows[row], begin : self._place].tolist())
            if cut is not None:
                self._end(np.array([row]), "stop", max(0, self.length - cut))

    def _end(self, rows: Rows, finish: Finish, kept: int) -> None:
        self.going[rows] = False
        self.n_going -= len(rows)
        for row in self.rows[rows].tolist():
            self.finishes[row], self.kept[row] = finish, kept

    def _move(self, chosen: Tokens, *, ended: bool) -> Move:
        """Return what the rows read next; only where a row has just ended there may be sources that leave."""
        if self.n_going < len(self.rows):
            chosen[~self.going] = self.task.spec.pad_id
        n_sources = len(self.rows) // self.each
        parents = np.repeat(np.arange(n_sources), self.each) if self.length == 1 and self.each > 1 else None
        if not ended:
            return Move(chosen[:, None], parents)
        alive: NDArray[np.bool_] = np.logical_or.reduce(self.going.reshape(n_sources, self.each), 1)
        if stays(alive):
            return Move(chosen[:, None], parents)
        kept = np.flatnonzero(np.repeat(alive, self.each))
        self.rows, self.going = self.rows[kept], self.going[kept]
        return Move(chosen[kept, None], kept if parents is None else parents[kept])

    def _source_length(self, row: int) -> int:
        return len(self.task.sources[row // self.each])

    def _said(self, row: int) -> RawTarget:
        finish = self.finishes[row]
        kept = self.length if finish == "cancelled" else self.kept[row]
        begin = len(self.task.prompt)
        counted = kept + (finish == "eos")
        each = None if self.log_probs is None else self.log_probs[row]
        return RawTarget(
            tuple(self.tokens[row, begin : begin + kept].tolist()),
            finish,
            score=None if each is None else float(each[:counted].sum()),
            log_probs=None if each is None else tuple(each[:kept].tolist()),
            alignments=None if self.alignments is None else self.alignments[row, :kept, : self._source_length(row)],
        )
