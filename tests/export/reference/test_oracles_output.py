"""Positions, heads, copy mechanism, hybrid gate and whole presets against their formulas."""

from typing import Any

import numpy as np
import pytest
import torch

from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from tests.support.choices import OTHERS, PLAIN, name_of, with_rows
from tests.support.oracles.checks import (
    SOURCE_LENGTHS,
    batch_of,
    check_close,
    check_steps,
    check_whole,
    double_model,
    oracle_traces,
    recorded,
)
from tests.support.oracles.formulas import sinusoid
from tests.support.oracles.models import Oracle


@pytest.mark.parametrize("length", [1, 2, 24])
@pytest.mark.parametrize("width", [2, 6, 32])
def test_sinusoidal_positions(length: int, width: int) -> None:
    config = config_from_preset("at-linear-tiny", width=width, heads=1, max_source=length, max_target=3)
    table = ReferenceModel(config).source_positions.table
    assert table is not None
    assert table.dtype == torch.float32
    expected = [sinusoid(position, width) for position in range(length)]
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("changes", OTHERS, ids=name_of)
def test_values_of_other_families(changes: dict[str, Any]) -> None:
    sizes = {"source_vocab_size": 31} if "source_vocab_size" in changes else {}
    model = double_model("fast-tiny", **{**PLAIN, **changes, **sizes})
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("reach", [1, 8, 30])
def test_the_positional_mlp(positions: str, reach: int) -> None:
    model = double_model("fast-tiny", positions=positions, positional_mlp=reach)
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_positions_without_the_positional_mlp(positions: str) -> None:
    check_whole(double_model(positions=positions))


SHAPES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "source_positions.table": ({"positions": "learned"}, (24, 24)),
    "target_positions.table": ({"positions": "learned"}, (20, 24)),
    "source_positions.into.weight": ({"positional_mlp": 8}, (24, 8)),
    "encoder.relative.weights": ({"relative": "table"}, (2, 33)),
    "decoder.relative.weights": ({"relative": "angle"}, (2, 2)),
    "decoder.layers.1.cross.position_scores": ({"cross_attention": "fast_fc"}, (20, 24)),
    "decoder.layers.1.cross.head_bias": ({"cross_attention": "fast_fc"}, (2,)),
    "encoder.layers.1.attention.turn_keys": ({"encoder_attention": "slow", "norm": "pre"}, (2, 12, 12)),
    "encoder.layers.1.attention.shorten_keys": ({"encoder_attention": "linformer"}, (5, 24)),
    "encoder.layers.1.attention.scores": ({"encoder_attention": "synthesizer"}, (2, 24, 24)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_has_one_name_and_only_embeddings_are_tied(name: str) -> None:
    changes, shape = SHAPES[name]
    weights = double_model(**changes).state_dict()
    assert weights[name].shape == shape
    shared = {
        key for key, value in weights.items() if [v.data_ptr() for v in weights.values()].count(value.data_ptr()) > 1
    }
    assert shared == {"source_embedding.weight", "target_embedding.weight", "output.weight"}


COPIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hybrid": {"hybrid": True},
    "mlp head": {"head": "mlp", "activation": "gelu"},
    "additive": {"cross_attention": "additive", "norm": "pre"},
    "fast_fc and hybrid": {"cross_attention": "fast_fc", "fc_softmax": "softmax", "hybrid": True, "norm": "pre"},
}


@pytest.mark.parametrize("changes", COPIES.values(), ids=COPIES)
def test_the_copy_mechanism(changes: dict[str, Any]) -> None:
    model = double_model(copy=True, **changes)
    for _, above in check_whole(model):
        sums = [np.exp(scores).sum() for scores in above.scores]
        np.testing.assert_allclose(sums, 1, atol=1e-7)
    check_steps(model)


OUTPUTS: dict[str, dict[str, Any]] = {
    "mlp head, relu": {"head": "mlp"},
    "mlp head, gelu": {"head": "mlp", "activation": "gelu"},
    "mlp head, swish": {"head": "mlp", "activation": "swish", "norm": "pre"},
    "untied": {"tie_embeddings": False},
    "unscaled": {"scale_embeddings": False},
    "untied and unscaled": {"tie_embeddings": False, "scale_embeddings": False, "hybrid": True},
}


