"""Recurrent models against their formulas, and what their state, memory and configuration are."""

import itertools
from typing import Any

import pytest
import torch

from fatdeploy.errors import ConfigError
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.reference.presets import config_from_preset
from tests.support.choices import name_of
from tests.support.oracles.checks import CHUNKS, SOURCE_LENGTHS, batch_of, check_close, double_model
from tests.support.oracles.recurrent import RecurrentOracle

MODELS: list[tuple[str, dict[str, Any]]] = [
    *(("at", {"encoder_direction": way}) for way in ("both", "left_to_right", "right_to_left")),
    ("at", {"encoder_layers": 2, "decoder_layers": 2, "activation": "swish", "head": "mlp"}),
    ("at", {"encoder_attention": "gru", "positions": "sinusoidal"}),
    ("at", {"encoder_attention": "scaled_dot", "encoder_direction": "both", "encoder_layers": 2}),
    *(("rnn", {"encoder_direction": way}) for way in ("both", "left_to_right", "right_to_left")),
    ("rnn", {"encoder_attention": "gru", "decoder_attention": "gru", "cross_attention": "additive"}),
    ("rnn", {"decoder_attention": "gru", "cross_attention": "none", "head": "dense_norm", "decoder_layers": 1}),
    ("rnn", {"cross_attention": "fast_fc", "fc_softmax": "softmax", "copy": True}),
    ("rnn", {"encoder_attention": "slow", "decoder_heads": 4, "tie_embeddings": False, "output_bias": True}),
]


@pytest.mark.parametrize(("preset", "changes"), MODELS, ids=name_of)
@torch.no_grad()
def test_a_recurrent_model_computes_its_formulas_whole_and_in_steps(preset: str, changes: dict[str, Any]) -> None:
    model = double_model(f"{preset}-tiny", **changes)
    source, mask, target = batch_of(model.config)
    whole, memory = model(source, mask, target), model.encode(source, mask)
    state, steps = model.start(memory), []
    ends = list(itertools.accumulate(CHUNKS))
    for start, end in itertools.pairwise([0, *ends]):
        scores, state = model.step(target[:, start:end], state, memory)
        steps.append(scores)
    oracle = RecurrentOracle(model, model.config)
    for row, length in enumerate(SOURCE_LENGTHS):
        expected = oracle.scores(source[row, :length].tolist(), target[row].tolist())
        check_close(whole[row], expected, f"row {row}: whole")
        check_close(torch.cat(steps, 1)[row], expected, f"row {row}: steps")


@torch.no_grad()
def test_a_recurrent_encoder_feeds_any_decoder() -> None:
    model = double_model("transformer-tiny", encoder_attention="gru", cross_wiring="matched")
    source, mask, _ = batch_of(model.config)
    oracle = RecurrentOracle(model, model.config)
    outputs = model.encoder(
        model.source_positions(model.source_embedding(source) * model.scale, torch.arange(21)), mask
    )
    for row, length in enumerate(SOURCE_LENGTHS):
        check_close(outputs[-1][row, :length], oracle.encoded(source[row, :length].tolist()), f"row {row}")
        assert not outputs[-1][row, length:].any()


@pytest.mark.parametrize(
    ("preset", "memory", "state"),
    [
        ("at", ["memory.context.0"], ["state.0"]),
        ("rnn", ["memory.keys.0", "memory.values.0"], ["state.0", "cell.0", "state.1", "cell.1"]),
    ],
)
def test_the_contract_names_what_every_step_reads_and_what_it_starts_from(
    preset: str, memory: list[str], state: list[str]
) -> None:
    spec = double_model(f"{preset}-tiny").spec
    assert [tensor.name for tensor in spec.memory] == memory
    assert [tensor.name for tensor in spec.state] == state
    assert [tensor.name for tensor in spec.starts] == [f"start.{name}" for name in state]


@pytest.mark.parametrize(
    ("preset", "changes", "reason"),
    [
        ("rnn", {"width": 33, "heads": 1}, "a recurrent encoder in both directions needs an even width, found 33"),
        ("fast", {"cross_attention": "none"}, "cross_attention: none needs a decoder that starts from the source"),
        ("at", {"cross_attention": "dot"}, "fully_connected decoders read the context vector, use none"),
        ("at", {"copy": True}, "copy: needs the weights of a cross-attention, found cross_attention = none"),
        ("rnn", {"cross_wiring": "matched"}, "a recurrent decoder has one cross-attention, use last"),
        ("rnn", {"hybrid": True}, "hybrid: skips the cross-attention of layers"),
        ("rnn", {"relative": "table"}, "encoder_attention = lstm takes no relative scores"),
        ("at", {"relative": "angle"}, "decoder_attention = fully_connected takes no relative scores"),
        ("rnn", {"biases": False}, "biases: encoder_attention = lstm has matrices of the model's width with biases"),
        ("rnn", {"inner_width": 48}, "inner_width: decoder_attention = lstm has matrices"),
    ],
)
def test_a_recurrent_choice_that_does_not_go_together_is_refused(
    preset: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_from_preset(f"{preset}-tiny", **changes)


def test_weights_of_the_source_come_from_the_one_attention_that_there_is() -> None:
    assert exportable_model(double_model("rnn-tiny"), Choices(attention_layer=1)).spec.alignment is not None
    with pytest.raises(ConfigError, match="a recurrent decoder attends to the source after its last layer, 1, found 0"):
        exportable_model(double_model("rnn-tiny"), Choices(attention_layer=0))
    with pytest.raises(ConfigError, match="cross_attention = none has no weights of the source"):
        exportable_model(double_model("at-tiny"), Choices(attention_layer=0))
