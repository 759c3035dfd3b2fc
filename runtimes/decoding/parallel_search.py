"""Parallel (NAT) decoding: all tokens in one step, of one or several lengths a source."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import SpecMismatch
from fatdeploy.runtimes.decoding.hypothesis import RawTarget
from fatdeploy.runtimes.decoding.search import Move, Task
from fatdeploy.runtimes.engines.protocol import Floats, StepOut, Want
from fatdeploy.spec import Tokens


class ParallelSearch:
    """Reads BOS at every place of the longest target; of several lengths the one with the best mean is taken."""

    def __init__(self, task: Task, length_log_probs: Floats | None) -> None:
        self.task = task
        self.batch = len(task.sources)
        self.lengths = np.full((self.batch, 1), task.limit)
        if length_log_probs is not None:
            # A cut length must not appear twice among the candidates.
            ranked = np.argsort(-length_log_probs[:, : task.limit], axis=-1, kind="stable")
            self.lengths = ranked[:, : task.options.length_candidates] + 1
        self._found: list[list[RawTarget]] = [[RawTarget((), "cancelled")] for _ in task.sources]

    @property
    def want(self) -> Want:
        """The logits of all places."""
        return Want.LOGITS

    def start(self) -> Move:
        """Return BOS as often as the longest candidate has tokens."""
        lengths = self.lengths.reshape(-1, 1)
        tokens = np.where(np.arange(lengths.max()) < lengths, self.task.spec.bos_id, self.task.spec.pad_id)
        each = self.lengths.shape[1]
        return Move(tokens, np.repeat(np.arange(self.batch), each) if each > 1 else None)

    def advance(self, out: StepOut) -> None:
        """Choose every token at once."""
        if out.logits is None:
            raise SpecMismatch("the engine returned no logits although they were wanted")
        tokens = out.logits.argmax(-1)
        candidates = self.lengths.shape[1]
        # Of one target nobody asked for the log-probabilities: they cost more than choosing.
        scored = candidates > 1 or self.task.options.scores
        log_probs = _log_probs_of_best(out.logits) if scored else None
        rows = [
            self._said(index, row, None if log_probs is None else log_probs[index], out.attention)
            for index, row in enumerate(tokens)
        ]
        each = [rows[start : start + candidates] for start in range(0, len(rows), candidates)]
        # The first of equally good ones: it has the more likely length.
        self._found = [[max(ranked, key=lambda one: one.score or 0.0)] if scored else ranked for ranked in each]

    def said(self, source: int) -> tuple[int, ...]:
        """Return what a source says; nothing before the one step."""
        return self._found[source][0].tokens

    def found(self) -> list[list[RawTarget]]:
        """Return the best target of each source."""
        return self._found

    def _said(
        self, index: int, row: Tokens, log_probs: NDArray[np.float32] | None, attention: Floats | None
    ) -> RawTarget:
        """Return one candidate, cut at the length that was tried, or at the first EOS."""
        counted = self.task.spec.length == "head"
        eos = np.flatnonzero(row == self.task.spec.eos_id)
        end = int(self.lengths.ravel()[index]) if counted else int(eos[0]) if eos.size else len(row)
        whole = end if counted else min(end + 1, len(row))
        read = len(self.task.sources[index // self.lengths.shape[1]])
        return RawTarget(
            tuple(row[:end].tolist()),
            "eos" if counted or eos.size else "length",
            score=None if log_probs is None else float(log_probs[:whole].mean()),
            log_probs=None if log_probs is None else tuple(log_probs[:end].tolist()),
            alignments=None if attention is None else attention[index, :, :end, :read].mean(0),
        )


def _log_probs_of_best(logits: Floats) -> Floats:
    """Return the log-probability [R, T] of the best token of each place."""
    top = logits.max(-1, keepdims=True)
    log_probs: Floats = -np.log(np.exp(logits - top).sum(-1))
    return log_probs
