"""Every option that changes scores or ends targets means what it means in ``generate`` of transformers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sampling import Sampler
from fatdeploy.runtimes.engines.protocol import Floats
from tests.support.hugging_face import (
    EOS,
    FAMILIES,
    MAX_SOURCE,
    VOCABULARY,
    HuggingFaceEngine,
    generated,
    lively_model,
)

TOLERANCE = 1e-4
in_every_family = pytest.mark.parametrize("family", FAMILIES)
Ids = list[int]


class Draw:
    """Draws options around sources and a plain target, so that most of them change something."""

    def __init__(self, seed: Sequence[int], family: str) -> None:
        self.random = np.random.default_rng(seed)
        self.engine = HuggingFaceEngine(lively_model(family, float(self.random.choice([0.5, 1.5, 2.5]))))
        lengths = self.random.permutation(MAX_SOURCE)[: self.whole(1, 4)] + 1
        self.sources = [self.ids(int(length)) for length in lengths]

    def whole(self, low: int, high: int) -> int:
        """Return a number from low to high."""
        return int(self.random.integers(low, high + 1))

    def likely(self, probability: float = 0.4) -> bool:
        return bool(self.random.random() < probability)

    def ids(self, count: int) -> Ids:
        drawn: Ids = self.random.integers(VOCABULARY, size=count).tolist()
        return drawn

    def search(self, beams: int) -> DecodeOptions:
        """Return greedy decoding or a beam search, without any other option."""
        options = DecodeOptions(max_new_tokens=self.whole(1, 16), scores=True)
        if beams == 1:
            return options
        return replace(
            options,
            num_beams=beams,
            num_return_sequences=self.whole(1, beams),
            length_penalty=float(self.random.uniform(0.5, 2)),
            early_stopping=[True, False, "never"][self.whole(0, 2)],
        )

    def controls(self, options: DecodeOptions) -> DecodeOptions:
        """Return the options with some others."""
        target = [*decode(self.engine, self.sources[:1], options)[0].tokens, *self.ids(4)]
        eos_ids = list(dict.fromkeys([*([EOS] if self.likely() else []), *self.ids(self.whole(1, 2))]))
        options = replace(
            options,
            forced_bos_id=self.whole(0, VOCABULARY - 1) if self.likely() else None,
            forced_eos_id=(EOS if self.likely(0.7) else self.whole(0, VOCABULARY - 1)) if self.likely() else None,
            eos_ids=eos_ids if self.likely() else [],
            prefix=self.ids(self.whole(1, 4)) if self.likely(0.25) else [],
            min_new_tokens=self.whole(0, options.max_new_tokens or 0) if self.likely(0.25) else 0,
            repetition_penalty=float(self.random.uniform(0.7, 2)) if self.likely(0.25) else 1.0,
            encoder_repetition_penalty=float(self.random.uniform(0.5, 2)) if self.likely() else 1.0,
            no_repeat_ngram_size=self.whole(1, 3) if self.likely(0.25) else 0,
            encoder_no_repeat_ngram_size=self.whole(1, 3) if self.likely() else 0,
            sequence_bias=self.biases(target) if self.likely() else [],
            exponential_decay_length_penalty=(
                (self.whole(0, 6), float(self.random.uniform(0.8, 1.6))) if self.likely() else None
            ),
            renormalize=self.likely(0.5),
        )
        forced = (options.forced_bos_id, options.forced_eos_id)
        # Suppressing a forced token would leave no token at all.
        allowed = [token for token in target if token not in forced]
        return replace(
            options,
            suppress_tokens=allowed[1:3] if self.likely(0.25) else [],
            begin_suppress_tokens=allowed[: self.whole(1, 3)] if self.likely() else [],
        )

    def biases(self, target: Ids) -> list[tuple[Ids, float]]:
        """Return biases of sequences that occur, and of some that begin with a token that was read."""
        begins = self.random.integers(len(target), size=5).tolist()
        sequences = [target[begin : begin + 1 + length % 3] for length, begin in enumerate(begins)]
        sequences.append([self.engine.spec.bos_id, self.whole(0, VOCABULARY - 1)])
        return [(sequence, float(self.random.normal(0, 3))) for sequence in sequences]


def check_each(draw: Draw, options: DecodeOptions) -> list[Hypothesis]:
    """Compare our batch with one call of ``generate`` per source, tokens and scores."""
    results = decode(draw.engine, draw.sources, options)
    for source, best in zip(draw.sources, results, strict=True):
        [theirs] = generated(draw.engine.model, [source], options)
        # With too few continuations transformers fills up with targets at -1e9.
        theirs = [target for target in theirs if target.score > -1e6]
        ours = [best, *best.alternatives]
        assert [(target.tokens, target.finish) for target in ours] == [
            (target.tokens, target.finish) for target in theirs
        ]
        for target, other in zip(ours, theirs, strict=True):
            assert target.score == pytest.approx(other.score, rel=TOLERANCE, abs=TOLERANCE)
            assert target.log_probs == pytest.approx(other.log_probs, rel=TOLERANCE, abs=TOLERANCE)
    return results


@in_every_family
@pytest.mark.parametrize("seed", range(25))
def test_greedy_decoding_with_any_options_gives_the_tokens_of_transformers(family: str, seed: int) -> None:
    draw = Draw([10, seed], family)
    check_each(draw, draw.controls(draw.search(1)))


@in_every_family
@pytest.mark.parametrize("seed", range(50))
def test_beams_with_any_options_find_what_transformers_finds(family: str, seed: int) -> None:
    draw = Draw([11, seed], family)
    check_each(draw, draw.controls(draw.search(draw.whole(2, 6))))
