"""Location-aware and monotonic attention: their formulas, their states, training, margins of choices, refusals."""

from typing import Any

import numpy as np
import pytest
import torch

from fatdeploy.errors import ConfigError, ExportFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.cross.decisions import recorded_margins
from fatdeploy.export.reference.cross.following import MonotonicAttention
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS
from tests.support.choices import name_of
from tests.support.oracles.checks import SIZES, batch_of, check_close, check_steps, check_whole, double_model
from tests.support.oracles.following import expected_weights

VARIANTS: list[dict[str, Any]] = [
    {"norm": "pre"},
    {"norm": "post", "cross_wiring": "mixed"},
    {"decoder_attention": "linear", "copy": True},
    {"inner_width": 32, "decoder_heads": 4, "biases": False, "norm": "pre"},
]
LOCATION, MONOTONIC = {"cross_attention": "location"}, {"cross_attention": "monotonic"}


@pytest.mark.parametrize("changes", VARIANTS, ids=name_of)
@pytest.mark.parametrize("kind", [MONOTONIC, *({**LOCATION, "location_window": window} for window in (0, 3, 30))])
def test_an_attention_that_follows_computes_its_formula_whole_and_in_steps(
    kind: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = double_model(**kind, **changes)
    check_whole(model)
    check_steps(model)


def cross_weights(**changes: Any) -> np.ndarray:
    """Return the weights [B, H, T, S] of the last layer for the batch of the oracles."""
    model = double_model(**changes)
    source, mask, target = batch_of(model.config)
    last = model.config.decoder_layers - 1
    with torch.no_grad():
        decoded, _ = model.decode(target, model.stateless(), model.encode(source, mask), weights_of=last)
    return decoded.weights[last].numpy()


def test_a_monotonic_head_looks_at_one_position_and_never_goes_back() -> None:
    weights = cross_weights(**MONOTONIC)
    assert set(np.unique(weights)) == {0.0, 1.0}
    np.testing.assert_array_equal(weights.sum(-1), 1)
    reached = weights.argmax(-1)
    assert (np.diff(reached, axis=-1) >= 0).all()
    assert reached[0].max() > 3
    assert len(np.unique(reached[0])) > 3


def test_a_location_aware_head_knows_where_it_looked_and_nothing_of_padding() -> None:
    weights, blind = cross_weights(**LOCATION), cross_weights(cross_attention="additive")
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-12)
    assert not weights[1, ..., 9:].any()
    # Its weights at the first step are those of additive attention: nothing was looked at yet.
    assert np.abs(weights[0, :, 0] - blind[0, :, 0]).max() < 0.5
    assert np.abs(weights[0, :, 5] - weights[0, :, 0]).max() > 0.01


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"), [(LOCATION, ("rows", 2, "source"), "float32"), (MONOTONIC, ("rows", 2), "int64")]
)
def test_the_state_of_a_layer_comes_after_its_caches(kind: dict[str, Any], shape: tuple[Any, ...], dtype: str) -> None:
    spec = double_model(**kind).spec
    names = ["keys.0", "values.0", "attended.0" if kind == LOCATION else "reached.0"]
    assert [tensor.name for tensor in spec.state[:3]] == names
    assert (spec.state[2].shape, spec.state[2].dtype, spec.state[2].kind) == (shape, dtype, "recurrent")
    assert not spec.starts


def attention_and_inputs(scores: torch.Tensor) -> tuple[MonotonicAttention, torch.Tensor, torch.Tensor]:
    """Return an attention without noise, and queries and keys whose scores are the given ones [H, t, S]."""
    heads, _, length = scores.shape
    sizes = {**SIZES, "width": heads * length, "heads": heads, "positions": "none"}
    config = config_from_preset("transformer-tiny", **{**sizes, **MONOTONIC})
    attention = MonotonicAttention(config).double()
    keys = torch.eye(length, dtype=torch.float64).expand(1, heads, length, length)
    return attention, scores[None, :, None] * length**0.5, keys


