"""Write what the turns of ``beams`` read, where it is not there yet: the reference's beams on safe sources."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.beams.turns import BeamSizes
from benchmarks.harness.prepare import prepared_model
from benchmarks.harness.turns import Cache
from benchmarks.peers.ctranslate2_model import write_ctranslate2_model
from fatdeploy.export.models.eager import EagerEngine, EagerState
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Rows, StepOut, Want
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS
from fatdeploy.spec import Mask, Tokens

ATTEMPTS = 200  # of a source


class Unsafe(Exception):
    """A search that two correct computations may end differently, or that EOS may end."""


class MarginEngine:
    """The reference, which refuses to go on where a beam is decided by noise or EOS is among its candidates.

    Whether a search treats EOS as an end or as a token makes no difference to sources on which it never comes up.
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
        """Feed tokens; raise where what follows is not safe."""
        self._follow(tokens[:, -1])
        out = self.engine.step(tokens, state, Want.LOGITS)
        logits = torch.from_numpy(out.logits)
        top = logits.log_softmax(-1).topk(min(self.spec.top_k, self.spec.vocab_size))
        self._best = log_probs, ids = top.values[:, -1].numpy(), top.indices[:, -1].numpy()
        self._left -= 1
        self._check(log_probs, ids, SAFE_MARGINS * NOISE * max(1.0, float(logits.abs().max())))
        if want is Want.LOGITS:
            return out
        return StepOut(top_log_probs=top.values.numpy(), top_ids=top.indices.numpy())

    def reorder(self, state: EagerState, rows: Rows) -> None:
        """Move rows, and remember how."""
        self._parents = rows
        self.engine.reorder(state, rows)

    def release(self, state: EagerState) -> None:
        """Take a state back."""
        self.engine.release(state)

    def _follow(self, said: Tokens) -> None:
        """Add what each row says to what its parent had."""
        if self._best is not None:
            log_probs, ids = (array[self._parents] for array in self._best)
            columns = (ids == said[:, None]).argmax(1)
            self._totals = self._totals[self._parents] + log_probs[np.arange(len(said)), columns]
        self._parents = np.arange(len(said))

    def _check(self, log_probs: Floats, ids: Tokens, bound: float) -> None:
        if (ids[:, : 2 * self._beams] == self.spec.eos_id).any():
            raise Unsafe
        totals = np.sort((self._totals[:, None] + log_probs).ravel())[::-1]
        gaps = totals[: self._beams] - totals[1 : 1 + self._beams]
        # Until the end it matters which beams there are, then also in which order.
        if (gaps if not self._left else gaps[-1:]).min() < bound:
            raise Unsafe


def prepare_beams(preset: str, cases: list[tuple[int, int]], sizes: BeamSizes) -> None:
    """Write the bundle, the CTranslate2 model, and for each batch and number of beams what the reference finds."""
    cache = Cache(Path(sizes.cache), preset)
    model = prepared_model(cache)
    if not cache.ctranslate2.exists():
        write_ctranslate2_model(model, cache.ctranslate2)
    engine = EagerEngine(model)
    for batch, beams in cases:
        path = cache.beams(batch, beams, sizes.source, sizes.target)
        if not path.exists():
            draw = np.random.default_rng([batch, beams])
            rows = [safe_row(engine, beams, sizes, draw) for _ in range(batch)]
            columns = zip(*rows, strict=True)
            np.savez(
                new := path.with_suffix(".new.npz"),
                **dict(zip(("source", "tokens", "first", "scores"), map(np.stack, columns), strict=True)),
            )
            new.replace(path)


def safe_row(
    engine: EagerEngine, beams: int, sizes: BeamSizes, draw: np.random.Generator
) -> tuple[Tokens, Tokens, Tokens, Floats]:
    """Return a source [S], its best targets [n, T], those of one step [n, 1], and the scores [n] of the former."""
    special = {engine.spec.pad_id, engine.spec.bos_id, engine.spec.eos_id}
    ids = [token for token in range(engine.spec.vocab_size) if token not in special]
    for _ in range(ATTEMPTS):
        source = draw.choice(ids, sizes.source)
        try:
            first, found = (_best(engine, source, beams, steps) for steps in (1, sizes.target))
        except Unsafe:
            continue
        scores = [one.score if one.score is not None else np.nan for one in found]
        tokens, single = (np.array([one.tokens for one in targets]) for targets in (found, first))
        return source, tokens, single, np.array(scores)
    raise SystemExit(f"none of {ATTEMPTS} random sources is safe for {sizes.target} steps of {beams} beams")


def _best(engine: EagerEngine, source: Tokens, beams: int, steps: int) -> list[Hypothesis]:
    options = DecodeOptions(max_new_tokens=steps, num_beams=beams, num_return_sequences=beams)
    decode(MarginEngine(engine, beams, steps), [source], options)
    # Told by the reference itself: the one above only looks on.
    [best] = decode(engine, [source], options)
    return [best, *best.alternatives]


def main() -> None:
    """Prepare what the argument describes."""
    described = json.loads(sys.argv[1])
    for preset, cases in described["cases"].items():
        prepare_beams(preset, [(batch, beams) for batch, beams in cases], BeamSizes(**described["sizes"]))
    print("null")


if __name__ == "__main__":
    main()
