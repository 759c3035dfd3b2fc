"""Every attention of the reference models against its formula: padded batches against loops without padding."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fatdeploy.export.reference.config import ModelConfig
from tests.support.oracles.checks import batch_of, check_steps, check_whole, double_model

MIX = ("strided", "local", "global_tokens")
DIRECTIONS = ("both", "left_to_right", "right_to_left")
ENCODERS: dict[str, dict[str, Any]] = {
    "scaled_dot": {},
    "dot": {"encoder_attention": "dot"},
    "additive": {"encoder_attention": "additive"},
    "slow": {"encoder_attention": "slow"},
    "local": {"encoder_attention": "local"},
    "strided": {"encoder_attention": "strided"},
    "global_tokens": {"encoder_attention": "global_tokens"},
    "mix": {"encoder_attention": MIX, "heads": 3},
    "linear elu": {"encoder_attention": "linear", "features": "elu"},
    "linear random": {"encoder_attention": "linear", "features": "random"},
    "linear performer": {"encoder_attention": "linear", "features": "performer"},
    "synthesizer random": {"encoder_attention": "synthesizer", "synthesizer": "random"},
    "synthesizer dense": {"encoder_attention": "synthesizer", "synthesizer": "dense"},
}
WITHOUT_DIRECTION: dict[str, dict[str, Any]] = {
    "linear softmax": {"encoder_attention": "linear", "features": "softmax"},
    "linformer": {"encoder_attention": "linformer"},
    "compressed": {"encoder_attention": "compressed"},
    "compressed, nothing left over": {"encoder_attention": "compressed", "compression": 3},
}
RELATIVES = ("table", "angle")


@pytest.mark.parametrize(("direction", "norm"), [*((name, "pre") for name in DIRECTIONS), ("both", "post")])
@pytest.mark.parametrize("changes", ENCODERS.values(), ids=ENCODERS)
def test_encoder_attention_in_every_direction(changes: dict[str, Any], direction: str, norm: str) -> None:
    check_whole(double_model(norm=norm, encoder_direction=direction, decoder_layers=1, **changes))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("changes", WITHOUT_DIRECTION.values(), ids=WITHOUT_DIRECTION)
def test_encoder_attention_that_mixes_all_positions(changes: dict[str, Any], norm: str) -> None:
    check_whole(double_model(norm=norm, decoder_layers=1, **changes))


@pytest.mark.parametrize("relative", RELATIVES)
@pytest.mark.parametrize("changes", list(ENCODERS.values())[:8], ids=list(ENCODERS)[:8])
def test_encoder_attention_with_relative_scores(changes: dict[str, Any], relative: str) -> None:
    check_whole(double_model(relative=relative, decoder_layers=1, **changes))
    check_whole(double_model(relative=relative, decoder_layers=1, encoder_direction="right_to_left", **changes))


@pytest.mark.parametrize("kind", ["scaled_dot", "dot", "additive", "local"])
@pytest.mark.parametrize("relative", ["none", *RELATIVES])
def test_decoder_attention_with_caches(kind: str, relative: str) -> None:
    model = double_model("fat-tiny", decoder_attention=kind, relative=relative)
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize("features", ["elu", "random", "performer"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_decoder_attention_is_its_recurrence(features: str, norm: str) -> None:
    model = double_model("fat-tiny", features=features, norm=norm)
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize("where", ["encoder", "decoder"])
def test_the_smallest_denominator_of_random_features(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    denominators: list[float] = []

    def counted(config: ModelConfig, sums: list[float], normaliser: float) -> list[float]:
        denominators.append(normaliser + 1e-6)
        return [value / max(normaliser + 1e-6, 1e-3) for value in sums]

    monkeypatch.setattr("tests.support.oracles.formulas.quotient", counted)
    model = double_model(features="random", random_features=2, **{f"{where}_attention": "linear"})
    for name, buffer in model.named_buffers():
        if name.endswith("projection"):
            buffer *= 4  # angles that are large enough for negative kernels
    check_whole(model)
    assert min(denominators) < 1e-3 < max(denominators)


def test_rows_of_a_performer_are_orthogonal_within_a_width() -> None:
    model = double_model(encoder_attention="linear", features="performer", random_features=17)
    for head in model.encoder.layers[0].attention.features.projection:
        for block in head.split(12):  # at most D rows can be orthogonal, then a new block begins
            products = block @ block.T
            assert products.diag().min() > 1e-3
            assert (products - products.diag().diag()).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["scaled_dot", "dot", "additive"])
@pytest.mark.parametrize("wiring", ["last", "matched", "mixed"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_cross_attention(kind: str, wiring: str, norm: str) -> None:
    check_whole(double_model(cross_attention=kind, cross_wiring=wiring, norm=norm))


@pytest.mark.parametrize("form", ["tanh", "tanh_bounded", "softmax"])
@pytest.mark.parametrize("wiring", ["last", "matched", "mixed"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_fast_fully_connected_softmax(form: str, wiring: str, norm: str) -> None:
    model = double_model(cross_attention="fast_fc", fc_softmax=form, cross_wiring=wiring, norm=norm)
    check_whole(model)
    check_steps(model)


@torch.no_grad()
def test_tanh_bounded_weights_stay_bounded_where_the_published_ones_explode() -> None:
    model = double_model("fat-tiny", hybrid=False)
    source, mask, target = batch_of(model.config)
    cross = model.decoder.layers[-1].cross
    cross.q.weight.zero_()
    cross.q.bias.zero_()
    cross.head_bias.zero_()
    cross.position_scores.copy_(torch.linspace(-900, 900, 20)[:, None].expand(-1, 24))
    last = model.config.decoder_layers - 1
    weights = model.decode(target, model.stateless(), model.encode(source, mask), weights_of=last)[0].weights[last]
    alone = weights[2, 0, :, 0].numpy()  # the row whose source is one token: tanh(s) / (1 + exp(s))
    s = np.linspace(-900, 900, 20)[:19]
    expected = [math.tanh(x) / (1 + math.exp(x)) if x < 700 else 0.0 for x in s]
    np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-300)
    assert alone[0] == -1
    assert weights.abs().max() <= 1
    assert not weights[2, :, :, 1:].any()
