"""Beam search with Hugging Face's semantics; the sources of a batch are independent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import Finish, RawTarget
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History
from fatdeploy.runtimes.decoding.scoring import Scorer, check_numbers, check_something_is_left
from fatdeploy.runtimes.decoding.search import Move, Task, stays
from fatdeploy.runtimes.engines.protocol import Floats, Rows, StepOut, Want
from fatdeploy.spec import Tokens

# Groups of a row's scores when the best are searched: more take longer to scan, fewer let more scores pass.
GROUPS, GROUPS_PER_COLUMN = 256, 8


class Node(NamedTuple):
    """A token and its predecessor: hypotheses share their beginnings, and a step adds one node to each."""

    before: Optional["Node"]
    token: int
    log_prob: float
    attention: Floats | None  # [S]


@dataclass(frozen=True)
class Finished:
    """A complete hypothesis."""

    node: Node | None
    score: float
    finish: Finish
    kept: int  # tokens that count


class Candidates(NamedTuple):
    """The best continuations of a source's rows, best first."""

    ranks: list[int]  # ranks of the hypotheses that they continue
    tokens: list[int]
    log_probs: list[float]
    totals: Floats


class Beam:
    """One source's search: running hypotheses, best first, and the complete ones."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.width = task.options.num_beams
        # One row at first: others would only repeat it.
        self.scores = np.zeros(1, np.float32)  # sums of log-probabilities
        self.nodes: list[Node | None] = [None]
        self.places = [0]  # the row of the source, in the engine, that has each hypothesis
        self.finished: list[Finished] = []
        self.length = 0
        self.can_improve = True  # a running hypothesis may still beat the complete ones
        self.stuck = False  # every continuation is complete or forbidden

    @property
    def over(self) -> bool:
        """Whether further steps cannot change the result."""
        return self._full or not self.can_improve or self.stuck

    @property
    def _full(self) -> bool:
        return self.task.options.early_stopping is True and len(self.finished) == self.width

    def advance(self, log_probs: Floats, ids: Tokens, attention: Floats | None) -> tuple[list[int], list[int]]:
        """Take the best continuations [rows, k] of each row; return the parent and the next token of each row.

        There are enough of them to go on even if every row continues with every end.
        """
        best = self._candidates(log_probs, ids)
        if not best.totals[0] > NEG_INF and not self.finished:  # true for NaN as well
            check_something_is_left(best.totals[:1], self.length)
        nodes = [self._node(best, index, attention) for index in range(len(best.tokens))]
        ends = [self._end(node) for node in nodes]
        self._finish(best, nodes, ends)
        return self._go_on(best, nodes, [end is not None for end in ends])

    def cancelled(self) -> list[Finished]:
        """Return the hypotheses at the deadline: complete ones before running ones, each by score."""
        penalty = float(max(self.length, 1) ** self.task.options.length_penalty)
        running = [
            Finished(node, float(score) / penalty, "cancelled", self.length)
            for node, score in zip(self.nodes, self.scores, strict=True)
            if score > NEG_INF
        ]
        # A complete one is cancelled too: with more time the search might have found a better one.
        complete = [replace(hypothesis, finish="cancelled") for hypothesis in self.finished]
        return (complete + running)[: self.width]

    def _candidates(self, log_probs: Floats, ids: Tokens) -> Candidates:
        k = log_probs.shape[1]
        log_probs, ids = log_probs[self.places], ids[self.places]
        totals = (log_probs + self.scores[:, None]).ravel()
        order = np.argsort(-totals, kind="stable")[: self.task.options.n_candidates(self.task.spec)]
        return Candidates(
            (order // k).tolist(), ids.ravel()[order].tolist(), log_probs.ravel()[order].tolist(), totals[order]
        )

    def _node(self, best: Candidates, index: int, attention: Floats | None) -> Node:
        rank = best.ranks[index]
        weights = None if attention is None else attention[self.places[rank]]
        return Node(self.nodes[rank], best.tokens[index], best.log_probs[index], weights)

    def _end(self, node: Node) -> tuple[Finish, int] | None:
        """Return how a continuation ends and how many of its tokens count; None if it goes on."""
        if node.token in self.task.eos_ids:
            return "eos", self.length
        if self.task.stops:
            cut = self.task.stops.cut([*self.task.prompt[1:], *last_tokens(node, self.task.stops.reach)])
            if cut is not None:
                return "stop", max(0, self.length + 1 - cut)
        return ("length", self.length + 1) if self.length + 1 == self.task.limit else None

    def _finish(self, best: Candidates, nodes: list[Node], ends: list[tuple[Finish, int] | None]) -> None:
        """Let new complete hypotheses compete with the earlier ones."""
        penalty = np.float32((self.length + 1) ** self.task.options.length_penalty)
        new = [
            Finished(node, float(total / penalty), *end)
            for node, total, end in zip(nodes[: self.width], best.totals, ends, strict=False)
            if end is not None and total > -np.inf
        ]
        if new:
            # Sorting is stable: among equals the earlier one is better.
            self.finished = sorted(self.finished + new, key=lambda hypothesis: -hypothesis.score)[: self.width]

    def _go_on(self, best: Candidates, nodes: list[Node], complete: list[bool]) -> tuple[list[int], list[int]]:
        """Keep the best incomplete ones, each in its parent's row unless a better one is there."""
        totals = np.where(complete, NEG_INF, best.totals)
        kept = np.argsort(-totals, kind="stable")[: self.width].tolist()
        self.stuck = bool(totals[kept[0]] == NEG_INF)
        parents = [self.places[best.ranks[index]] for index in kept]
        self.places = placed(parents, self.width)
        self.scores, self.nodes = totals[kept], [nodes[index] for index in kept]
        self.length += 1
        self.can_improve = self._may_beat_the_worst()
        origins, tokens = [0] * self.width, [0] * self.width
        for place, parent, index in zip(self.places, parents, kept, strict=True):
            origins[place], tokens[place] = parent, best.tokens[index]
        return origins, tokens

    def _may_beat_the_worst(self) -> bool:
        """Whether the best running hypothesis, at its present or its longest length, beats the worst complete one."""
        if len(self.finished) < self.width:
            return True
        options = self.task.options
        at_longest = options.early_stopping == "never" and options.length_penalty > 0
        length = self.task.limit if at_longest else self.length
        return bool(self.scores[0] / np.float32(length**options.length_penalty) > self.finished[-1].score)


