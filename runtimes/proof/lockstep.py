"""Two engines side by side, both reading what the first one chose: every logit of every step is compared. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.certificate import LogitAgreement
from fatdeploy.errors import ParityFailed
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, State, Stepper
from fatdeploy.runtimes.proof.forced import call_count, first_tokens, step_logits
from fatdeploy.spec import Mask, Tokens

# The size of float32 noise in logits, relative to the largest; a margin of ten times it leaves equality no excuse, one
# within twice it is a tie, which two correct computations may decide differently.
NOISE = 1e-5
SAFE_MARGINS = 10
TIE_MARGINS = 2


@dataclass(frozen=True)
class Comparison:
    """What the reference and an engine chose for a batch; arrays are [B, T]."""

    expected: Tokens
    found: Tokens
    chosen: Floats  # the logits of the engine's tokens
    differences: Floats  # the largest of any logit of the vocabulary
    margins: Floats  # between the reference's best and second best logit
    bounds: NDArray[np.float64]  # [B], how far two correct fp32 computations of a row's logits may be apart
    undecided: NDArray[np.bool_] | None = (
        None  # [B], rows whose encoder decides within the noise; None if it never does
    )

    @property
    def ties(self) -> NDArray[np.bool_]:
        """Where another token was chosen, but the reference's margin is within the noise.

        Where the encoder's own decision is, all numbers of a row may differ: every step that shows it is a tie.
        """
        near: NDArray[np.bool_] = self.margins <= TIE_MARGINS * self.bounds[:, None]
        ties: NDArray[np.bool_] = (near & (self.expected != self.found)) | self._excused
        return ties

    @property
    def misses(self) -> NDArray[np.bool_]:
        """Where the engine is wrong: another token without the excuse of a tie, or a logit beyond its bound."""
        wrong = self._beyond | ((self.expected != self.found) & ~self.ties)
        misses: NDArray[np.bool_] = wrong & ~self._excused
        return misses

    @property
    def _beyond(self) -> NDArray[np.bool_]:
        beyond: NDArray[np.bool_] = ~(self.differences <= self.bounds[:, None])  # NaN is beyond
        return beyond

    @property
    def _excused(self) -> NDArray[np.bool_]:
        """Where logits differ because the encoder decided otherwise; an infinite or missing number has no excuse."""
        undecided = np.zeros(len(self.bounds), bool) if self.undecided is None else self.undecided
        excused: NDArray[np.bool_] = undecided[:, None] & self._beyond & np.isfinite(self.differences)
        return excused

    @property
    def explained(self) -> Floats:
        """The differences that are rounding: those of a row whose encoder decided otherwise are none."""
        explained: Floats = np.where(self._excused, 0.0, self.differences)
        return explained

    @property
    def first_miss(self) -> tuple[int, int] | None:
        """Return row and step of the earliest miss."""
        places = np.argwhere(self.misses)
        if not places.size:
            return None
        row, step = min(places.tolist(), key=lambda place: (place[1], place[0]))
        return row, step

    def described(self, row: int, step: int) -> str:
        """Return what is wrong at a place."""
        difference = f"logits differ by {self.differences[row, step]:.1e}, bound {self.bounds[row]:.1e}"
        if self.expected[row, step] == self.found[row, step]:
            return f"row {row}, step {step}: {difference}"
        return (
            f"row {row}, step {step}: the reference says token {self.expected[row, step]} (margin "
            f"{self.margins[row, step]:.1e}), the engine {self.found[row, step]}; {difference}"
        )


def compared(engine: Stepper[Any], reference: Stepper[Any], source: Tokens, mask: Mask, steps: int) -> Comparison:
    """Compare an engine with the reference on a batch; both read the reference's tokens, and EOS ends nothing."""
    # Only a few numbers of each step's logits are kept: all of them would be half a gigabyte for a base model.
    columns = [
        (
            *(reference_logits.argmax(-1), logits.argmax(-1), logits.max(-1)),
            *(np.abs(reference_logits - logits).max(-1), margins_of(reference_logits)),
            np.abs(reference_logits).max(-1),
        )
        for reference_logits, logits in _side_by_side(reference, engine, source, mask, steps)
    ]
    expected, tokens, chosen, differences, margins, sizes = (
        np.concatenate(column, 1) for column in zip(*columns, strict=True)
    )
    return Comparison(expected, tokens, chosen, differences, margins, NOISE * np.maximum(1.0, sizes.max(1)))


def logit_agreement(comparisons: Sequence[Comparison]) -> LogitAgreement:
    """Return the result of several comparisons; a miss is ParityFailed."""
    for index, comparison in enumerate(comparisons):
        place = comparison.first_miss
        if place is not None:
            raise ParityFailed(f"batch {index}, {comparison.described(*place)}")
    return LogitAgreement(
        rows=sum(len(comparison.expected) for comparison in comparisons),
        tokens=sum(comparison.expected.size for comparison in comparisons),
        ties=int(sum(comparison.ties.sum() for comparison in comparisons)),
        largest_difference=max(float(comparison.explained.max()) for comparison in comparisons),
        largest_of_bound=max(
            float((comparison.explained / comparison.bounds[:, None]).max()) for comparison in comparisons
        ),
        smallest_margin=min(float(comparison.margins.min()) for comparison in comparisons),
    )


def margins_of(logits: Floats) -> Floats:
    """Return how far the best logit is above the second best."""
    top: Floats = np.partition(logits, -2, axis=-1)[..., -2:]
    margins: Floats = top[..., 1] - top[..., 0]
    return margins


def greedy_calls(engine: Stepper[State], source: Tokens, mask: Mask, steps: int) -> Iterator[Floats]:
    """Yield the logits [B, t, V] of each call of a greedy decode that EOS does not end."""
    for logits, _ in _side_by_side(engine, None, source, mask, steps):
        yield logits


def _side_by_side(
    leader: Stepper[Any], follower: Stepper[Any] | None, source: Tokens, mask: Mask, steps: int
) -> Iterator[tuple[Floats, Floats]]:
    """Yield both engines' logits of each call; a leader alone is its own follower."""
    engines = [leader] if follower is None else [leader, follower]
    states = [engine.encode(source, mask, Capacity(1, steps)) for engine in engines]
    tokens = first_tokens(leader.spec, len(source), steps)
    try:
        for _ in range(call_count(leader.spec, steps)):
            logits = [step_logits(engine, tokens, state) for engine, state in zip(engines, states, strict=True)]
            yield logits[0], logits[-1]
            tokens = logits[0].argmax(-1)
    finally:
        for engine, state in zip(engines, states, strict=True):
            engine.release(state)
