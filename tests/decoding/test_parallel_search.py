"""Parallel (NAT) decoding: a batch = its rows alone; length head, EOS cut and candidates against plain loops."""

import math

import numpy as np
import pytest
import torch

from fatdeploy.errors import SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from tests.support.choices import drawn_batch, tiny

VARIANTS = [
    {},
    {"norm": "pre", "relative": "table"},
    {"norm": "pre", "relative": "angle", "cross_attention": "fast_fc"},
    {"copy": True, "head": "mlp"},
    {"cross_attention": "additive", "cross_wiring": "matched", "encoder_attention": "slow"},
]
LENGTHS = [6, 1, 12]


def nat(changes: dict) -> ReferenceModel:
    return tiny({"max_target": 24, **changes}, base="transformer-nat")


def drawn_sources(model: ReferenceModel) -> list[list[int]]:
    source, mask, _ = drawn_batch(model.config, LENGTHS, 1)
    return [row[real].tolist() for row, real in zip(source, mask, strict=True)]


def logits_alone(model: ReferenceModel, source: list[int], length: int) -> np.ndarray:
    """Return the logits [T, V] of one source at one length, unpadded, in float64."""
    reads = torch.full((1, length), model.config.bos_id)
    ids = torch.tensor([source])
    return model(ids, torch.ones_like(ids, dtype=torch.bool), reads)[0].numpy()


def length_scores(model: ReferenceModel, source: list[int]) -> list[float]:
    """Return the length head's scores from the mean of the encoder's outputs, in a plain loop."""
    ids = torch.tensor([source])
    outputs: list[torch.Tensor] = []
    hook = model.encoder.register_forward_hook(lambda *call: outputs.append(call[-1][-1]))
    model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
    hook.remove()
    vectors = outputs[0][0].tolist()
    mean = [math.fsum(column) / len(vectors) for column in zip(*vectors, strict=True)]
    assert model.length is not None
    rows = zip(model.length.weight.tolist(), model.length.bias.tolist(), strict=True)
    return [math.fsum(w * x for w, x in zip(weights, mean, strict=True)) + bias for weights, bias in rows]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_a_batch_of_different_lengths_gives_what_its_rows_give_alone(changes: dict) -> None:
    model = nat(changes).double()
    source, mask, _ = drawn_batch(model.config, LENGTHS, 1)
    lengths = torch.tensor([4, 20, 9])
    reads = torch.where(torch.arange(20) < lengths[:, None], model.config.bos_id, model.config.pad_id)
    whole = model(source, mask, reads).numpy()
    for row, (ids, length) in enumerate(zip(drawn_sources(model), lengths.tolist(), strict=True)):
        np.testing.assert_allclose(whole[row, :length], logits_alone(model, ids, length), rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_the_length_head_decides_how_long_a_target_is(changes: dict) -> None:
    model = nat(changes).double()
    sources = drawn_sources(model)
    results = decode(EagerEngine(model), sources)
    lengths = []
    for ids, result in zip(sources, results, strict=True):
        scores = length_scores(model, ids)
        lengths.append(scores.index(max(scores)) + 1)
        assert result == Hypothesis(tuple(logits_alone(model, ids, lengths[-1]).argmax(-1).tolist()), "eos")
    assert len(set(lengths)) > 1


@torch.inference_mode()
def test_an_eos_cut_target_ends_at_its_first_eos() -> None:
    endless = nat({"length": "eos"}).double()
    assert endless.length is None
    sources = drawn_sources(endless)
    raw = [logits_alone(endless, ids, 24).argmax(-1).tolist() for ids in sources]
    # A token that only some rows contain stands in for EOS; the numbers do not depend on which one it is.
    eos = next(token for row in raw for token in row[1:] if token > 2 and not all(token in other for other in raw))
    model = nat({"length": "eos", "eos_id": eos}).double()
    expected = [
        Hypothesis(tuple(row[: row.index(eos)]), "eos") if eos in row else Hypothesis(tuple(row), "length")
        for row in raw
    ]
    assert decode(EagerEngine(model), sources) == expected
    assert {result.finish for result in expected} == {"eos", "length"}


@torch.inference_mode()
def test_length_candidates_are_ranked_by_their_mean_log_probability() -> None:
    model = nat({}).double()
    sources = drawn_sources(model)
    results = decode(EagerEngine(model), sources, DecodeOptions(length_candidates=4))
    firsts = 0
    for ids, result in zip(sources, results, strict=True):
        scores = length_scores(model, ids)
        candidates = sorted(range(1, 25), key=lambda length: -scores[length - 1])[:4]
        means = []
        for length in candidates:
            logits = logits_alone(model, ids, length)
            log_probs = [max(row) - math.log(math.fsum(math.exp(x) for x in row)) for row in logits.tolist()]
            means.append(math.fsum(log_probs) / length)
        best = candidates[means.index(max(means))]
        firsts += best == candidates[0]
        assert result.tokens == tuple(logits_alone(model, ids, best).argmax(-1).tolist())
    assert firsts < len(sources)


@torch.inference_mode()
def test_a_limit_cuts_the_lengths_that_are_considered() -> None:
    model = nat({}).double()
    for ids, result in zip(
        drawn_sources(model),
        decode(EagerEngine(model), drawn_sources(model), DecodeOptions(max_new_tokens=3)),
        strict=True,
    ):
        scores = length_scores(model, ids)[:3]
        assert len(result.tokens) == scores.index(max(scores)) + 1


def test_a_second_call_on_a_parallel_state_is_refused() -> None:
    engine = EagerEngine(nat({}))
    state = engine.encode(np.array([[5, 6]]), np.ones((1, 2), bool), Capacity(1, 24))
    engine.step(np.full((1, 5), 1), state, Want.LOGITS)
    with pytest.raises(SpecMismatch, match="decodes all positions in one call"):
        engine.step(np.full((1, 5), 1), state, Want.LOGITS)


def test_a_right_to_left_parallel_model_reads_in_reading_order() -> None:
    forward, backward = (EagerEngine(nat({"target_order": order})) for order in ("left_to_right", "right_to_left"))
    [result], [other] = decode(forward, [[5, 6, 7]]), decode(backward, [[5, 6, 7]])
    assert result.tokens == other.tokens[::-1]
