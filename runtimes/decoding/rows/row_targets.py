"""What the rows of a greedy search or of samples have written: a place per source, used again by later sources."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.decoding.hypothesis import Finish, RawTarget
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens


class RowTargets:
    """One target per slot. A source has a place of ``rows_per_source`` adjacent slots until another takes it."""

    def __init__(self, task: Task, first: Sequence[int], sampler: Sampler | None) -> None:
        self.task, self._sampler = task, sampler
        self.rows_per_source = task.options.num_return_sequences
        n_slots = len(first) * self.rows_per_source
        self.tokens: Tokens = np.full((n_slots, int(task.ends.max())), task.spec.pad_id, np.int64)
        self.begins, self.ends, self.sources = (np.zeros(n_slots, np.int64) for _ in range(3))
        self.kept = [0] * n_slots  # new tokens that count, per finished slot
        self.finishes: list[Finish] = ["cancelled"] * n_slots
        self.generators: list[np.random.Generator] = [np.random.default_rng(0)] * n_slots if sampler else []
        self.log_probs = np.zeros(self.tokens.shape, np.float32) if task.options.scores else None
        self.alignments: Floats | None = None
        self._arrivals = np.arange(len(first))  # which of the sources that ever began has each place
        self._results: list[list[RawTarget]] = [[] for _ in first]
        for place, source in enumerate(first):
            self._begin(place, source)

    def slots(self, place: int) -> slice:
        """Return the slots of a place."""
        return slice(place * self.rows_per_source, (place + 1) * self.rows_per_source)

    def replace(self, place: int, source: int) -> None:
        """Keep the targets of a finished source, and let another begin at its place."""
        self._results[self._arrivals[place]] = self._targets(place, 0)
        self._arrivals[place] = len(self._results)
        self._results.append([])
        self._begin(place, source)

    def end(self, slot: int, finish: Finish, length: int) -> None:
        """End a target after this many tokens, including its prompt."""
        self.finishes[slot], self.kept[slot] = finish, max(0, length - int(self.begins[slot]))

    def align(self, slots: NDArray[np.int64], places: int | NDArray[np.int64], weights: Floats) -> None:
        """Record weights [n, S] at one place of each slot; nothing reads those of finished rows and of prompts."""
        if self.alignments is None:
            # The sources that begin first are the longest.
            self.alignments = np.zeros((*self.tokens.shape, weights.shape[-1]), np.float32)
        self.alignments[slots, places, : weights.shape[-1]] = weights

    def results(self, lengths: NDArray[np.int64]) -> list[list[RawTarget]]:
        """Return the targets of each source that ever began; unfinished slots have tokens up to these lengths."""
        for place, arrival in enumerate(self._arrivals.tolist()):
            # The rows of a source step together.
            self._results[arrival] = self._targets(place, int(lengths[place * self.rows_per_source]))
        return list(self._results)

    def _begin(self, place: int, source: int) -> None:
        slots, prompt = self.slots(place), self.task.prompts[source]
        self.begins[slots], self.ends[slots], self.sources[slots] = len(prompt.tokens), prompt.end, source
        self.tokens[slots, : len(prompt.tokens)] = prompt.tokens
        self.finishes[slots] = ["cancelled"] * self.rows_per_source
        if self._sampler is not None:
            self.generators[slots] = self._sampler.generators(self.task.sources[source], self.rows_per_source)

    def _targets(self, place: int, length: int) -> list[RawTarget]:
        slots = self.slots(place)
        return [self._target(slot, length) for slot in range(slots.start, slots.stop)]

    def _target(self, slot: int, length: int) -> RawTarget:
        finish, begin = self.finishes[slot], int(self.begins[slot])
        kept = max(0, length - begin) if finish == "cancelled" else self.kept[slot]
        counted = kept + (finish == "eos")
        log_probs = None if self.log_probs is None else self.log_probs[slot, begin:]
        alignments = None if self.alignments is None else self.alignments[slot, begin:]
        source_length = len(self.task.sources[int(self.sources[slot])])
        return RawTarget(
            tuple(self.tokens[slot, begin : begin + kept].tolist()),
            finish,
            score=None if log_probs is None else float(log_probs[:counted].sum()),
            log_probs=None if log_probs is None else tuple(log_probs[:kept].tolist()),
            # A copy: another source will write here.
            alignments=None if alignments is None else alignments[:kept, :source_length].copy(),
        )
