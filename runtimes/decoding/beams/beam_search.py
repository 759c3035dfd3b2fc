"""Beam search over a batch; its sources are independent."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.beams.beam import Beam, Finished, path
from fatdeploy.runtimes.decoding.beams.chooser import Chooser
from fatdeploy.runtimes.decoding.hypothesis import RawTarget
from fatdeploy.runtimes.decoding.processors.protocol import History
from fatdeploy.runtimes.decoding.scoring import Scorer
from fatdeploy.runtimes.decoding.search import ALL, Move, Selection, Task, stays
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import Tokens


class BeamSearch:
    """The beams of a batch. All rows are at the same place; beams begin where the prompt of their source ends."""

    def __init__(self, task: Task, scorer: Scorer) -> None:
        self.task, self.scorer = task, scorer
        self.width = task.options.num_beams
        self.beams = [Beam(task, source) for source in range(len(task.sources))]
        self.running = list(self.beams)  # beams with rows in the engine
        self.rows = 1  # per source
        self.place = int(task.begins.min())  # how many tokens each row has read
        self._last_begin = int(task.begins.max())
        # [R, n], the tokens that each row has read, and a second array to move rows into; only for processors.
        self._tokens: Tokens | None = None
        self._moved: Tokens | None = None
        self._n_candidates = task.options.n_candidates(task.spec)
        self._chooser = Chooser(self._n_candidates)

    @property
    def want(self) -> Want:
        """The engine's own top k where k is large enough and nothing changes the scores."""
        enough = self._n_candidates <= min(self.task.spec.top_k, self.task.spec.vocab_size)
        plain = not self.scorer.processors and self.task.options.shortlist is None
        return Want.TOPK if enough and plain else self.scorer.want

    def start(self) -> Move:
        """Return what all prompts have room for, one row per source: beams begin where rows differ."""
        tokens = self.task.first_tokens()
        if self.scorer.processors:
            shape = len(self.beams) * self.width, int(self.task.ends.max())
            self._tokens, self._moved = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            self._tokens[: len(tokens), : self.place] = tokens
        return Move(tokens)

    def advance(self, out: StepOut) -> Move | None:
        """Continue every beam; finished ones leave the batch when that pays."""
        origins, tokens = self._continued(out)
        self.place += 1
        alive = np.array([not beam.over for beam in self.running])
        if not alive.any():
            return None
        return self._move(np.array(origins), np.array(tokens), alive)

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the tokens of a source's best running hypothesis; a later step may prefer another."""
        return tuple(node.token for node in path(self.beams[source].nodes[0]))

    def results(self) -> list[list[RawTarget]]:
        """Return each source's hypotheses, best first."""
        return [self._targets(beam, len(source)) for beam, source in zip(self.beams, self.task.sources, strict=True)]

    def _continued(self, out: StepOut) -> tuple[list[list[int]], list[list[int]]]:
        """Return for every row of every source the row that it continues, and the token that it reads."""
        rows = self._choosing()
        log_probs, ids = self._best(out, rows)
        attention = None if out.attention is None else out.attention[:, :, -1].mean(1)[rows]
        origins, tokens, end = [], [], 0
        for index, beam in enumerate(self.running):
            if self.place < len(beam.prompt.tokens):
                parents, chosen = self._staying(beam.prompt.tokens[self.place])
            else:
                part = slice(end, end + self.rows)
                end += self.rows
                weights = None if attention is None else attention[part]
                if beam.over:
                    parents, chosen = self._staying(self.task.spec.pad_id)
                else:
                    parents, chosen = beam.advance(log_probs[part], ids[part], weights)
            origins.append([index * self.rows + parent for parent in parents])
            tokens.append(chosen)
        return origins, tokens

    def _choosing(self) -> Selection:
        """Return the rows of sources that choose tokens; the others are still inside their prompts."""
        if self.place >= self._last_begin:
            return ALL
        begun = [self.place >= len(beam.prompt.tokens) for beam in self.running]
        return np.flatnonzero(np.repeat(begun, self.rows))

    def _staying(self, token: int) -> tuple[list[int], list[int]]:
        """Return rows that stay in place and read a token."""
        return [min(row, self.rows - 1) for row in range(self.width)], [token] * self.width

    def _best(self, out: StepOut, rows: Selection) -> tuple[Floats, Tokens]:
        """Return the best log-probabilities and ids [n, k] of some rows."""
        if self.want is Want.TOPK and out.top_log_probs is not None and out.top_ids is not None:
            return out.top_log_probs[rows, -1], out.top_ids[rows, -1]
        if not isinstance(rows, slice) and not len(rows):
            return np.empty((0, 1), np.float32), np.empty((0, 1), np.int64)
        scores = self.scorer.log_probs(self.scorer.logits(out)[rows])
        if self._tokens is not None:
            # As in transformers, processors change log-probabilities here, which may sum to something else than 1 then.
            tokens = self._tokens[: len(self.running) * self.rows, : self.place]
            sources = np.repeat([beam.source for beam in self.running], self.rows)
            scores = self.scorer.processed(scores, History(tokens[rows], sources[rows]))
            if self.task.options.renormalize:
                scores = self.scorer.log_probs(scores)
        log_probs, columns = self._chooser.best(scores)
        return log_probs, columns if self.scorer.ids is None else self.scorer.ids[columns]

    def _move(self, origins: NDArray[np.int64], tokens: Tokens, alive: NDArray[np.bool_]) -> Move:
        if not stays(alive):
            origins, tokens = origins[alive], tokens[alive]
            self.running = [beam for beam, is_alive in zip(self.running, alive, strict=True) if is_alive]
        parents = origins.ravel()
        if self._tokens is not None:
            self._remember(parents, tokens.ravel())
        same = len(parents) == len(alive) * self.rows and bool((parents == np.arange(len(parents))).all())
        self.rows = self.width
        return Move(tokens.reshape(-1, 1), None if same else parents)

    def _remember(self, parents: Rows, tokens: Tokens) -> None:
        if self._tokens is not None and self._moved is not None:
            # The rows are within range; in its checking mode numpy would make a copy first.
            np.take(self._tokens, parents, 0, out=self._moved[: len(parents)], mode="clip")
            self._tokens, self._moved = self._moved, self._tokens
            self._tokens[: len(parents), self.place - 1] = tokens

    def _targets(self, beam: Beam, source_length: int) -> list[RawTarget]:
        hypotheses = beam.finished if beam.over else beam.cancelled()
        count = self.task.options.num_return_sequences
        return [self._target(hypothesis, source_length) for hypothesis in hypotheses[:count]]

    def _target(self, hypothesis: Finished, source_length: int) -> RawTarget:
        nodes = path(hypothesis.node)[: hypothesis.kept]
        weights = [node.attention[:source_length] for node in nodes if node.attention is not None]
        aligned = self.task.spec.alignment is not None
        return RawTarget(
            tuple(node.token for node in nodes),
            hypothesis.finish,
            score=hypothesis.score,
            log_probs=tuple(node.log_prob for node in nodes),
            alignments=np.array(weights, np.float32).reshape(-1, source_length) if aligned else None,
        )
