"""Beam search over a batch; its sources are independent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.beams.beam import Beam, Finished, path
from fatdeploy.runtimes.decoding.beams.chooser import Chooser
from fatdeploy.runtimes.decoding.beams.kinds import DrawnBeam, GroupBeam
from fatdeploy.runtimes.decoding.hypothesis import RawTarget
from fatdeploy.runtimes.decoding.processors.protocol import History
from fatdeploy.runtimes.decoding.prompts import Prompt
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.decoding.scoring import Scorer, check_numbers
from fatdeploy.runtimes.decoding.search import ALL, Move, Selection, Task, stays
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import Tokens


@dataclass
class SourceBeams:
    """The groups of a source's beams; there is one unless they are to be diverse."""

    source: int
    prompt: Prompt
    groups: Sequence[Beam]
    place: int  # how many tokens each of its rows has read

    @property
    def chooses(self) -> bool:
        """Whether the next tokens are of its choice; otherwise they are those of its prompt."""
        return self.place >= len(self.prompt.tokens)

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
    """The beams of a batch, which begin where the prompt of their source ends.

    All rows are at the same place until a source joins. The rows of a source always are.
    """

    def __init__(self, task: Task, scorer: Scorer, first: Sequence[int] | None = None) -> None:
        self.task, self.scorer = task, scorer
        options = task.options
        self.width, self.n_groups = options.num_beams, options.num_beam_groups
        self.sampler = Sampler(options, 1 + len(task.eos_ids)) if options.sample else None
        self._refilled = self._awaits = first is not None
        self._first = range(len(task.sources)) if first is None else first
        begin = min(len(task.prompts[source].tokens) for source in self._first)
        self.beams = [self._begun(source, begin) for source in self._first]  # in the order in which they began
        self.running = list(self.beams)  # beams with rows in the engine
        # [R, n], the tokens that each row has read, and a second array to move rows into; only for processors.
        shape = (len(self.beams) * self.width, int(task.ends.max())) if scorer.processors else (0, 0)
        self._tokens, self._moved = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._n_candidates = options.n_candidates(task.spec) // self.n_groups
        self._chooser = Chooser(self._n_candidates, scorer.log_probs)

    def _begun(self, source: int, place: int) -> SourceBeams:
        groups = [self._beam(source) for _ in range(self.n_groups)]
        return SourceBeams(source, self.task.prompts[source], groups, place)

    def _beam(self, source: int) -> Beam:
        if self.sampler is not None:
            return DrawnBeam(self.task, source, self.sampler.generators(self.task.sources[source])[0])
        return Beam(self.task, source) if self.n_groups == 1 else GroupBeam(self.task, source)

    @property
    def want(self) -> Want:
        """The engine's own top k where it pays, k is large enough and nothing changes the scores."""
        enough = self._n_candidates <= min(self.task.spec.top_k, self.task.spec.vocab_size)
        plain = not self.scorer.processors and self.task.options.shortlist is None and self.sampler is None
        return Want.TOPK if enough and plain and self.scorer.topk_pays else self.scorer.want

    def start(self) -> Move:
        """Return what all prompts have room for, the same for all rows of a source."""
        move = self.task.first_move(self._first, self.width)
        if self.scorer.processors:
            self._tokens[:, : move.tokens.shape[1]] = move.tokens
        return move

    def advance(self, out: StepOut) -> Move | None:
        """Continue every beam; finished ones leave the batch when that pays."""
        before = np.array([beams.over for beams in self.running])
        origins, tokens = self._continued(out)
        for beams, was_over in zip(self.running, before.tolist(), strict=True):
            # Rows that wait for another source go back to the beginning; others stay as long as those beside them.
            beams.place += not (self._refilled and was_over)
        over = np.array([beams.over for beams in self.running])
        return self._move(origins, tokens, over, over & ~before) if self._awaits or not over.all() else None

    def expect_no_more(self) -> None:
        """Let finished sources leave from now on."""
        self._awaits = False

    def free_places(self) -> Rows:
        """Return the places of finished sources."""
        return np.flatnonzero([beams.over for beams in self.running])

    def join(self, move: Move, places: Rows, sources: Sequence[int]) -> Move:
        """Let sources begin at the places of finished ones, each in all of its rows: they read the same prompt."""
        tokens = move.tokens.copy()
        for place, source in zip(places.tolist(), sources, strict=True):
            beams = self.running[place] = self._begun(source, 1)
            self.beams.append(beams)
            tokens[place * self.width : (place + 1) * self.width] = beams.prompt.tokens[0]
        if self.scorer.processors:
            rows = self._rows_of(places)
            self._tokens[rows, 0] = tokens[rows, 0]
        return replace(move, tokens=tokens, resting=self._rows_of(self.free_places()))

    def tokens_so_far(self, source: int) -> tuple[int, ...]:
        """Return the tokens of a source's best running hypothesis; a later step may prefer another."""
        return tuple(node.token for node in path(self.beams[source].groups[0].nodes[0]))

    def results(self) -> list[list[RawTarget]]:
        """Return each source's hypotheses, best first."""
        count = self.task.options.num_return_sequences
        return [
            [self._target(each, len(self.task.sources[beams.source])) for each in beams.hypotheses()[:count]]
            for beams in self.beams
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
        staying = list(range(width))  # rows that do not choose
        origins, tokens, end = [], [], 0
        for index, beams in enumerate(self.running):
            parents, part, first = staying, slice(end, end + width), index * self.width + group * width
            if not beams.chooses:
                chosen = [beams.prompt.tokens[beams.place]] * width
            else:
                end += width
                beam = beams.groups[group]
                if beam.over:
                    chosen = [self.task.spec.pad_id] * width
                else:
                    weights = None if attention is None else attention[part]
                    is_first = not beam.length
                    moved, chosen = beam.advance(best[0][part], best[1][part], weights)
                    # At first all rows have read the same, and none is copied.
                    parents = parents if is_first else moved
            origins.append([first + parent for parent in parents])
            tokens.append(chosen)
        return origins, tokens

    def _choosing(self, group: int) -> Selection:
        """Return a group's rows of sources that choose tokens; the others are still inside their prompts."""
        choosing = np.flatnonzero([beams.chooses for beams in self.running])
        if len(choosing) == len(self.running) and self.n_groups == 1:
            return ALL
        width = self.width // self.n_groups
        return (choosing[:, None] * self.width + group * width + np.arange(width)).ravel()

    def _best(self, out: StepOut, rows: Selection, chosen: Tokens) -> tuple[Floats, Tokens]:
        """Return the best log-probabilities and ids [n, k] of some rows; earlier groups have ``chosen`` tokens."""
        if self.want is Want.TOPK and out.top_log_probs is not None and out.top_ids is not None:
            return out.top_log_probs[rows, -1], out.top_ids[rows, -1]
        if not isinstance(rows, slice) and not len(rows):
            return np.empty((0, 1), np.float32), np.empty((0, 1), np.int64)
        scores = self.scorer.logits(out, self._sources())[rows]
        if self.sampler is None:
            log_probs, columns = self._ranked(scores, rows, chosen)
        else:
            log_probs = self._drawable(scores, rows, chosen, self.sampler)
            columns = np.broadcast_to(np.arange(log_probs.shape[1]), log_probs.shape)
        return log_probs, columns if self.scorer.ids is None else self.scorer.ids[columns]

    def _ranked(self, scores: Floats, rows: Selection, chosen: Tokens) -> tuple[Floats, Tokens]:
        """Return the best log-probabilities and their columns."""
        renormalize = self.task.options.renormalize
        if not self.scorer.processors:
            return self._chooser.best_log_probs(scores)
        if renormalize and self.scorer.relative:
            # Normalising before would only shift the scores of a row, and the shift would vanish afterwards.
            processed = self.scorer.processed(scores, self._history(rows, chosen))
        else:
            processed = self._processed(scores, rows, chosen)
        return self._chooser.best_log_probs(processed) if renormalize else self._chooser.best(processed)

    def _drawable(self, scores: Floats, rows: Selection, chosen: Tokens, sampler: Sampler) -> Floats:
        """Return the log-probabilities of all columns; those that must not be drawn have none."""
        scores = self._processed(scores, rows, chosen)
        check_numbers(scores.max(-1))
        scores = np.stack([sampler.narrowed(row) for row in scores])
        if self.task.options.renormalize:
            self.scorer.normalize(scores)
        return scores

    def _processed(self, scores: Floats, rows: Selection, chosen: Tokens) -> Floats:
        """Return log-probabilities that processors have changed: as in transformers, they may not sum to 1 then."""
        self.scorer.normalize(scores)
        return self.scorer.processed(scores, self._history(rows, chosen)) if self.scorer.processors else scores

    def _sources(self) -> NDArray[np.int64]:
        """Return the source of each row of the engine."""
        return np.repeat([beams.source for beams in self.running], self.width)

    def _history(self, rows: Selection, chosen: Tokens) -> History:
        sources = self._sources()[rows]
        lengths = np.repeat([beams.place for beams in self.running], self.width)[rows]
        read = self._tokens[: len(self.running) * self.width, : lengths.max()][rows]
        if not chosen.size:
            return History(read, lengths, sources)
        by_source = chosen[[beams.chooses for beams in self.running]]
        return History(read, lengths, sources, np.repeat(by_source, len(read) // len(by_source), 0))

    def _move(
        self, origins: NDArray[np.int64], tokens: Tokens, over: NDArray[np.bool_], resting: NDArray[np.bool_]
    ) -> Move:
        if not self._awaits and not stays(~over):
            origins, tokens, resting = origins[~over], tokens[~over], resting[~over]
            self.running = [beams for beams in self.running if not beams.over]
        parents = origins.ravel()
        if self.scorer.processors:
            self._remember(parents, tokens)
        same = len(parents) == len(over) * self.width and bool((parents == np.arange(len(parents))).all())
        rested = self._rows_of(np.flatnonzero(resting)) if self._refilled and resting.any() else None
        return Move(tokens.reshape(-1, 1), None if same else parents, rested)

    def _rows_of(self, places: Rows) -> Rows:
        """Return the rows of sources in the engine."""
        return (places[:, None] * self.width + np.arange(self.width)).ravel()

    def _remember(self, parents: Rows, tokens: Tokens) -> None:
        # The rows are within range; in its checking mode numpy would make a copy first.
        np.take(self._tokens, parents, 0, out=self._moved[: len(parents)], mode="clip")
        self._tokens, self._moved = self._moved, self._tokens
        columns = np.repeat([beams.place - 1 for beams in self.running], self.width)
        self._tokens[np.arange(len(parents)), columns] = tokens.ravel()

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
