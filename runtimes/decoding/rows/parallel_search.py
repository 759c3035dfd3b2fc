"""Parallel (NAT) decoding: all tokens in one step, with one or several lengths per source."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import SpecMismatch
from fatdeploy.runtimes.decoding.hypothesis import RawTarget
from fatdeploy.runtimes.decoding.search import Move, Task
from fatdeploy.runtimes.engines.protocol import Floats, StepOut, Want
from fatdeploy.spec import Tokens


class ParallelSearch:
    """Reads BOS at every position of the longest target; of several lengths, the one with the best mean score wins."""

    def __init__(self, task: Task, length_log_probs: Floats | None) -> None:
        self.task = task
        self.batch = len(task.sources)
        # No prefix, so every source has the same limit.
        limit = task.prompts[0].limit
        self.lengths = np.full((self.batch, 1), limit)
        if length_log_probs is not None:
            # A cut length must not appear twice among the candidates.
            ranked = np.argsort(-length_log_probs[:, :limit], axis=-1, kind="stable")
            self.lengths = ranked[:, : task.options.length_candidates] + 1
        self._results: list[list[RawTarget]] = [[RawTarget((), "cancelled")] for _ in task.sources]

    @property
    def want(self) -> Want:
        """The logits of all positions."""
        return Want.LOGITS

    def start(self) -> Move:
        """Return one BOS per token of the longest candidate."""
        lengths = self.lengths.reshape(-1, 1)
        tokens = np.where(np.arange(lengths.max()) < lengths, self.task.spec.bos_id, self.task.spec.pad_id)
        candidates = self.lengths.shape[1]
        return Move(tokens, np.repeat(np.arange(self.batch), candidates) if candidates > 1 else None)

    def advance(self, out: StepOut) -> None:
        """Choose every token at once."""
        if out.logits is None:
            raise SpecMismatch("the engine returned no logits although they were wanted")
        tokens = out.logits.argmax(-1)
        candidates = self.lengths.shape[1]
        # Log-probabilities cost more than choosing tokens, and a single target needs none.
        scored = candidates > 1 or self.task.options.scores
        log_probs = _log_probs_of_best(out.logits) if scored else None
        targets = [
            self._target(index, row, None if log_probs is None else log_probs[index], out.attention)
            for index, row in enumerate(tokens)
        ]
        by_source = [targets[start : start + candidates] for start in range(0, len(targets), candidates)]
        # Among equals the first: it has the more likely length.
        self._results = [
            [max(ranked, key=lambda target: target.score or 0.0)] if scored else ranked for ranked in by_source
        ]

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the tokens of a source; none before the only step."""
        return self._results[source][0].tokens

    def results(self) -> list[list[RawTarget]]:
        """Return the best target of each source."""
        return self._results

    def _target(
        self, index: int, row: Tokens, log_probs: NDArray[np.float32] | None, attention: Floats | None
    ) -> RawTarget:
        """Return one candidate, cut at its length or at the first EOS."""
        has_head = self.task.spec.length == "head"
        eos = np.flatnonzero(row == self.task.spec.eos_id)
        end = int(self.lengths.ravel()[index]) if has_head else int(eos[0]) if eos.size else len(row)
        scored_end = end if has_head else min(end + 1, len(row))
        source_length = len(self.task.sources[index // self.lengths.shape[1]])
        return RawTarget(
            tuple(row[:end].tolist()),
            "eos" if has_head or eos.size else "length",
            score=None if log_probs is None else float(log_probs[:scored_end].mean()),
            log_probs=None if log_probs is None else tuple(log_probs[:end].tolist()),
            alignments=None if attention is None else attention[index, :, :end, :source_length].mean(0),
        )


def _log_probs_of_best(logits: Floats) -> Floats:
    """Return the log-probability [R, T] of the best token at each position."""
    top = logits.max(-1, keepdims=True)
    log_probs: Floats = -np.log(np.exp(logits - top).sum(-1))
    return log_probs
