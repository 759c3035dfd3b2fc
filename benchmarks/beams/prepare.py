"""Write what the turns of ``beams`` read, unless it exists: the reference's beams on safe sources."""

import json
import sys

import numpy as np
import torch

from benchmarks.harness.prepare import prepared_model, write_arrays
from benchmarks.harness.settings import DecodeSizes
from benchmarks.peers.ctranslate2_model import prepare_ctranslate2_model
from fatdeploy.export.models.eager import EagerEngine, EagerState
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Rows, StepOut, Want
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS
from fatdeploy.spec import Mask, Tokens

ATTEMPTS = 200  # per source


class UnsafeSource(Exception):
    """Two correct computations may find other beams, or EOS may end one."""


class MarginEngine:
    """The reference, which raises where noise may decide a beam or EOS is among the candidates.

    Where EOS is never a candidate, it does not matter whether a search treats EOS as an end or as a token.
    """

    def __init__(self, engine: EagerEngine, beams: int, steps: int) -> None:
        self.engine, self.spec = engine, engine.spec
        self._beams, self._steps = beams, steps

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> EagerState:
        """Read one source."""
        self._totals = np.zeros(1, np.float64)  # of the log-probabilities of each row
        self._parents = np.zeros(1, np.int64)
        self._best: tuple[Floats, Tokens] | None = None  # [R, k] each
        self._left = self._steps
        return self.engine.encode(source, mask, capacity)

    def step(self, tokens: Tokens, state: EagerState, want: Want) -> StepOut:
        """Feed tokens; raise if the choice after them is not safe."""
        is_first = self._best is None
        self._follow(tokens[:, -1])
        out = self.engine.step(tokens, state, Want.LOGITS)
        logits = torch.from_numpy(out.logits)
        top = logits.log_softmax(-1).topk(min(self.spec.top_k, self.spec.vocab_size))
        self._best = log_probs, ids = top.values[:, -1].numpy(), top.indices[:, -1].numpy()
        self._left -= 1
        # All rows have read the same at first, and one of them chooses.
        choosing = slice(1) if is_first else slice(None)
        self._check(
            self._totals[choosing, None] + log_probs[choosing],
            ids,
            SAFE_MARGINS * NOISE * max(1.0, float(logits.abs().max())),
        )
        if want is Want.LOGITS:
            return out
        return StepOut(top_log_probs=top.values.numpy(), top_ids=top.indices.numpy())

    def reorder(self, state: EagerState, rows: Rows) -> None:
        """Move rows, and remember their parents."""
        self._parents = rows
        self.engine.reorder(state, rows)

    def release(self, state: EagerState) -> None:
        """Release a state."""
        self.engine.release(state)

    def _follow(self, chosen: Tokens) -> None:
        """Add the log-probability of each row's token to the total of its parent."""
        if self._best is None:
            self._totals = np.zeros(len(chosen), np.float32)
        else:
            log_probs, ids = (array[self._parents] for array in self._best)
            columns = (ids == chosen[:, None]).argmax(1)
            self._totals = self._totals[self._parents] + log_probs[np.arange(len(chosen)), columns]
        self._parents = np.arange(len(chosen))

    def _check(self, totals: Floats, ids: Tokens, bound: float) -> None:
        if (ids[:, : 2 * self._beams] == self.spec.eos_id).any():
            raise UnsafeSource
        ranked = np.sort(totals.ravel())[::-1]
        gaps = ranked[: self._beams] - ranked[1 : 1 + self._beams]
        # Before the last step it matters which beams remain, at the last step also their order.
        if (gaps if not self._left else gaps[-1:]).min() < bound:
            raise UnsafeSource


def prepare_beams(preset: str, cases: list[tuple[int, int]], sizes: DecodeSizes) -> None:
    """Write the bundle, the CTranslate2 model, and for each batch and number of beams the reference's targets."""
    models = sizes.models(preset)
    model = prepared_model(models)
    prepare_ctranslate2_model(model, models.ctranslate2)
    engine = EagerEngine(model)
    for batch, beams in cases:
        path = models.beams(batch, beams, sizes.source, sizes.target)
        if not path.exists():
            draw = np.random.default_rng([batch, beams])
            rows = [safe_row(engine, beams, sizes, draw) for _ in range(batch)]
            source, tokens, first, scores = (np.stack(arrays) for arrays in zip(*rows, strict=True))
            write_arrays(path, source=source, tokens=tokens, first=first, scores=scores)


def safe_row(
    engine: EagerEngine, beams: int, sizes: DecodeSizes, draw: np.random.Generator
) -> tuple[Tokens, Tokens, Tokens, Floats]:
    """Return a source [S], its best targets [n, T], those of one step [n, 1], and the scores [n] of the best."""
    special = {engine.spec.pad_id, engine.spec.bos_id, engine.spec.eos_id}
    ids = [token for token in range(engine.spec.vocab_size) if token not in special]
    for _ in range(ATTEMPTS):
        source = draw.choice(ids, sizes.source)
        try:
            first, best = (_best(engine, source, beams, steps) for steps in (1, sizes.target))
        except UnsafeSource:
            continue
        scores = [np.nan if beam.score is None else beam.score for beam in best]
        tokens, single = (np.array([beam.tokens for beam in hypotheses]) for hypotheses in (best, first))
        return source, tokens, single, np.array(scores)
    raise SystemExit(f"none of {ATTEMPTS} random sources is safe for {sizes.target} steps of {beams} beams")


def _best(engine: EagerEngine, source: Tokens, beams: int, steps: int) -> list[Hypothesis]:
    options = DecodeOptions(max_new_tokens=steps, num_beams=beams, num_return_sequences=beams)
    decode(MarginEngine(engine, beams, steps), [source], options)
    # The engine above only checks margins: the targets come from the reference itself.
    [best] = decode(engine, [source], options)
    return [best, *best.alternatives]


def main() -> None:
    """Prepare what the argument describes."""
    described = json.loads(sys.argv[1])
    for preset, cases in described["cases"].items():
        prepare_beams(preset, [(batch, beams) for batch, beams in cases], DecodeSizes(**described["sizes"]))
    print("null")


if __name__ == "__main__":
    main()