@pytest.mark.parametrize("changes", OUTPUTS.values(), ids=OUTPUTS)
def test_heads_and_embeddings(changes: dict[str, Any]) -> None:
    model = double_model(**changes)
    matrices = {model.source_embedding.weight, model.target_embedding.weight, model.output.weight}
    assert len(matrices) == (1 if model.config.tie_embeddings else 3)
    check_whole(model)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("changes", [{}, {"relative": "angle"}, {"copy": True, "cross_wiring": "matched"}], ids=str)
@torch.no_grad()
def test_a_parallel_decoder_and_its_length_head(norm: str, changes: dict[str, Any]) -> None:
    model = double_model("transformer-nat-tiny", norm=norm, **changes)
    traces = check_whole(model)
    source, mask, _ = batch_of(model.config)
    oracle, logits = Oracle(model, model.config), model.encode(source, mask).length_logits
    assert logits is not None
    check_close(logits, [oracle.length_logits(below) for below, _ in traces], "length head")


def test_tokens_are_kept_by_rank_below_the_threshold() -> None:
    for threshold, expected in ((0.5, 20), (0.26, 11), (0.0, 0), (1.0, 40)):
        keep = double_model("fat-tiny", hybrid_threshold=threshold).keep
        assert keep.tolist() == [True] * expected + [False] * (40 - expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_hybrid_gate_reads_which_tokens_are_kept(norm: str) -> None:
    model = double_model("fat-tiny", norm=norm)
    model.keep.copy_(torch.arange(40) % 3 == 0)  # includes padding, which is never kept, but not BOS, which always is
    source, _, target = batch_of(model.config)
    oracle = Oracle(model, model.config)
    gates = [oracle.gate(source[row, :n].tolist(), target[row].tolist()) for row, n in enumerate(SOURCE_LENGTHS)]
    assert all(gate[0] and not gate[3] and gate[9] for gate in gates)
    # The last column's token: real in the first row, padding in the others, where only keep may open the gate.
    assert [gate[12] for gate in gates] == [True, *(int(source[row, -1]) % 3 == 0 for row in (1, 2))]
    assert not all(gate[12] for gate in gates)
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("changes", [{}, {"copy": True, "fc_softmax": "softmax"}], ids=str)
@torch.no_grad()
def test_a_call_without_source_information_runs_no_cross_attention(norm: str, changes: dict[str, Any]) -> None:
    model = double_model("fat-tiny", norm=norm, hybrid_threshold=0.0, **changes)
    source, mask, _ = batch_of(model.config)
    absent = [token for token in range(3, 40) if not (source == token).any()][:2]
    crossed = recorded(layer.cross for layer in model.decoder.layers)
    target = torch.tensor([absent * 2] * 3)
    target[:, 1] = model.config.pad_id
    scores = model(source, mask, target)
    assert not crossed
    for row, (_, above) in enumerate(oracle_traces(model, source, target)):
        check_close(scores[row], above.scores, f"row {row}")


@torch.no_grad()
def test_rows_of_one_source_have_its_memory_and_their_own_targets() -> None:
    model = double_model("fat-tiny", copy=True, fc_softmax="softmax")
    source, mask, target = batch_of(model.config)
    tokens = torch.stack([target, target.flip(0)], 1).flatten(0, 1)  # [2B, T], rows of a source side by side
    memory = model.encode(source, mask)
    state = with_rows(model.start(memory, 19), 2)
    first, state = model.step(tokens[:, :7], state, memory)
    second, _ = model.step(tokens[:, 7:], state, memory)
    for which, targets in enumerate((target, target.flip(0))):
        for row, (_, above) in enumerate(oracle_traces(model, source, targets)):
            check_close(torch.cat([first, second], 1)[2 * row + which], above.scores, f"source {row}, row {which}")


@pytest.mark.parametrize("preset", ["fat", "fast", "at-linear", "transformer"])
@pytest.mark.parametrize("wiring", ["last", "matched"])
def test_whole_presets_in_one_call_and_in_steps(preset: str, wiring: str) -> None:
    model = double_model(f"{preset}-tiny", cross_wiring=wiring)
    check_whole(model)
    check_steps(model)


@pytest.mark.parametrize("preset", ["fat", "fast", "at-linear", "transformer"])
def test_whole_presets_in_the_other_norm_with_stacks_of_different_depth(preset: str) -> None:
    norm = "pre" if preset == "transformer" else "post"
    check_whole(double_model(f"{preset}-tiny", norm=norm, encoder_layers=3, decoder_layers=1))
