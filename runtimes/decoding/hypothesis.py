"""The results of a decode: targets in reading order, with the details that the options request."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fatdeploy.spec import ModelSpec

Finish = Literal["eos", "length", "stop", "cancelled"]


@dataclass(frozen=True)
class Hypothesis:
    """One target in reading order without BOS and EOS, and what ended it.

    ``finish`` is ``eos`` (the model ended it), ``length`` (the limit), ``stop`` (a stop sequence) or ``cancelled`` (the
    deadline). ``tokens`` include a forced prefix. ``text`` is None if the bundle has no tokenizer; ``dropped`` is the
    number of tokens that were cut from a source that was too long. ``score`` ranks the targets of one source: the sum
    of all log-probabilities including EOS; for beams divided by the length to the power of the length penalty; for
    parallel models their mean. ``log_probs`` and ``alignments`` cover the tokens after the prefix; ``alignments`` are
    cross-attention weights [T, S], averaged over heads, for bundles exported with them. ``alternatives`` are further
    targets of the same source: the next best beams, best first, or the other samples as they were drawn.
    """

    tokens: tuple[int, ...]
    finish: Finish
    text: str | None = None
    dropped: int = 0
    score: float | None = None
    log_probs: tuple[float, ...] | None = None
    alignments: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    alternatives: tuple["Hypothesis", ...] = ()


@dataclass(frozen=True)
class RawTarget:
    """One target in the order of generation."""

    tokens: tuple[int, ...]  # after the prefix, without EOS
    finish: Finish
    score: float | None = None
    log_probs: tuple[float, ...] | None = None
    alignments: NDArray[np.float32] | None = None


def hypothesis_from_raw(targets: list[RawTarget], prefix: tuple[int, ...], spec: ModelSpec) -> Hypothesis:
    """Return the best of a source's targets in reading order, with the others as its alternatives."""
    step = -1 if spec.target_order == "right_to_left" else 1

    def read(target: RawTarget, alternatives: tuple[Hypothesis, ...] = ()) -> Hypothesis:
        return Hypothesis(
            (*prefix, *target.tokens)[::step],
            target.finish,
            score=target.score,
            log_probs=None if target.log_probs is None else target.log_probs[::step],
            alignments=None if target.alignments is None else target.alignments[::step],
            alternatives=alternatives,
        )

    best, *others = targets
    return read(best, tuple(read(target) for target in others))
