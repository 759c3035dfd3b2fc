"""One turn of the decode loop in a process of its own, over an engine that costs nothing: only the loop is measured."""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.harness.rounds import print_turn
from benchmarks.harness.settings import NEIGHBOURS
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Rows, StepOut, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

CaseName = Literal["greedy", "beams", "top_p", "beams_ngrams"]

BEAMS, NGRAM, TOP_P = 4, 3, 0.9
WARM_UP = 8  # steps at the start of a decode that are not timed

OPTIONS: dict[CaseName, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": BEAMS},
    "top_p": {"sample": True, "top_p": TOP_P},
    "beams_ngrams": {"num_beams": BEAMS, "no_repeat_ngram_size": NGRAM},
}


@dataclass(frozen=True, kw_only=True)
class LoopTurn:
    """Which search, over how many sources and with how large a vocabulary."""

    case: CaseName
    batch: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class LoopSizes:
    """What all turns of a run have in common."""

    steps: int
    repetitions: int
    positions: tuple[int, int]  # whose allocations are compared


class CostlessEngine:
    """Returns the same prepared arrays at every step; all rows of a source are alike, EOS is the least likely token.

    Processors change scores in place, so with ``fresh`` they are written again at every step, as by an engine.
    """

    def __init__(self, batch: int, beams: int, spec: ModelSpec, *, fresh: bool = False) -> None:
        self.spec, self.fresh = spec, fresh
        # Spread like those of a trained model: a few tokens stand out, most are very unlikely.
        logits = 4 * np.random.default_rng(0).standard_normal((batch, 1, spec.vocab_size), np.float32)
        logits[..., spec.eos_id] = logits.min() - 1
        self.log_probs: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self._outputs = {
            rows: {want: self._out(rows // batch, want) for want in (Want.LOGITS, Want.TOPK)}
            for rows in {batch, batch * beams}
        }

    def _out(self, rows_per_source: int, want: Want) -> StepOut:
        log_probs = np.repeat(self.log_probs, rows_per_source, 0)
        if want is Want.LOGITS:
            return StepOut(logits=log_probs)
        ids = np.argsort(-log_probs, -1, kind="stable")[..., : self.spec.top_k].copy()
        return StepOut(top_log_probs=np.take_along_axis(log_probs, ids, -1), top_ids=ids)

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> None:
        """Read nothing."""

    def step(self, tokens: Tokens, state: None, want: Want) -> StepOut:  # noqa: ARG002
        """Return prepared arrays."""
        out = self._outputs[len(tokens)][want]
        if self.fresh and out.logits is not None:
            by_source = out.logits.reshape(len(self.log_probs), -1, self.spec.vocab_size)
            np.copyto(by_source, self.log_probs)
        return out

    def reorder(self, state: None, rows: Rows) -> None:
        """Move nothing: rows of a source are alike."""

    def output_rows(self, ids: Rows) -> Floats | None:  # noqa: ARG002
        """Return None: there is no output matrix."""
        return None

    def output_bias(self, ids: Rows) -> Floats | None:  # noqa: ARG002
        """Return None: there is no output matrix."""
        return None

    def length_log_probs(self, state: None) -> Floats:
        """Raise: the model is autoregressive."""
        raise NotImplementedError

    def release(self, state: None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def overhead(turn: LoopTurn, sizes: LoopSizes) -> dict[str, Any]:
    """Return seconds of single steps, and the bytes that a step allocates at an early and a late position."""
    spec = ModelSpec(
        vocab_size=turn.vocab_size, max_source=8, max_target=sizes.steps, pad_id=0, bos_id=1, eos_id=2, top_k=16
    )
    options = DecodeOptions(max_new_tokens=sizes.steps, **OPTIONS[turn.case])
    engine = CostlessEngine(turn.batch, options.num_beams, spec, fresh=turn.case == "beams_ngrams")
    expected = decoded(engine, turn.batch, options, lambda decoding, _: decoding.advance())
    CHECKS[turn.case](expected, engine, sizes.steps)
    seconds: list[float] = []

    def timed(decoding: Decoding, step: int) -> bool:
        started = time.perf_counter()
        goes_on = decoding.advance()
        ended = time.perf_counter()
        # The last step collects the results.
        if goes_on and step >= WARM_UP:
            seconds.append(ended - started)
        return goes_on

    for _ in range(sizes.repetitions):
        if decoded(engine, turn.batch, options, timed) != expected:
            raise SystemExit("two decodes differ: no time was recorded")
    return {"seconds": seconds, "bytes": allocated(engine, turn.batch, options, sizes.positions)}


def decoded(
    engine: CostlessEngine, batch: int, options: DecodeOptions, advance: Callable[[Decoding, int], bool]
) -> list[Hypothesis]:
    """Decode, one step per call of ``advance``. The sources differ, because samples of equal sources would be equal."""
    sources = [[3 + index] for index in range(batch)]
    with Decoding(engine, sources, options) as decoding:
        step = 0
        while advance(decoding, step):
            step += 1
        return decoding.results()


def allocated(
    engine: CostlessEngine, batch: int, options: DecodeOptions, positions: tuple[int, int]
) -> dict[str, float]:
    """Return the bytes that a step allocates at its peak, as the median around each position."""
    measured = {position + offset for position in positions for offset in range(-NEIGHBOURS, NEIGHBOURS + 1)}
    peaks: dict[int, int] = {}

    def traced(decoding: Decoding, step: int) -> bool:
        if step not in measured:
            return decoding.advance()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        goes_on = decoding.advance()
        peaks[step] = tracemalloc.get_traced_memory()[1] - before
        return goes_on

    tracemalloc.start()
    decoded(engine, batch, options, traced)
    tracemalloc.stop()
    return {
        f"position_{position}": float(
            np.median([peaks[position + offset] for offset in range(-NEIGHBOURS, NEIGHBOURS + 1)])
        )
        for position in positions
    }


def _check_best(hypotheses: Sequence[Hypothesis], engine: CostlessEngine, steps: int) -> None:
    """Every step scores alike, so the best target repeats the best token."""
    best = engine.log_probs[:, 0].argmax(-1).tolist()
    _expect(all(hypothesis.tokens == (token,) * steps for hypothesis, token in zip(hypotheses, best, strict=True)))


def _check_drawn(hypotheses: Sequence[Hypothesis], engine: CostlessEngine, steps: int) -> None:
    """Every drawn token is among the fewest tokens whose probability is top-p."""
    for hypothesis, row in zip(hypotheses, engine.log_probs[:, 0], strict=True):
        order = np.argsort(-row, kind="stable")
        count = 1 + int(np.searchsorted(np.cumsum(np.exp(row[order], dtype=np.float64)), TOP_P))
        tokens = hypothesis.tokens
        _expect(len(tokens) == steps and {*tokens} <= {*order[:count].tolist()} and len({*tokens}) > 1)


def _check_new(hypotheses: Sequence[Hypothesis], engine: CostlessEngine, steps: int) -> None:
    """The best token comes as often as it may, and no n-gram comes twice."""
    for hypothesis, token in zip(hypotheses, engine.log_probs[:, 0].argmax(-1).tolist(), strict=True):
        ngrams = [hypothesis.tokens[start : start + NGRAM] for start in range(steps - NGRAM + 1)]
        _expect(len(hypothesis.tokens) == steps and len({*ngrams}) == len(ngrams) and (token,) * NGRAM in ngrams)


def _expect(holds: bool) -> None:
    if not holds:
        raise SystemExit("the tokens do not follow from the scores: no time was recorded")


CHECKS: dict[CaseName, Callable[[Sequence[Hypothesis], CostlessEngine, int], None]] = {
    "greedy": _check_best,
    "beams": _check_best,
    "top_p": _check_drawn,
    "beams_ngrams": _check_new,
}


if __name__ == "__main__":
    print_turn(LoopTurn, LoopSizes, overhead)