@pytest.mark.parametrize("size", [1.0, 5.0, 300.0])
@torch.no_grad()
def test_weights_of_training_are_the_probabilities_of_the_choices(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fatdeploy.export.reference.cross.following.CHOICE_NOISE", 0.0)
    scores = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # The largest are certain: then the probabilities are the choices of inference.
    scores = scores.sign() * size if size == 300 else scores * size
    attention, queries, keys = attention_and_inputs(scores)
    for length in (8, 5, 1):
        valid = torch.arange(8)[None] < length
        weights = attention.expected(queries, keys, valid)[0, :, 0]
        assert not weights[..., length:].any()
        for head in range(2):
            check_close(weights[head, :, :length], expected_weights(scores[head, :, :length].tolist()), f"{length}")
        if size == 300:
            hard, _ = attention.followed(queries, keys, valid, torch.zeros(1, 2, 1, dtype=torch.int64))
            assert torch.equal(weights.round(decimals=9), hard[0, :, 0])


def test_scores_of_any_size_have_finite_gradients() -> None:
    scores = torch.linspace(-3e4, 3e4, 2 * 6 * 8, dtype=torch.float64).view(2, 6, 8).flip(1).requires_grad_()
    attention, queries, keys = attention_and_inputs(scores)
    weights = attention.float().expected(queries.float(), keys.float(), torch.arange(8)[None] < 7)
    (weights * torch.arange(8)).sum().backward()
    assert weights.isfinite().all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    np.testing.assert_allclose(weights.detach().sum(-1), 1, rtol=1e-5)


@torch.no_grad()
def test_training_is_soft_and_noisy_and_inference_is_neither() -> None:
    model = double_model(**MONOTONIC, dropout=0.0)
    source, mask, target = batch_of(model.config)
    assert torch.equal(model(source, mask, target), model(source, mask, target))
    model.train()
    assert not torch.equal(model(source, mask, target), model(source, mask, target))


@torch.no_grad()
def test_margins_are_those_of_the_scores_that_decided() -> None:
    scores = torch.full((1, 3, 5), -2.0, dtype=torch.float64)
    scores[0, 0, 1], scores[0, 1, 1], scores[0, 1, 3], scores[0, 2, 0] = 0.5, -0.25, 8.0, 0.001
    attention, queries, keys = attention_and_inputs(scores)
    valid, before = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 1, 1, dtype=torch.int64)
    with recorded_margins() as margins:
        weights, after = attention.followed(queries, keys, valid, before)
    assert (weights[0, 0, 0].argmax(-1).tolist(), after.item()) == ([1, 3, 4], 4)
    # 0.25 of 8: the score of 0.001 is behind the head, and the last position needs no score.
    np.testing.assert_allclose(torch.cat(margins), [0.25 / 8], rtol=1e-12)


def test_sources_whose_choices_are_not_clear_are_not_probes() -> None:
    model = double_model(**MONOTONIC).float()
    probe = drawn_probe(EagerEngine(model), [7, 5, 3], 12)
    with recorded_margins() as margins:
        model(torch.from_numpy(probe.source), torch.from_numpy(probe.mask), torch.from_numpy(probe.tokens))
    assert len(margins) == model.config.decoder_layers
    for layer in model.decoder.stack():
        layer.cross.q.weight.data.zero_()
        layer.cross.q.bias.data.zero_()
        layer.cross.head_bias.data.fill_(SAFE_MARGINS * NOISE / 2)  # type: ignore[union-attr,operator]
    with pytest.raises(ExportFailed, match="decide by chance"):
        drawn_probe(EagerEngine(model), [7], 12)


@pytest.mark.parametrize("kind", ["location", "monotonic"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decoding": "parallel", "decoder_attention": "full"}, "{kind} needs the weights of the step before"),
        ({"hybrid": True}, "hybrid: skips steps of the cross-attention, and each step of {kind} needs the one before"),
        ({"decoder_attention": "lstm"}, "{kind} has a state, and a recurrent decoder keeps only that of its cells"),
    ],
)
def test_what_has_no_earlier_weights_is_refused(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.format(kind=kind)):
        config_from_preset("transformer-tiny", cross_attention=kind, **changes)


def test_a_window_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="location_window: must be at least 0, found -1"):
        ModelConfig(**{**vars(config_from_preset("transformer-tiny")), "location_window": -1})