def placed(parents: Sequence[int], width: int) -> list[int]:
    """Return a row for each hypothesis: the first child of a row stays in it, so that few rows are copied."""
    free = [place for place in range(width) if place not in parents]
    occupied: set[int] = set()
    places = []
    for parent in parents:
        places.append(free.pop() if parent in occupied else parent)
        occupied.add(parent)
    return places


def path(node: Node | None) -> list[Node]:
    """Return the nodes from the first token to this one."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.before
    return nodes[::-1]


def last_tokens(node: Node | None, most: int | None) -> list[int]:
    """Return the last ``most`` tokens that lead to a node; all of them if it is None."""
    tokens: list[int] = []
    while node is not None and len(tokens) != most:
        tokens.append(node.token)
        node = node.before
    return tokens[::-1]


class BeamSearch:
    """The beams of a batch of sources."""

    def __init__(self, task: Task, scorer: Scorer) -> None:
        self.task, self.scorer = task, scorer
        self.width = task.options.num_beams
        self.beams = [Beam(task) for _ in task.sources]
        self.running = list(self.beams)  # beams with rows in the engine
        self._sources = np.arange(len(self.beams))  # the source of each running beam
        self.rows = 1  # per source
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
        """Return BOS and the prefix, one row per source: beams begin where rows differ."""
        tokens = np.tile(np.array(self.task.prompt, np.int64), (len(self.beams), 1))
        if self.scorer.processors:
            shape = len(self.beams) * self.width, len(self.task.prompt) + self.task.limit
            self._tokens, self._moved = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            self._tokens[: len(tokens), : tokens.shape[1]] = tokens
        return Move(tokens)

    def advance(self, out: StepOut) -> Move | None:
        """Continue every beam; finished ones leave the batch when that pays."""
        log_probs, ids = self._best(out)
        attention = None if out.attention is None else out.attention[:, :, -1].mean(1)
        origins, tokens = [], []
        for index, beam in enumerate(self.running):
            rows = slice(index * self.rows, (index + 1) * self.rows)
            weights = None if attention is None else attention[rows]
            parents, chosen = self._idle() if beam.over else beam.advance(log_probs[rows], ids[rows], weights)
            origins.append([rows.start + parent for parent in parents])
            tokens.append(chosen)
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

    def _idle(self) -> tuple[list[int], list[int]]:
        """Return rows that stay in place and read padding."""
        return [min(row, self.rows - 1) for row in range(self.width)], [self.task.spec.pad_id] * self.width

    def _best(self, out: StepOut) -> tuple[Floats, Tokens]:
        """Return the best log-probabilities and ids [R, k] of each row."""
        if self.want is Want.TOPK and out.top_log_probs is not None and out.top_ids is not None:
            return out.top_log_probs[:, -1], out.top_ids[:, -1]
        scores = self.scorer.log_probs(self.scorer.logits(out))
        if self._tokens is not None:
            # As in transformers, processors change log-probabilities here, which may sum to something else than 1 then.
            history = History(self._tokens[: len(scores), : self._place], np.repeat(self._sources, self.rows))
            scores = self.scorer.processed(scores, history)
            if self.task.options.renormalize:
                scores = self.scorer.log_probs(scores)
        log_probs, columns = self._chooser.best(scores)
        return log_probs, columns if self.scorer.ids is None else self.scorer.ids[columns]

    @property
    def _place(self) -> int:
        return len(self.task.prompt) + max(beam.length for beam in self.running)

    def _move(self, origins: NDArray[np.int64], tokens: Tokens, alive: NDArray[np.bool_]) -> Move:
        if not stays(alive):
            origins, tokens = origins[alive], tokens[alive]
            self.running = [beam for beam, is_alive in zip(self.running, alive, strict=True) if is_alive]
            self._sources = self._sources[alive]
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
            self._tokens[: len(parents), self._place - 1] = tokens

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


class Chooser:
    """Finds the best few columns of each row without sorting the row or allocating anything of its size."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._among = np.empty(0, bool)

    def best(self, scores: Floats) -> tuple[Floats, Tokens]:
        """Return scores and columns [R, count] of the best, best first."""
        count = min(self._count, scores.shape[1])
        if len(self._among) != scores.shape[1]:
            self._among = np.empty(scores.shape[1], bool)
        bounds = self._bounds(scores, count)
        columns = np.stack([self._columns(row, bound, count) for row, bound in zip(scores, bounds, strict=True)])
        return np.take_along_axis(scores, columns, 1), columns

    def _bounds(self, scores: Floats, count: int) -> Floats:
        """Return for each row a score that its best columns reach and few others do.

        Every group's largest score belongs to the row, so at least ``count`` columns reach the ``count``-th largest.
        """
        rows, width = scores.shape
        groups = min(width, max(GROUPS, GROUPS_PER_COLUMN * count))
        rest = width % groups
        largest = scores[:, : width - rest].reshape(rows, -1, groups).max(1)
        np.maximum(largest[:, :rest], scores[:, width - rest :], out=largest[:, :rest])
        check_numbers(largest)
        largest.partition(groups - count)
        bounds: Floats = largest[:, groups - count]
        return bounds

    def _columns(self, row: Floats, bound: np.float32, count: int) -> Tokens:
        np.greater_equal(row, bound, out=self._among)
        among = np.flatnonzero(self._among)
        return among[np.argsort(-row[among], kind="stable")[:count]]
