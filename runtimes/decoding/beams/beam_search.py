"""Beam search over a batch; its sources are independent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.beams.beam import Beam, Finished, path
from fatdeploy.runtimes.decoding.beams.chooser import Chooser
from fatdeploy.runtimes.decoding.beams.kinds import DrawnBeam, GroupBeam
from fatdeploy.runtimes.decoding.hypothesis import RawTarget
from fatdeploy.runtimes.decoding.processors.protocol import History, rectangular
from fatdeploy.runtimes.decoding.prompts import Prompt
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.decoding.scoring import Scorer, check_numbers
from fatdeploy.runtimes.decoding.search import ALL, Move, Selection, Task, stays
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import Tokens


@dataclass(frozen=True)
class SourceBeams:
    """The groups of a source's beams; there is one unless they are to be diverse."""

    source: int
    prompt: Prompt
    groups: Sequence[Beam]

    @property
    def over(self) -> bool:
        """Whether further steps cannot change the result."""
        return all(beam.over for beam in self.groups)

    def hypotheses(self) -> list[Finished]:
        """Return the hypotheses of all groups, best first."""
        finished = [beam.finished if beam.over else beam.cancelled() for beam in self.groups]
        if len(finished) == 1:
            return finished[0]
        # As in transformers, among equals the last one is better.
        return sorted((hypothesis for group in finished for hypothesis in group), key=lambda one: one.score)[::-1]


