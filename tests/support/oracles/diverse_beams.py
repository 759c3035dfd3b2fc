"""Group beam search as version 4.50 of transformers does it for one source, in plain loops."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Floats

Beginning = tuple[int, ...]
# The log-probabilities of the next token after a beginning, and a function that changes them.
LogProbsOf = Callable[[Beginning], Floats]
Change = Callable[[Beginning, Floats], Floats]


@dataclass
class Kept:
    """``BeamHypotheses``: the best complete targets of a group."""

    size: int
    penalty: float
    targets: list[tuple[float, Beginning]] = field(default_factory=list)

    def add(self, tokens: Beginning, total: float, length: int) -> None:
        score = total / length**self.penalty
        if len(self.targets) < self.size or score > min(self.targets)[0]:
            self.targets.append((score, tokens))
            if len(self.targets) > self.size:
                self.targets.remove(min(self.targets, key=lambda target: target[0]))

    def is_done(self, best: float, length: int, options: DecodeOptions) -> bool:
        if len(self.targets) < self.size or options.early_stopping is True:
            return len(self.targets) >= self.size
        if options.early_stopping == "never" and self.penalty > 0:
            length = options.max_new_tokens or 0
        return min(self.targets)[0] >= best / length**self.penalty


@dataclass
class Group:
    """The open beams of a group, best first, and its complete targets."""

    kept: Kept
    beams: list[tuple[float, Beginning]] = field(default_factory=lambda: [(0.0, ())])
    done: bool = False

    def advance(
        self, chosen: list[int], log_probs_of: LogProbsOf, change: Change, options: DecodeOptions, eos: int
    ) -> None:
        """Go on by a token; ``chosen`` are the tokens that earlier groups have chosen at this step."""
        candidates = []
        for total, tokens in self.beams:
            log_probs = log_probs_of(tokens).copy()
            for token, count in Counter(chosen).items():
                log_probs[token] -= np.float32(options.diversity_penalty * count)
            scores = np.float32(total) + change(tokens, log_probs)
            candidates += [(float(score), (*tokens, token)) for token, score in enumerate(scores)]
        size = self.kept.size
        candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * size]
        self.beams = [candidate for candidate in candidates if candidate[1][-1] != eos][:size]
        length = len(candidates[0][1])
        for total, tokens in candidates[:size]:
            if tokens[-1] == eos:
                self.kept.add(tokens, total, length)
        self.done = self.kept.is_done(candidates[0][0], length, options)


def diverse_targets(
    log_probs_of: LogProbsOf, change: Change, options: DecodeOptions, *, eos: int, pad: int
) -> list[tuple[float, Beginning]]:
    """Return scores and targets, EOS among their tokens, best first."""
    width = options.num_beams // options.num_beam_groups
    groups = [Group(Kept(width, options.length_penalty)) for _ in range(options.num_beam_groups)]
    for _ in range(options.max_new_tokens or 0):
        chosen: list[int] = []
        for group in groups:
            if group.done:
                chosen += [pad] * width
                continue
            group.advance(chosen, log_probs_of, change, options, eos)
            chosen += [tokens[-1] for _, tokens in group.beams]
        if all(group.done for group in groups):
            break
    for group in groups:
        if not group.done:
            for total, tokens in group.beams:
                group.kept.add(tokens, total, len(tokens))
    targets = [target for group in groups for target in group.kept.targets]
    return sorted(targets, key=lambda target: -target[0])[: options.num_return_sequences]
