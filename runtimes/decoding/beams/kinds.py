"""Other beams than the plain ones: drawn at random, and one of several diverse groups."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.beams.beam import Beam, Candidates, Finished, Node
from fatdeploy.runtimes.decoding.hypothesis import Finish
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.engines.protocol import Floats


class DrawnBeam(Beam):
    """Beams whose continuations are drawn without replacement, with the probabilities of the whole hypotheses."""

    def __init__(self, task: Task, source: int, generator: np.random.Generator) -> None:
        super().__init__(task, source)
        self._generator = generator

    def _order(self, totals: Floats) -> NDArray[np.int64]:
        # The largest sums with Gumbel noise are such a draw, in its order. Weights would vanish at a low temperature.
        times = self._generator.standard_exponential(totals.size)
        keys = totals - np.log(np.maximum(times, np.finfo(np.float64).tiny))
        count = min(self._n_candidates, totals.size)
        drawn = np.argpartition(-keys, count - 1)[:count]
        order: NDArray[np.int64] = drawn[np.argsort(-keys[drawn], kind="stable")]
        return order


class GroupBeam(Beam):
    """One of several groups, with the semantics of version 4 of transformers: the later ones have no groups.

    Hypotheses that reach the limit are no candidates there: what runs at the end competes, if anything can still win.
    """

    def __init__(self, task: Task, source: int) -> None:
        super().__init__(task, source)
        self._best_total = NEG_INF  # of this step's continuations, complete ones among them

    def _end(self, node: Node) -> tuple[Finish, int] | None:
        end = super()._end(node)
        return None if end is not None and end[0] == "length" else end

    def _finish(self, best: Candidates, nodes: list[Node], ends: list[tuple[Finish, int] | None]) -> None:
        self._best_total = best.totals[0]
        super()._finish(best, nodes, ends)

    def _go_on(self, best: Candidates, nodes: list[Node], complete: list[bool]) -> tuple[list[int], list[int]]:
        move = super()._go_on(best, nodes, complete)
        if self.length == self.prompt.limit:
            if not self.over:
                self._add_running()
            self.can_improve = False
        return move

    def _add_running(self) -> None:
        penalty = float(self.length**self.task.options.length_penalty)
        running = [
            Finished(node, float(score) / penalty, "length", self.length)
            for node, score in zip(self.nodes, self.scores, strict=True)
            if score > NEG_INF
        ]
        self.finished = sorted(self.finished + running, key=lambda hypothesis: -hypothesis.score)[: self.width]

    def _highest(self) -> np.float32:
        return self._best_total