class BeamSearch:
    """The beams of a batch. All rows are at the same place; beams begin where the prompt of their source ends."""

    def __init__(self, task: Task, scorer: Scorer) -> None:
        self.task, self.scorer = task, scorer
        options = task.options
        self.width, self.n_groups = options.num_beams, options.num_beam_groups
        self.sampler = Sampler(options, task.sources, 1 + len(task.eos_ids)) if options.sample else None
        self.beams = [
            SourceBeams(source, prompt, [self._beam(source) for _ in range(self.n_groups)])
            for source, prompt in enumerate(task.prompts)
        ]
        self.running = list(self.beams)  # beams with rows in the engine
        self.rows = 1  # per source
        self.place = int(task.begins.min())  # how many tokens each row has read
        self._last_begin = int(task.begins.max())
        # [R, n], the tokens that each row has read, and a second array to move rows into; only for processors.
        self._tokens: Tokens | None = None
        self._moved: Tokens | None = None
        self._n_candidates = options.n_candidates(task.spec) // self.n_groups
        self._chooser = Chooser(self._n_candidates)

    def _beam(self, source: int) -> Beam:
        if self.sampler is not None:
            return DrawnBeam(self.task, source, self.sampler.generators[source])
        return Beam(self.task, source) if self.n_groups == 1 else GroupBeam(self.task, source)

    @property
    def want(self) -> Want:
        """The engine's own top k where k is large enough and nothing changes the scores."""
        enough = self._n_candidates <= min(self.task.spec.top_k, self.task.spec.vocab_size)
        plain = not self.scorer.processors and self.task.options.shortlist is None and self.sampler is None
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
        alive = np.array([not beams.over for beams in self.running])
        return self._move(origins, tokens, alive) if alive.any() else None

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the tokens of a source's best running hypothesis; a later step may prefer another."""
        return tuple(node.token for node in path(self.beams[source].groups[0].nodes[0]))

    def results(self) -> list[list[RawTarget]]:
        """Return each source's hypotheses, best first."""
        count = self.task.options.num_return_sequences
        return [
            [self._target(hypothesis, len(source)) for hypothesis in beams.hypotheses()[:count]]
            for beams, source in zip(self.beams, self.task.sources, strict=True)
        ]

    def _continued(self, out: StepOut) -> tuple[Rows, Tokens]:
        """Return for every row of every source the row that it continues, and the token that it reads."""
        attention = None if out.attention is None else out.attention[:, :, -1].mean(1)
        width = self.width // self.n_groups
        origins, tokens = (np.empty((len(self.running), self.width), np.int64) for _ in range(2))
        for group in range(self.n_groups):
            columns = slice(group * width, (group + 1) * width)
            rows = self._choosing(group)
            best = self._best(out, rows, tokens[:, : columns.start])
            weights = None if attention is None else attention[rows]
            origins[:, columns], tokens[:, columns] = self._group_moves(group, best, weights)
        return origins, tokens

    def _group_moves(
        self, group: int, best: tuple[Floats, Tokens], attention: Floats | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        width = self.width // self.n_groups
        n_rows, begin = (1, 0) if self.rows == 1 else (width, group * width)
        # Rows that do not choose stay in place.
        staying = [min(row, n_rows - 1) for row in range(width)]
        origins, tokens, end = [], [], 0
        for index, beams in enumerate(self.running):
            parents, part, first = staying, slice(end, end + n_rows), index * self.rows + begin
            if self.place < len(beams.prompt.tokens):
                chosen = [beams.prompt.tokens[self.place]] * width
            else:
                end += n_rows
                beam = beams.groups[group]
                if beam.over:
                    chosen = [self.task.spec.pad_id] * width
                else:
                    weights = None if attention is None else attention[part]
                    parents, chosen = beam.advance(best[0][part], best[1][part], weights)
            origins.append([first + parent for parent in parents])
            tokens.append(chosen)
        return origins, tokens

    def _choosing(self, group: int) -> Selection:
        """Return a group's rows of sources that choose tokens; the others are still inside their prompts."""
        if self.place >= self._last_begin and (self.n_groups == 1 or self.rows == 1):
            return ALL
        width = self.width // self.n_groups
        n_rows, begin = (1, 0) if self.rows == 1 else (width, group * width)
        firsts = np.array(self._begun(), np.int64) * self.rows + begin
        return (firsts[:, None] + np.arange(n_rows)).ravel()

    def _begun(self) -> list[int]:
        """Return the places, among those that run, of the sources that choose tokens."""
        return [index for index, beams in enumerate(self.running) if self.place >= len(beams.prompt.tokens)]

    def _best(self, out: StepOut, rows: Selection, chosen: Tokens) -> tuple[Floats, Tokens]:
        """Return the best log-probabilities and ids [n, k] of some rows; earlier groups have ``chosen`` tokens."""
        if self.want is Want.TOPK and out.top_log_probs is not None and out.top_ids is not None:
            return out.top_log_probs[rows, -1], out.top_ids[rows, -1]
        if not isinstance(rows, slice) and not len(rows):
            return np.empty((0, 1), np.float32), np.empty((0, 1), np.int64)
        scores = self.scorer.log_probs(self.scorer.logits(out, self._sources())[rows])
        if self._tokens is not None:
            # As in transformers, processors change log-probabilities here, which may sum to something else than 1 then.
            read = self._tokens[: len(self.running) * self.rows, : self.place]
            scores = self.scorer.processed(scores, self._history(read[rows], rows, chosen))
        if self.sampler is not None:
            scores = self._narrowed(scores, self.sampler)
        if self.task.options.renormalize:
            scores = self.scorer.log_probs(scores)
        if self.sampler is None:
            log_probs, columns = self._chooser.best(scores)
        else:
            log_probs, columns = scores, np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        return log_probs, columns if self.scorer.ids is None else self.scorer.ids[columns]

    def _sources(self) -> NDArray[np.int64]:
        """Return the source of each row."""
        return np.repeat([beams.source for beams in self.running], self.rows)

    def _history(self, read: Tokens, rows: Selection, chosen: Tokens) -> History:
        sources = self._sources()
        if not chosen.size:
            return rectangular(read, sources[rows])
        by_source = chosen[self._begun()]
        return rectangular(read, sources[rows], np.repeat(by_source, len(read) // len(by_source), 0))

    def _narrowed(self, scores: Floats, sampler: Sampler) -> Floats:
        check_numbers(scores.max(-1))
        return np.stack([sampler.narrowed(row) for row in scores])

    def _move(self, origins: NDArray[np.int64], tokens: Tokens, alive: NDArray[np.bool_]) -> Move:
        if not stays(alive):
            origins, tokens = origins[alive], tokens[alive]
            self.running = [beams for beams, is_alive in zip(self.running, alive, strict=True) if is_alive]
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
