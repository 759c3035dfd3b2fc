"""Equalities of every model: cached = whole sequence, a batch = its rows, a prefix in one call = token by token."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fatdeploy.errors import ConfigError
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.cross.attention import SourceMemory
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.weights import random_model
from tests.support.choices import AUTOREGRESSIVE, CHOICES, DIRECTIONS, drawn_batch, legal, name_of, tiny, with_rows

TARGETS = 9
LENGTHS = [7, 1, 5]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Assert equality up to rounding: 1e-9 in float64, the bound for logits in float32."""
    bound = 1e-9 if expected.dtype == torch.float64 else 1e-5 * max(1.0, float(expected.abs().max()))
    assert expected.isfinite().all()
    assert float((actual - expected).abs().max()) <= bound


def stepped(model: ReferenceModel, memory: SourceMemory, target: Tensor, sizes: list[int]) -> Tensor:
    """Return the logits of the target fed in calls of these sizes."""
    state, logits = model.start(memory), []
    for call in target.split(sizes, 1):
        part, state = model.step(call, state, memory)
        logits.append(part)
    return torch.cat(logits, 1)


@torch.inference_mode()
def check_equalities(model: ReferenceModel) -> None:
    """Assert everything in the first line of this file, on one random batch."""
    source, mask, target = drawn_batch(model.config, LENGTHS, TARGETS)
    whole = model(source, mask, target)
    memory = model.encode(source, mask)
    assert_close(stepped(model, memory, target, [1] * TARGETS), whole)
    assert_close(stepped(model, memory, target, [4, 1, 1, 3]), whole)
    for row, length in enumerate(LENGTHS):
        alone = model(source[row : row + 1, :length], mask[row : row + 1, :length], target[row : row + 1])
        assert_close(whole[row : row + 1], alone)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
def test_a_preset_is_the_same_whole_stepped_padded_or_alone(preset: str, precision: torch.dtype) -> None:
    check_equalities(tiny({}, base=preset).to(precision))


