"""What the articles publish beside our own choices: against the formulas, and what skipping a layer leaves behind."""

from typing import Any

import pytest
import torch

from fatdeploy.errors import ConfigError
from fatdeploy.export.reference.cross.fast_fc import last_run
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from tests.support.choices import drawn_batch, name_of, tiny
from tests.support.oracles.checks import check_steps, check_whole, double_model

FAST_FC: dict[str, Any] = {"cross_attention": "fast_fc"}
SKIPS: dict[str, Any] = {"hybrid": True, "hybrid_skips": "layer"}
NO_SELF: dict[str, Any] = {**FAST_FC, "decoder_attention": "none"}
LINEAR: dict[str, Any] = {**FAST_FC, **SKIPS, "decoder_attention": "linear"}
FFN: dict[str, Any] = {"ffn_skip": True, "ffn_width": 24}
ALL = {"ffn_width": 24}  # the width of the oracle's models


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(
    "changes",
    [
        {**FAST_FC, "fc_keys": "embedded"},
        {**FAST_FC, "fc_keys": "embedded", "cross_wiring": "matched", "source_embedding_norm": "after"},
        {**FAST_FC, "fc_table": "vocabulary"},
        {**FAST_FC, "fc_table": "vocabulary", "fc_softmax": "softmax"},
        {**FAST_FC, "fc_table": "vocabulary", "tie_embeddings": False, "source_vocab_size": 31},
        {**FAST_FC, "fc_scale": False, "fc_softmax": "tanh"},
        NO_SELF,
        {**NO_SELF, "hybrid": True, "cross_wiring": "matched"},
        {**NO_SELF, **SKIPS},
        {**NO_SELF, **SKIPS, "copy": True, "fc_softmax": "softmax", "positions": "none"},
        {**LINEAR, "features": "elu"},
        {**LINEAR, "features": "performer", "hybrid_threshold": 0.1},
        {**LINEAR, "features": "random", "cross_attention": "dot", "copy": True},
        {"relative": "matrix"},
        {"relative": "matrix", "relative_window": 3, "relative_each_layer": True, "relative_self": False},
        {"relative": "matrix", "encoder_attention": ("local", "strided"), "decoder_attention": "local"},
        {"relative": "matrix", "encoder_attention": "global_tokens", "decoder_heads": 4, "decoder_attention": "dot"},
        {"relative": "angle", "relative_self": False},
        {"relative": "table", "relative_self": False, "encoder_attention": "slow", "decoder_attention": "additive"},
        {"attention_relu": True, "hybrid": True},
        {**NO_SELF, **SKIPS, "attention_relu": True},
        FFN,
        {**FFN, "gated": True, "biases": False, "activation": "swish"},
    ],
    ids=name_of,
)
def test_a_published_choice_computes_its_formulas_whole_and_in_steps(changes: dict[str, Any], norm: str) -> None:
    model = double_model(norm=norm, **changes)
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize(
    ("preset", "changes"), [("fat-published", {}), ("fast-published", ALL), ("fast-published", {**ALL, "norm": "post"})]
)
def test_a_published_preset_computes_its_formulas_whole_and_in_steps(preset: str, changes: dict[str, Any]) -> None:
    model = double_model(f"{preset}-tiny", **changes)
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize("changes", [{}, {"relative_self": False}], ids=str)
def test_a_parallel_decoder_has_vectors_per_distance_too(changes: dict[str, Any]) -> None:
    check_whole(double_model("transformer-nat-tiny", relative="matrix", **changes))


def dull_token(model: ReferenceModel, source: torch.Tensor) -> int:
    """Return a token without source information: rare, and in no source."""
    return next(t for t in range(model.config.vocab_size - 1, 0, -1) if not model.keep[t] and t not in source)


def layer_calls(model: ReferenceModel) -> list[int]:
    """Return a list that grows by one with every module of the decoder's layers that runs."""
    calls: list[int] = []
    for layer in model.decoder.layers:
        for module in layer.modules():
            module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("changes", [{**NO_SELF, **SKIPS}, {**LINEAR, "norm": "post"}, LINEAR], ids=name_of)
