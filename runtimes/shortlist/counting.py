"""How often which target tokens go with which source tokens: by attention, or by what occurs together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.protocol import Floats, Ids
from fatdeploy.runtimes.shortlist.table import LexicalTable
from fatdeploy.spec import ModelSpec

Weights = NDArray[np.float64]
# Rounds of expectation and maximisation; the order of a token's best partners changes little afterwards.
ROUNDS = 5
# Lines whose pairs of tokens are in memory at once.
LINES = 128
# A token that the model would choose with less probability says nothing about the source.
LEAST = 1e-4


@dataclass(frozen=True)
class AlignedLine:
    """A source and what the model would choose at each step of its target, likeliest first."""

    source: Ids  # [S]
    ids: Ids  # [T, k]
    weights: Floats  # [T, k], probabilities
    attention: Floats | None = None  # [T, S]

    def likely(self) -> tuple[Ids, Weights, NDArray[np.int64]]:
        """Return the choices that matter, their probabilities, and the step of each."""
        steps, places = np.nonzero(self.weights >= LEAST)
        return self.ids[steps, places], self.weights[steps, places].astype(np.float64), steps


@dataclass
class TokenCounts:
    """Counts over lines, which become a table."""

    spec: ModelSpec
    lines: list[AlignedLine] = field(default_factory=list)

    def table(self, *, per_token: int, frequent: int, copies: bool) -> LexicalTable:
        """Return the most frequent target tokens, and the best ``per_token`` of each source token without these."""
        spec = self.spec
        often = np.bincount(np.concatenate([line.ids.ravel() for line in self.lines]), minlength=spec.vocab_size)
        often[[*spec.silent_ids]] = 0
        base = np.sort(np.argsort(-often, kind="stable")[: min(frequent, int(np.count_nonzero(often)))])
        keys, counts = self._pairs()
        sources, targets = np.divmod(keys, spec.vocab_size)
        order = np.lexsort((-counts, sources))
        ranks = np.arange(len(keys)) - np.searchsorted(sources, sources)
        kept = np.sort(order[ranks < per_token])
        kept = kept[~np.isin(targets[kept], [*base.tolist(), *spec.silent_ids])]
        tokens, starts = np.unique(sources[kept], return_index=True)
        ends = np.append(starts, len(kept))
        return LexicalTable(base, tokens, ends, targets[kept], copies)

    def _pairs(self) -> tuple[Ids, Weights]:
        """Return keys, source times vocabulary plus target, in order, and how often each pair belongs together."""
        if all(line.attention is not None for line in self.lines):
            return self._attended()
        keys = np.unique(np.concatenate([np.unique(part.keys) for part in self._parts()]))
        owners = keys // self.spec.vocab_size
        likely = counts = np.ones(len(keys))
        for _ in range(ROUNDS):
            counts = np.zeros(len(keys))
            for part in self._parts():
                places = np.searchsorted(keys, part.keys)
                shares = likely[places]
                shares *= part.weights / np.bincount(part.choices, shares)[part.choices]
                counts += np.bincount(places, shares, len(keys))
            likely = counts / np.bincount(owners, counts)[owners]
        return keys, counts

    def _attended(self) -> tuple[Ids, Weights]:
        pairs: list[tuple[Ids, Weights]] = []
        for line in self.lines:
            targets, weights, steps = line.likely()
            attention = np.zeros((1, 1)) if line.attention is None else line.attention
            keys = (line.source * self.spec.vocab_size)[None] + targets[:, None]
            pairs.append((keys.ravel(), (weights[:, None] * attention[steps]).ravel()))
        keys, places = np.unique(np.concatenate([keys for keys, _ in pairs]), return_inverse=True)
        counts: Weights = np.bincount(places, np.concatenate([weights for _, weights in pairs])).astype(np.float64)
        return keys, counts

    def _parts(self) -> Iterator["_Pairs"]:
        for start in range(0, len(self.lines), LINES):
            yield _pairs_of(self.lines[start : start + LINES], self.spec.vocab_size)


@dataclass(frozen=True)
class _Pairs:
    """Every source token of some lines with every choice of the same line."""

    keys: Ids
    weights: Weights  # the probability of the choice
    choices: NDArray[np.int64]  # the number of the choice


def _pairs_of(lines: Sequence[AlignedLine], vocab_size: int) -> _Pairs:
    keys, weights, choices, count = [], [], [], 0
    for line in lines:
        sources = np.unique(line.source)
        targets, probabilities, _ = line.likely()
        keys.append((sources * vocab_size + targets[:, None]).ravel())
        weights.append(np.repeat(probabilities, len(sources)))
        choices.append(np.repeat(np.arange(count, count + len(targets)), len(sources)))
        count += len(targets)
    return _Pairs(np.concatenate(keys), np.concatenate(weights), np.concatenate(choices))
