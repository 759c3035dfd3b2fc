"""Which models get a position per row, and what their graphs are compared on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from fatdeploy.export.models.exportable import ExportableUserModel, exportable_model
from fatdeploy.export.tracing.row_positions import with_row_positions
from fatdeploy.export.tracing.samples import SAMPLES, drawn_samples
from fatdeploy.manifest import DECODER
from fatdeploy.targets import TARGETS
from tests.support.bundles import EXPORTED, bundle_of, model_of
from tests.support.choices import name_of, tiny

CPU = TARGETS["ort-cpu"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"decoder_attention": "dot"}, True),
        ({"decoder_attention": "linear", "features": "performer"}, True),
        ({"decoder_attention": "linear", "features": "elu", "inner_width": 24}, True),
        ({"cross_attention": "fast_fc", "fc_softmax": "tanh"}, True),
        ({"cross_attention": "additive"}, True),
        ({"encoder_attention": "slow"}, True),
        ({"positional_mlp": 4}, True),
        ({"copy": True, "hybrid": True}, True),
        ({"inner_width": 24}, False),  # heads of 12
        ({"decoder_attention": "additive"}, False),
        ({"cross_attention": "fast_fc", "fc_table": "vocabulary", "decoder_attention": "none"}, True),
        ({"decoder_attention": "local", "window": 3}, True),  # a ring
        ({"decoder_attention": "local", "window": 3, "relative": "table"}, False),
        ({"decoder_attention": "local", "window": 250}, False),  # a mask over a cache
        ({"relative": "table"}, False),
        ({"relative": "matrix"}, False),
        ({"relative": "angle", "relative_each_layer": True}, False),
    ],
    ids=name_of,
)
def test_models_whose_self_attention_has_an_op_for_it_get_a_position_per_row(
    changes: dict[str, Any], expected: bool
) -> None:
    model = exportable_model(tiny(changes))
    placed = with_row_positions(model, CPU)
    assert placed.spec == replace(model.spec, row_positions=expected)
    assert placed.spec.position.shape == (("rows",) if expected else ())
    assert placed.inner is model.inner
    assert not model.spec.row_positions


def test_other_targets_and_models_of_users_have_one_position_for_all_rows() -> None:
    model = exportable_model(model_of("transformer-tiny"))
    placed = with_row_positions(model, CPU)
    for target in ("ort-cuda", "onnx"):
        assert with_row_positions(model, TARGETS[target]) is model
        assert not with_row_positions(placed, TARGETS[target]).spec.row_positions
    own = ExportableUserModel(nn.Linear(1, 1), placed.spec)
    assert not with_row_positions(own, CPU).spec.row_positions


@pytest.mark.parametrize("preset", EXPORTED)
def test_the_contract_of_a_bundle_says_which_positions_its_graph_takes(preset: str) -> None:
    expected = preset in ("transformer", "at", "at-linear", "rnn", "fat")
    assert bundle_of(f"{preset}-tiny").spec.row_positions == expected
    assert not bundle_of(f"{preset}-tiny", "standard").spec.row_positions
    histogram = bundle_of(f"{preset}-tiny").manifest.histograms[DECODER]["simplified"]
    assert histogram.get("GroupQueryAttention", 0) == (2 if preset == "transformer" else 0)


def test_graphs_are_compared_with_rows_at_different_positions_one_token_each() -> None:
    spec = bundle_of("transformer-tiny").spec
    samples = drawn_samples(spec, spec.decoder_inputs(branches=True), "ort")
    positions = [sample[spec.position.name] for sample in samples]
    assert [len(position) for position in positions] == [batch * each for batch, each, *_ in SAMPLES]
    assert [len(np.unique(position)) > 1 for position in positions] == [False, False, False, True]
    for position, (_, _, _, steps, capacity) in zip(positions, SAMPLES, strict=True):
        assert 0 <= position.min() <= position.max() <= (capacity - 1 if steps == 1 else 0)