@torch.inference_mode()
def test_a_skipped_step_runs_nothing_and_leaves_the_state_as_it_was(changes: dict[str, Any]) -> None:
    model = tiny(changes).double()
    source, mask, _ = drawn_batch(model.config, [5, 8], 1)
    memory, dull = model.encode(source, mask), dull_token(model, source)
    bos = torch.full((2, 1), model.config.bos_id)
    _, before = model.step(bos, model.start(memory), memory)
    calls = layer_calls(model)
    hidden, after = model.decode(torch.full((2, 1), dull), before, memory)
    assert not calls
    for old, new in zip(before.layers, after.layers, strict=True):
        assert all(torch.equal(*pair) for pair in zip(old, new, strict=True))
    place = model.target_positions(torch.zeros(1, 1, model.config.width, dtype=torch.float64), torch.tensor([1]))
    norm = model.decoder.norm or torch.nn.Identity()
    assert float((hidden.hidden - norm(place)).abs().max()) <= 1e-12


@pytest.mark.parametrize("changes", [{**NO_SELF, **SKIPS}, LINEAR], ids=name_of)
@torch.inference_mode()
def test_a_row_that_is_skipped_is_the_same_beside_one_that_is_not(changes: dict[str, Any]) -> None:
    model = tiny(changes).double()
    source, mask, _ = drawn_batch(model.config, [5, 8], 1)
    memory, dull = model.encode(source, mask), dull_token(model, source)
    _, state = model.step(torch.full((2, 1), model.config.bos_id), model.start(memory), memory)
    skipped, kept = model.step(torch.tensor([[dull], [dull]]), state, memory)
    beside, mixed = model.step(torch.tensor([[dull], [int(source[1, 0])]]), state, memory)
    assert torch.equal(skipped[0], beside[0])
    assert not torch.equal(skipped[1], beside[1])
    for old, new in zip(kept.layers, mixed.layers, strict=True):
        assert all(torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1]) for a, b in zip(old, new, strict=True))


def test_what_a_position_reads_is_the_last_one_that_was_not_skipped() -> None:
    runs = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]])[..., None].float()
    assert last_run(runs).tolist() == [[0, 1, 1, 1, 4, 5], [0, 0, 0, 3, 3, 5], [0] * 6]


@torch.inference_mode()
def test_a_decoder_without_self_attention_knows_one_position_before_per_layer() -> None:
    model = tiny({**NO_SELF, "decoder_layers": 2, "encoder_layers": 2}).double()
    source, mask, target = drawn_batch(model.config, [6], 8)
    other = target.clone()
    other[0, 4] = (target[0, 4] + 1) % model.config.vocab_size
    changed = (model(source, mask, target) - model(source, mask, other)).abs().amax(-1)[0] > 1e-9
    assert changed.tolist() == [False] * 4 + [True] * 3 + [False]


def test_a_preset_takes_a_size_from_another_and_a_change_from_the_caller() -> None:
    assert config_from_preset("fast-published-small").ffn_width == 256
    assert config_from_preset("fast-published-tiny", width=48).ffn_width == 48
    with pytest.raises(ConfigError, match=r"ffn_skip: FFN\(h\) \+ h needs ffn_width = width = 32, found 64"):
        config_from_preset("fast-published-tiny", ffn_width=64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fc_keys": "embedded"}, "fc_keys: embedded needs cross_attention = fast_fc, found scaled_dot"),
        ({"fc_table": "vocabulary"}, "fc_table: vocabulary needs cross_attention = fast_fc"),
        ({"fc_scale": False}, "fc_scale: False needs cross_attention = fast_fc"),
        ({"decoder_attention": "none"}, "decoder_attention: none needs cross_attention = fast_fc"),
        ({"hybrid_skips": "layer"}, "hybrid_skips: layer needs the hybrid forward pass, found hybrid = False"),
        (SKIPS, "decoder_attention = scaled_dot needs those of all; use linear or none"),
        ({**NO_SELF, "relative": "table"}, "decoder_attention = none takes no relative scores"),
        ({"relative": "matrix", "encoder_attention": "slow"}, "matrix adds vectors to keys, which encoder_attention"),
        ({"relative": "matrix", "decoder_attention": "additive"}, "keys, which decoder_attention = additive"),
        ({"relative_self": False}, "relative_self: needs relative scores"),
        ({**FFN, "decoder_ffn_width": 8}, "needs decoder_ffn_width = width = 32, found 8"),
    ],
)
def test_a_published_choice_that_does_not_go_together_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_from_preset("transformer-tiny", **changes)