@pytest.mark.parametrize("precision", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("changes", CHOICES, ids=name_of)
def test_every_choice_is_the_same_whole_stepped_padded_or_alone(changes: dict, precision: torch.dtype) -> None:
    check_equalities(tiny(changes).to(precision))


@pytest.mark.parametrize("changes", CHOICES, ids=name_of)
@torch.inference_mode()
def test_every_choice_accepts_sources_of_one_token_and_of_max_source(changes: dict) -> None:
    model = tiny({**changes, "max_source": 40}).double()
    source, mask, target = drawn_batch(model.config, [40, 1], 3)
    both = model(source, mask, target)
    assert_close(both[:1], model(source[:1], mask[:1], target[:1]))
    assert_close(both[1:], model(source[1:, :1], mask[1:, :1], target[1:]))


@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
@torch.inference_mode()
def test_a_preset_runs_to_max_source_and_max_target(preset: str) -> None:
    model = tiny({}, base=preset).double()
    config = model.config
    source, mask, target = drawn_batch(config, [config.max_source, 3], config.max_target)
    whole = model(source, mask, target)
    assert_close(stepped(model, model.encode(source, mask), target, [100] + [1] * 156), whole)


@pytest.mark.parametrize("changes", [*CHOICES, {"decoding": "parallel", "decoder_attention": "full"}], ids=name_of)
@torch.inference_mode()
def test_rows_of_one_source_share_its_memory(changes: dict) -> None:
    model = tiny(changes).double()
    source, mask, target = drawn_batch(model.config, [4, 6], 5)
    rows = torch.cat([target, target.flip(0)])[[0, 2, 1, 3]]  # two rows for each source
    memory = model.encode(source, mask)
    state = with_rows(model.start(memory, 5), 2)
    shared, _ = model.step(rows, state, memory)
    copied = model(source.repeat_interleave(2, 0), mask.repeat_interleave(2, 0), rows)
    assert_close(shared, copied)


@pytest.mark.parametrize("changes", CHOICES, ids=name_of)
def test_every_weight_of_every_choice_matters(changes: dict) -> None:
    model = tiny({**changes, "max_source": 7, "max_target": TARGETS, "dropout": 0.0})
    # The hard choices of inference have no gradient, the probabilities of training have one.
    model.train(model.config.cross_attention == "monotonic")
    source, mask, target = drawn_batch(model.config, LENGTHS, TARGETS)
    model(source, mask, target).square().sum().backward()
    dead = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not dead


def test_memory_is_projected_once_and_never_by_a_step() -> None:
    model = tiny({})
    source, mask, target = drawn_batch(model.config, LENGTHS, 3)
    calls = []
    for layer in model.decoder.stack():
        layer.cross.kv.register_forward_hook(lambda *_: calls.append(1))
    stepped(model, model.encode(source, mask), target, [1, 1, 1])
    assert len(calls) == model.config.decoder_layers


def test_dropout_acts_in_training_and_not_in_inference() -> None:
    model = tiny({"dropout": 0.5})
    source, mask, target = drawn_batch(model.config, LENGTHS, 3)
    assert torch.equal(model(source, mask, target), tiny({})(source, mask, target))
    model.train()
    assert not torch.equal(model(source, mask, target), model(source, mask, target))


def any_values() -> st.SearchStrategy[dict]:
    """Draw every choice independently: most combinations are illegal."""
    mask = st.sampled_from(["local", "strided", "global_tokens"])
    attentions = (
        "scaled_dot dot additive slow local strided global_tokens linformer compressed linear synthesizer lstm gru"
    )
    recurrent = ["lstm", "gru", "fully_connected"]
    return st.fixed_dictionaries(
        {
            "encoder_attention": st.sampled_from(attentions.split()) | st.tuples(mask, mask),
            "encoder_direction": st.sampled_from(DIRECTIONS),
            "synthesizer": st.sampled_from(["random", "dense"]),
            "features": st.sampled_from(["elu", "softmax", "random", "performer"]),
            "decoder_attention": st.sampled_from(
                ["scaled_dot", "dot", "additive", "local", "linear", "full", "none", *recurrent]
            ),
            "decoding": st.sampled_from(["autoregressive", "autoregressive", "parallel"]),
            "cross_attention": st.sampled_from(
                ["scaled_dot", "scaled_dot", "dot", "additive", "fast_fc", "fast_fc", "location", "monotonic", "none"]
            ),
            "fc_softmax": st.sampled_from(["tanh", "tanh_bounded", "softmax"]),
            "fc_keys": st.sampled_from(["encoder", "encoder", "embedded"]),
            "fc_table": st.sampled_from(["source", "source", "vocabulary"]),
            "fc_scale": st.sampled_from([True, True, False]),
            "hybrid_skips": st.sampled_from(["cross", "cross", "layer"]),
            "cross_wiring": st.sampled_from(["last", "last", "last", "matched", "mixed"]),
            "encoder_layers": st.integers(1, 2),
            "decoder_layers": st.integers(1, 2),
            "positions": st.sampled_from(["sinusoidal", "learned", "none"]),
            "relative": st.sampled_from(["none", "none", "none", "table", "angle", "matrix"]),
            "relative_self": st.sampled_from([True, True, False]),
            "attention_relu": st.booleans(),
            "ffn_skip": st.booleans(),
            "ffn_width": st.sampled_from([64, 32, 32]),
            "positional_mlp": st.sampled_from([0, 0, 3]),
            "norm": st.sampled_from(["pre", "post"]),
            "head": st.sampled_from(["linear", "mlp", "dense_norm"]),
            "norm_kind": st.sampled_from(["layer", "rms"]),
            "biases": st.sampled_from([True, True, True, False]),
            "gated": st.booleans(),
            "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "swish"]),
            "inner_width": st.sampled_from([0, 0, 0, 24]),
            "decoder_heads": st.sampled_from([0, 4]),
            "decoder_ffn_width": st.sampled_from([0, 0, 12, 32]),
            "source_embedding_norm": st.sampled_from(["none", "before", "after"]),
            "target_embedding_norm": st.sampled_from(["none", "before", "after"]),
            "tie_output": st.sampled_from(["auto", "yes", "no"]),
            "output_bias": st.booleans(),
            "source_vocab_size": st.sampled_from([0, 0, 0, 50]),
            "relative_window": st.sampled_from([2, 16]),
            "relative_each_layer": st.sampled_from([False, False, True]),
            "bos_id": st.sampled_from([1, 1, 1, 2]),
            "tie_embeddings": st.booleans(),
            "copy": st.booleans(),
            "hybrid": st.booleans(),
        }
    )


ORDINARY: list[dict] = [
    {"fc_keys": "encoder", "fc_table": "source", "fc_scale": True, "hybrid_skips": "cross", "ffn_skip": False},
    {"relative": "none", "relative_each_layer": False, "relative_self": True},
    {"cross_wiring": "last", "hybrid": False, "source_vocab_size": 0},
]


def config_of(values: dict) -> ModelConfig:
    return config_from_preset("transformer-tiny", **{"max_source": 16, "max_target": 16, **values})


@settings(max_examples=400)
@given(any_values())
def test_a_combination_is_refused_if_and_only_if_the_table_forbids_it(values: dict) -> None:
    if legal(values):
        assert ModelConfig.from_json(config_of(values).to_json()) == config_of(values)
    else:
        with pytest.raises(ConfigError, match="configuration refused"):
            config_of(values)


@settings(max_examples=60)
@given(any_values(), st.integers(0, 2**32))
def test_any_legal_autoregressive_combination_is_the_same_whole_and_stepped(values: dict, seed: int) -> None:
    values = {**values, "decoding": "autoregressive"}
    # Few draws are legal. What restricts others gives way, as little of it as is needed, so that enough are.
    for ordinary in ORDINARY:
        values = values if legal(values) else {**values, **ordinary}
    assume(legal(values))
    check_equalities(random_model(config_of(values), seed).double())
