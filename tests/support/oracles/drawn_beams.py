"""The exact distribution of beam sampling for one source, with the semantics of transformers, in plain loops."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Floats

Beginning = tuple[int, ...]
Scored = tuple[tuple[float, Beginning], ...]


@dataclass(frozen=True)
class DrawnBeams:
    """A search for one source; ``log_probs_of`` returns those of the next token after a beginning."""

    log_probs_of: Callable[[Beginning], Floats]
    options: DecodeOptions
    eos: int

    def distribution(self) -> dict[Beginning, float]:
        """Return the probability of each best target, EOS among its tokens."""

        @cache
        def best_of(running: Scored, finished: Scored, length: int) -> tuple[tuple[Beginning, float], ...]:
            if self._over(running, finished, length):
                return ((finished[0][1], 1.0),)
            chances: Counter[Beginning] = Counter()
            for drawn, chance in self._draws(running):
                for target, rest in best_of(*self._continued(drawn, finished, length + 1), length + 1):
                    chances[target] += chance * rest
            return tuple(chances.items())

        return dict(best_of(((0.0, ()),), (), 0))

    def _over(self, running: Scored, finished: Scored, length: int) -> bool:
        options = self.options
        if length == options.max_new_tokens or not running:
            return True
        if len(finished) < options.num_beams:
            return False
        return options.early_stopping is True or running[0][0] / length**options.length_penalty <= finished[-1][0]

    def _draws(self, running: Scored) -> list[tuple[Scored, float]]:
        """Return every order in which continuations can be drawn without replacement, with its probability."""
        candidates = [
            (total + float(score), (*tokens, token))
            for total, tokens in running
            for token, score in enumerate(self._narrowed(self.log_probs_of(tokens)))
            if score > -np.inf
        ]
        weights = np.exp(np.array([total for total, _ in candidates]) - max(total for total, _ in candidates))
        draws = []
        for order in permutations(range(len(candidates)), min(2 * self.options.num_beams, len(candidates))):
            left, chance = weights.sum(), 1.0
            for index in order:
                chance *= weights[index] / left
                left -= weights[index]
            draws.append((tuple(candidates[index] for index in order), float(chance)))
        return draws

    def _continued(self, drawn: Scored, finished: Scored, length: int) -> tuple[Scored, Scored]:
        beams, at_limit = self.options.num_beams, length == self.options.max_new_tokens
        ended = [at_limit or tokens[-1] == self.eos for _, tokens in drawn]
        new = [
            (total / length**self.options.length_penalty, tokens)
            for (total, tokens), is_ended in zip(drawn[:beams], ended, strict=False)
            if is_ended
        ]
        running = [candidate for candidate, is_ended in zip(drawn, ended, strict=True) if not is_ended]
        return _best(running, beams), _best([*finished, *new], beams)

    def _narrowed(self, log_probs: Floats) -> Floats:
        scores = log_probs.astype(np.float64) / self.options.temperature
        if self.options.top_k:
            # A token that is not EOS can always be drawn.
            least = np.sort(scores)[-max(self.options.top_k, 2)]
            scores[scores < least] = -np.inf
        return scores


def _best(targets: list[tuple[float, Beginning]], count: int) -> Scored:
    return tuple(sorted(targets, key=lambda target: -target[0])[:count])
