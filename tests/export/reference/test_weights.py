"""Random weights: lively for every preset, equal for equal seeds, different for others."""

from typing import Any

import numpy as np
import pytest
import torch

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.presets import config_from_preset, preset_names
from fatdeploy.export.reference.weights import model_from_preset, random_model
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from tests.support.choices import name_of, tiny

STEPS = 24


def outputs(engine: EagerEngine, sources: np.ndarray) -> np.ndarray:
    """Return 24 greedy tokens per source, EOS or not."""
    state = engine.encode(sources, np.ones_like(sources, bool), Capacity(1, STEPS))
    tokens = np.full((len(sources), 1), engine.spec.bos_id)
    if engine.spec.decoding == "parallel":
        return engine.step(tokens.repeat(STEPS, 1), state, Want.LOGITS).logits.argmax(-1)
    columns = []
    for _ in range(STEPS):
        tokens = engine.step(tokens, state, Want.LOGITS).logits.argmax(-1)
        columns.append(tokens)
    return np.concatenate(columns, 1)


@pytest.mark.parametrize("name", preset_names())
def test_random_weights_are_lively(name: str) -> None:
    engine = EagerEngine(model_from_preset(name))
    sources = np.random.default_rng(0).integers(3, engine.spec.vocab_size, (32, 16))
    rows = outputs(engine, sources).tolist()
    assert len({tuple(row) for row in rows}) >= 24
    assert np.mean([len(set(row)) for row in rows]) >= 6


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("at-tiny", {}),
        ("at-tiny", {"encoder_attention": "gru", "positions": "sinusoidal"}),
        ("at-tiny", {"encoder_layers": 2, "decoder_layers": 2, "encoder_direction": "both"}),
        ("at-small", {}),
        ("rnn-tiny", {}),
        ("rnn-tiny", {"encoder_attention": "gru", "decoder_attention": "gru", "cross_attention": "none"}),
    ],
    ids=name_of,
)
def test_a_recurrence_does_not_amplify_the_noise_of_fp32(preset: str, changes: dict[str, Any]) -> None:
    model = random_model(config_from_preset(preset, **changes))
    draw = torch.Generator().manual_seed(4)
    source, tokens = (torch.randint(3, model.config.vocab_size, (16, length), generator=draw) for length in (9, 128))
    mask = torch.ones_like(source, dtype=torch.bool)
    with torch.no_grad():
        single = model(source, mask, tokens).double()
        double = model.double()(source, mask, tokens)
    assert float((single - double).abs().max() / double.abs().max()) < 1e-5


def test_a_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (model_from_preset("fat-tiny", seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert sum(torch.equal(first[name], other[name]) for name in first) == 1  # `keep` depends only on ids


def test_drawing_weights_leaves_the_callers_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    model_from_preset("fat-tiny")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_performers_projection_has_orthogonal_rows_in_blocks_of_the_head_width() -> None:
    features = tiny({"decoder_attention": "linear", "features": "performer"}).decoder.stack()[0].attention.features
    block = features.projection[0, :16].double()
    products = block @ block.T
    lengths = products.diagonal()
    assert float((products - torch.diag(lengths)).abs().max()) < 1e-4
    assert 8 < float(features.projection.square().sum(-1).mean()) < 24  # chi-square with D = 16 degrees of freedom
    assert len(set(lengths.tolist())) == 16
