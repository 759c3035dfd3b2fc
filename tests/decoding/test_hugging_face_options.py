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


ALONE: dict[str, DecodeOptions] = {
    "begin_suppress_tokens": DecodeOptions(begin_suppress_tokens=list(range(3, 40))),
    "forced_bos_id": DecodeOptions(forced_bos_id=7),
    "begin_suppress_tokens after forced_bos_id": DecodeOptions(forced_bos_id=7, begin_suppress_tokens=[*range(40)]),
    "forced_eos_id": DecodeOptions(forced_eos_id=EOS),
    "another forced_eos_id": DecodeOptions(forced_eos_id=11),
    "eos_ids": DecodeOptions(eos_ids=[5, 9, EOS, 11, 23, 31]),
    "eos_ids without EOS": DecodeOptions(eos_ids=[5, 9], min_new_tokens=2),
    "encoder_no_repeat_ngram_size": DecodeOptions(encoder_no_repeat_ngram_size=1),
    "encoder_repetition_penalty": DecodeOptions(encoder_repetition_penalty=3.0),
    "exponential_decay_length_penalty": DecodeOptions(exponential_decay_length_penalty=(2, 1.5)),
    "sequence_bias": DecodeOptions(sequence_bias=[([30], 3.0), ([30, 31], 9.0), ([31, 30], -9.0), ([31], 1.0)]),
    "a forbidden sequence": DecodeOptions(sequence_bias=[([token], -float("inf")) for token in range(3, 40)]),
    "renormalize": DecodeOptions(renormalize=True, suppress_tokens=[*range(3, 20)]),
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_an_option_alone_has_the_effect_that_it_has_in_transformers(options: DecodeOptions, beams: int) -> None:
    draw = Draw([12], "bart")
    draw.sources = [draw.ids(1 + 3 * length) for length in range(4)]
    options = replace(options, num_beams=beams, max_new_tokens=14, scores=True)
    results = check_each(draw, options)
    plain = DecodeOptions(num_beams=beams, max_new_tokens=14, scores=True)
    assert [result.tokens for result in results] != [
        result.tokens for result in decode(draw.engine, draw.sources, plain)
    ]


def test_renormalized_beams_have_other_scores_and_greedy_targets_the_same() -> None:
    draw = Draw([13], "marian")
    beams = DecodeOptions(num_beams=3, max_new_tokens=8, suppress_tokens=[*range(3, 30)])
    first, second = (decode(draw.engine, draw.sources, replace(beams, renormalize=value)) for value in (False, True))
    assert all((ours.score or 0) < (theirs.score or 0) for ours, theirs in zip(first, second, strict=True))
    greedy = replace(beams, num_beams=1, scores=True)
    assert decode(draw.engine, draw.sources, greedy) == decode(
        draw.engine, draw.sources, replace(greedy, renormalize=True)
    )


def theirs_after(options: DecodeOptions, scores: Floats) -> Floats:
    """Return the probabilities that transformers leaves, in the order of its ``generate``."""
    names = ("temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
    values = {name: getattr(options, name) for name in names}
    config = GenerationConfig(do_sample=True, **values, **({"min_p": options.min_p} if options.min_p else {}))
    warpers = lively_model("marian", 1.5)._get_logits_processor(config, input_ids_seq_length=1)
    assert isinstance(warpers, LogitsProcessorList)
    # In float64, as ours: no cut-off falls between two roundings.
    processed = warpers(torch.zeros((len(scores), 1), dtype=torch.long), torch.from_numpy(scores.astype(np.float64)))
    probabilities: Floats = processed.softmax(-1).numpy()
    return probabilities


@pytest.mark.parametrize("seed", range(120))
def test_the_cut_offs_of_sampling_leave_what_those_of_transformers_leave(seed: int) -> None:
    random = np.random.default_rng([14, seed])

    def drawn(low: float, high: float, otherwise: float) -> float:
        return float(random.uniform(low, high)) if random.random() < 0.4 else otherwise

    options = DecodeOptions(
        sample=True,
        temperature=drawn(0.3, 2, 1.0),
        top_k=int(drawn(1, 40, 0)),
        top_p=drawn(0.2, 1, 1.0),
        min_p=drawn(0, 0.3, 0.0),
        typical_p=drawn(0.05, 1, 1.0),
        epsilon_cutoff=drawn(0, 0.2, 0.0),
        eta_cutoff=drawn(0, 0.9, 0.0),
    )
    scores = random.normal(0, random.uniform(0.2, 4), (6, VOCABULARY)).astype(np.float32)
    # Tokens that processors forbade, and equals; of those, top-p of transformers may keep only some.
    scores[:, random.permutation(VOCABULARY)[:10]] = -np.inf
    if options.top_p == 1:
        scores[:, :2] = scores[:, 2:4]
    sampler = Sampler(options)
    ours = np.array([sampler.weights(row) / sampler.weights(row).sum() for row in scores])
    np.testing.assert_allclose(ours, theirs_after(options, scores), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        # Surprises of 0.69, 1.39, 2.08, 2.08 around a mean of 1.21: the second token is the most typical one.
        ({"typical_p": 0.2}, [1]),
        ({"typical_p": 0.6}, [0, 1]),
        ({"typical_p": 0.8}, [0, 1, 2, 3]),
        ({"epsilon_cutoff": 0.2}, [0, 1]),
        ({"epsilon_cutoff": 0.9}, [0]),
        # The least probability is min(0.3, sqrt(0.3) * exp(-1.21)) = 0.163.
        ({"eta_cutoff": 0.3}, [0, 1]),
        ({"eta_cutoff": 0.15}, [0, 1, 2, 3]),
        ({"typical_p": 0.2, "epsilon_cutoff": 0.9}, [1]),
        ({"top_k": 1, "typical_p": 0.2}, [0]),
    ],
    ids=str,
)
def test_a_cut_off_keeps_known_tokens(values: dict, kept: Ids) -> None:
    scores = np.log(np.array([4, 2, 1, 1], np.float32))
    assert np.flatnonzero(Sampler(DecodeOptions(sample=True, **values)).weights(scores)).tolist() == kept
