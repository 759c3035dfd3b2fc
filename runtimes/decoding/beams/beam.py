"""The beams of one source, with the semantics of Hugging Face's beam search."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import Finish
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF
from fatdeploy.runtimes.decoding.scoring import check_something_is_left
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens


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

    def __init__(self, task: Task, source: int) -> None:
        self.task, self.source = task, source
        self.prompt = task.prompts[source]
        options = task.options
        self.width = options.num_beams // options.num_beam_groups
        self._n_candidates = options.n_candidates(task.spec) // options.num_beam_groups
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
            check_something_is_left(best.totals[:1], np.array([self.length]))
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
        order = self._order(totals)
        return Candidates(
            (order // k).tolist(), ids.ravel()[order].tolist(), log_probs.ravel()[order].tolist(), totals[order]
        )

    def _order(self, totals: Floats) -> NDArray[np.int64]:
        """Return the continuations that compete, in their order."""
        return np.argsort(-totals, kind="stable")[: self._n_candidates]

    def _node(self, best: Candidates, index: int, attention: Floats | None) -> Node:
        rank = best.ranks[index]
        weights = None if attention is None else attention[self.places[rank]]
        return Node(self.nodes[rank], best.tokens[index], best.log_probs[index], weights)

    def _end(self, node: Node) -> tuple[Finish, int] | None:
        """Return how a continuation ends and how many of its tokens count; None if it goes on."""
        if node.token in self.task.eos_ids:
            return "eos", self.length
        if self.task.stops:
            cut = self.task.stops.cut([*self.prompt.prefix, *last_tokens(node, self.task.stops.reach)], self.source)
            if cut is not None:
                return "stop", max(0, self.length + 1 - cut)
        return ("length", self.length + 1) if self.length + 1 == self.prompt.limit else None

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
        length = self.prompt.limit if at_longest else self.length
        return bool(self._highest() / np.float32(length**options.length_penalty) > self.finished[-1].score)

    def _highest(self) -> np.float32:
        """Return the sum from which a better hypothesis might grow."""
        highest: np.float32 = self.scores[0]
        return highest


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
