"""What a decode gives: targets in reading order, with what was asked for about them."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fatdeploy.spec import ModelSpec

Finish = Literal["eos", "length", "stop", "cancelled"]


@dataclass(frozen=True)
class Hypothesis:
    """One target in reading order without BOS and EOS, and what ended it.

    That is the model (``eos``), the limit, a stop sequence, or a deadline (``cancelled``). A forced prefix is part of
    ``tokens``. ``text`` is there if the bundle has a tokenizer; ``dropped`` tokens of the source were cut because it
    was too long. ``score`` ranks targets of one source: the sum of all log-probabilities, EOS's too; for beams divided
    by the length to the power of the length penalty; for parallel models their mean. ``log_probs`` are those of the
    tokens after the prefix, and so are ``alignments``: cross-attention weights [T, S], mean over heads, of bundles
    exported with them. ``alternatives`` are further targets of the same source: of beams the next best, best first; of
    samples the others, as they were drawn.
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
    """One target as it was generated, in the order of generation."""

    tokens: tuple[int, ...]  # after the prefix, without EOS
    finish: Finish
    score: float | None = None
    log_probs: tuple[float, ...] | None = None
    alignments: NDArray[np.float32] | None = None


def hypothesis_from_raw(said: list[RawTarget], prefix: tuple[int, ...], spec: ModelSpec) -> Hypothesis:
    """Return the best of several targets of a source in reading order, the others as its alternatives."""
    step = -1 if spec.target_order == "right_to_left" else 1

    def read(one: RawTarget, alternatives: tuple[Hypothesis, ...] = ()) -> Hypothesis:
        return Hypothesis(
            (*prefix, *one.tokens)[::step],
            one.finish,
            score=one.score,
            log_probs=None if one.log_probs is None else one.log_probs[::step],
            alignments=None if one.alignments is None else one.alignments[::step],
            alternatives=alternatives,
        )

    best, *others = said
    return read(best, tuple(read(one) for one in others))
