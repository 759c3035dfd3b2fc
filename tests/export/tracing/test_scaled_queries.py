"""Queries carry the factor of their scores while a graph is traced, and the model is unchanged afterwards."""

import math

import pytest
import torch

from fatdeploy.export.graph_files import graphs_of, read_structure
from fatdeploy.export.reference.attention import Scores
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.export.tracing.scaled_queries import scaled_queries
from fatdeploy.manifest import DECODER, ENCODER
from tests.support.bundles import bundle_of


@pytest.mark.parametrize("preset", ["transformer-tiny", "fast-tiny", "fat-tiny"])
def test_queries_that_carry_the_factor_give_the_same_logits(preset: str) -> None:
    model = model_from_preset(preset, seed=0).double()
    source, target = torch.tensor([[5, 9, 11, 7]]), torch.tensor([[1, 8, 21]])
    mask = torch.ones_like(source, dtype=torch.bool)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(source, mask, target)
        with scaled_queries(model):
            scaled = model(source, mask, target)
            assert all(module.scale == 1.0 for module in model.modules() if isinstance(module, Scores))
            changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-12)
    assert changed
    assert all(name.endswith((".q.weight", ".q.bias", ".qkv.weight", ".qkv.bias")) for name in changed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    factor = 1 / math.sqrt(model.config.encoder_heads.width)
    assert all(module.scale == factor for module in model.modules() if isinstance(module, Scores))


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = model_from_preset("transformer-tiny", seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="in the middle"), torch.no_grad(), scaled_queries(model):
        raise RuntimeError("in the middle")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_no_attention_of_a_graph_has_a_factor() -> None:
    bundle = bundle_of("transformer-tiny")
    for part in (ENCODER, DECODER):
        nodes = [node for graph in graphs_of(read_structure(bundle.file(part)).graph) for node in graph.node]
        scales = [
            attribute.f
            for node in nodes
            if node.op_type in ("GroupQueryAttention", "MultiHeadAttention")
            for attribute in node.attribute
            if attribute.name == "scale"
        ]
        assert scales == [1.0] * (2 if part == ENCODER else 4)
