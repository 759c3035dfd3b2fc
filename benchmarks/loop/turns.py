"""One turn of the decode loop in a process of its own, over an engine that costs nothing: what is left is the loop."""

import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Rows, StepOut, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

CaseName = Literal["greedy", "beams", "top_p", "beams_ngrams"]

BEAMS, NGRAM, TOP_P = 4, 3, 0.9
WARM_UP = 8  # steps of a decode that are not timed
NEIGHBOURS = 4  # steps on either side of one whose allocations are counted with it

OPTIONS: dict[CaseName, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": BEAMS},
    "top_p": {"sample": True, "top_p": TOP_P},
    "beams_ngrams": {"num_beams": BEAMS, "no_repeat_ngram_size": NGRAM},
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Which search, over how many sources and tokens."""

    case: CaseName
    batch: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What all turns of a run have in common."""

    steps: int
    repetitions: int
    positions: tuple[int, int]  # whose allocations are compared


class CostlessEngine:
    """Says the same of every step, in arrays made before; all rows of a source are alike, EOS is no choice."""

    def __init__(self, batch: int, beams: int, spec: ModelSpec) -> None:
        self.spec = spec
        # As wide as those of a trained model: some tokens stand out, most are out of the question.
        logits = 4 * np.random.default_rng(0).standard_normal((batch, 1, spec.vocab_size), np.float32)
        logits[..., spec.eos_id] = logits.min() - 1
        self.log_probs: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self._said = {
            rows: {want: self._out(rows // batch, want) for want in (Want.LOGITS, Want.TOPK)}
            for rows in {batch, batch * beams}
        }

    def _out(self, each: int, want: Want) -> StepOut:
        log_probs = np.repeat(self.log_probs, each, 0)
        if want is Want.LOGITS:
            return StepOut(logits=log_probs)
        ids = np.argsort(-log_probs, -1, kind="stable")[..., : self.spec.top_k].copy()
        return StepOut(top_log_probs=np.take_along_axis(log_probs, ids, -1), top_ids=ids)

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> None:
        """Read nothing."""

    def step(self, tokens: Tokens, state: None, want: Want) -> StepOut:  # noqa: ARG002
        """Return what was made before."""
        return self._said[len(tokens)][want]

    def reorder(self, state: None, rows: Rows) -> None:
        """Move nothing: rows of a source are alike."""

    def output_rows(self, ids: Rows) -> Floats | None:  # noqa: ARG002
        """Return no matrix: there is none."""
        return None

    def length_log_probs(self, state: None) -> Floats:
        """Return nothing: the model is autoregressive."""
        raise NotImplementedError

    def release(self, state: None) -> None:
        """Take nothing back."""

    def close(self) -> None:
        """Hold nothing."""


def overhead(turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """Return seconds of single steps, and the bytes that one allocates at an early and a late position."""
    spec = ModelSpec(
        vocab_size=turn.vocab_size, max_source=8, max_target=sizes.steps, pad_id=0, bos_id=1, eos_id=2, top_k=16
    )
    options = DecodeOptions(max_new_tokens=sizes.steps, **OPTIONS[turn.case])
    engine = CostlessEngine(turn.batch, options.num_beams, spec)
    found = decoded(engine, turn.batch, options, lambda decoding, _: decoding.advance())
    CHECKS[turn.case](found, engine, sizes.steps)
    seconds: list[float] = []

    def timed(decoding: Decoding, step: int) -> bool:
        started = time.perf_counter()
        goes_on = decoding.advance()
        ended = time.perf_counter()
        # The last step collects what was said.
        if goes_on and step >= WARM_UP:
            seconds.append(ended - started)
        return goes_on

    for _ in range(sizes.repetitions):
        if decoded(engine, turn.batch, options, timed) != found:
            raise SystemExit("two decodes differ: no time was recorded")
    return {"seconds": seconds, "bytes": allocated(engine, turn.batch, options, sizes.positions)}


def decoded(
    engine: CostlessEngine, batch: int, options: DecodeOptions, advance: Callable[[Decoding, int], bool]
) -> list[Hypothesis]:
    """Decode sources that differ, as samples of equal ones would be equal, a step of ``advance`` at a time."""
    sources = [[3 + index] for index in range(batch)]
    with Decoding(engine, sources, options) as decoding:
        step = 0
        while advance(decoding, step):
            step += 1
        return decoding.results()


def allocated(
    engine: CostlessEngine, batch: int, options: DecodeOptions, positions: tuple[int, int]
) -> dict[str, float]:
    """Return by how much a step's allocations exceed what was there before it, the median around each position."""
    wanted = {position + offset for position in positions for offset in range(-NEIGHBOURS, NEIGHBOURS + 1)}
    peaks: dict[int, int] = {}

    def traced(decoding: Decoding, step: int) -> bool:
        if step not in wanted:
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


def _check_best(found: Sequence[Hypothesis], engine: CostlessEngine, steps: int) -> None:
    """Every step says the same, so the best target repeats the best token."""
    best = engine.log_probs[:, 0].argmax(-1).tolist()
    _expect(all(one.tokens == (token,) * steps for one, token in zip(found, best, strict=True)))


def _check_drawn(found: Sequence[Hypothesis], engine: CostlessEngine, steps: int) -> None:
    """What is drawn is among the fewest tokens whose probability is top-p."""
    for one, row in zip(found, engine.log_probs[:, 0], strict=True):
        order = np.argsort(-row, kind="stable")
        count = 1 + int(np.searchsorted(np.cumsum(np.exp(row[order], dtype=np.float64)), TOP_P))
        _expect(len(one.tokens) == steps and {*one.tokens} <= {*order[:count].tolist()} and len({*one.tokens}) > 1)


def _check_new(found: Sequence[Hypothesis], engine: CostlessEngine, steps: int) -> None:
    """The best token comes as often as it may, and nothing is said twice."""
    for one, token in zip(found, engine.log_probs[:, 0].argmax(-1).tolist(), strict=True):
        ngrams = [one.tokens[start : start + NGRAM] for start in range(steps - NGRAM + 1)]
        _expect(len(one.tokens) == steps and len({*ngrams}) == len(ngrams) and (token,) * NGRAM in ngrams)


def _expect(holds: bool) -> None:
    if not holds:
        raise SystemExit("the tokens are not those that the scores ask for: no time was recorded")


CHECKS: dict[CaseName, Callable[[Sequence[Hypothesis], CostlessEngine, int], None]] = {
    "greedy": _check_best,
    "beams": _check_best,
    "top_p": _check_drawn,
    "beams_ngrams": _check_new,
}


def main() -> None:
    """Do the turn that the argument describes, and print its result."""
    described = json.loads(sys.argv[1])
    print(json.dumps(overhead(Turn(**described["turn"]), Sizes(**described["sizes"]))))


if __name__ == "__main__":
    main()
