"""Every attention of the reference models against its formula: padded batches against loops without padding."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.sparse import layouts
from tests.support.oracles.checks import batch_of, check_steps, check_whole, double_model

MIX = ("strided", "local", "global_tokens")
UNIONS = ("local+strided", "scaled_dot", "strided+global_tokens", "local+strided+global_tokens")
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
    "unions": {"encoder_attention": UNIONS, "heads": 4, "window": 1, "stride": 4},
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
ADDED: dict[str, dict[str, Any]] = {
    "alone": {"encoder_attention": "global_tokens", "n_global_tokens": 3},
    "with a window": {"encoder_attention": "local+global_tokens", "n_global_tokens": 1, "window": 1},
    "beside heads without them": {"encoder_attention": (*UNIONS[:3], "local"), "heads": 4, "n_global_tokens": 5},
}


@pytest.mark.parametrize(("direction", "norm"), [*((name, "pre") for name in DIRECTIONS), ("both", "post")])
@pytest.mark.parametrize("changes", ENCODERS.values(), ids=ENCODERS)
def test_encoder_attention_in_every_direction(changes: dict[str, Any], direction: str, norm: str) -> None:
    check_whole(double_model(norm=norm, encoder_direction=direction, decoder_layers=1, **changes))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("changes", WITHOUT_DIRECTION.values(), ids=WITHOUT_DIRECTION)
def test_encoder_attention_that_mixes_all_positions(changes: dict[str, Any], norm: str) -> None:
    check_whole(double_model(norm=norm, decoder_layers=1, **changes))


@pytest.mark.parametrize("relative", RELATIVES)
@pytest.mark.parametrize("changes", list(ENCODERS.values())[:9], ids=list(ENCODERS)[:9])
def test_encoder_attention_with_relative_scores(changes: dict[str, Any], relative: str) -> None:
    check_whole(double_model(relative=relative, decoder_layers=1, **changes))
    check_whole(double_model(relative=relative, decoder_layers=1, encoder_direction="right_to_left", **changes))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", ["local", "strided"])
def test_layouts_for_long_sources_compute_the_same_formulas(
    kind: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of four queries, so that a source has several.
    monkeypatch.setattr(layouts, "LEAST_BLOCK", 4)
    monkeypatch.setattr(layouts, "WHOLE_UP_TO", 0)
    changes: dict[str, Any] = {"encoder_attention": kind, "encoder_direction": direction, "decoder_layers": 1}
    for window in (0, 3, 5):
        check_whole(double_model(**{**changes, "window": window, "stride": window + 1}))
    for relative in (*RELATIVES, "matrix"):
        check_whole(double_model(relative=relative, **changes))
        check_whole(double_model(relative=relative, relative_each_layer=True, norm="post", **changes))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["local", "strided"])
def test_layouts_for_long_sources_give_what_the_mask_gives_on_the_whole_source(kind: str) -> None:
    source, mask = torch.arange(700).remainder(37)[None] + 3, torch.arange(700)[None] < 650
    results = []
    for longest in (layouts.WHOLE_UP_TO, 700):
        model = double_model(encoder_attention=kind, max_source=longest, positions="none", window=9, stride=4)
        model.spec = replace(model.spec, max_source=700)
        results.append(model.encode(source, mask).keys[0][:, :, :650])
    assert {
        type(layouts.layout_of(config_from_preset("fat-tiny", max_source=n, encoder_attention=kind), 0))
        for n in (512, 513)
    } == {
        layouts.AllPairs,
        layouts.Windows if kind == "local" else layouts.Strides,
    }
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("relative", ["none", *RELATIVES, "matrix"])
@pytest.mark.parametrize("changes", ADDED.values(), ids=ADDED)
def test_global_tokens_that_are_added(changes: dict[str, Any], relative: str) -> None:
    changes = {"global_tokens": "added", "relative": relative, "decoder_layers": 1, **changes}
    check_whole(double_model(**changes))
    check_whole(double_model(norm="post", relative_each_layer=relative != "none", **changes))


def test_a_ring_with_vectors_per_distance() -> None:
    model = double_model(decoder_attention="local", relative="matrix", relative_window=2)
    check_whole(model)
    check_steps(model)


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
@pytest.mark.parametrize("wiring", ["last", "matched"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_cross_attention(kind: str, wiring: str, norm: str) -> None:
    check_whole(double_model(cross_attention=kind, cross_wiring=wiring, norm=norm))


@pytest.mark.parametrize("form", ["tanh", "tanh_bounded", "softmax"])
@pytest.mark.parametrize("wiring", ["last", "matched"])
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
