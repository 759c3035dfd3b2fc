"""Traced graphs: the reference's numbers, few ops, and no more memory than the reference needs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.attention import slow_scores
from fatdeploy.export.tracing.dialect_base import PAIRS, GraphSeams
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Floats, Want
from tests.support.choices import tiny

# A short word model: hybrid, slow attention, recurrent memory, a softmax over the source with scores of positions.
WORDS = {"fc_softmax": "softmax", "encoder_layers": 1, "decoder_layers": 1, "max_source": 12, "max_target": 16}
SOURCE = np.array([[5, 6, 7, 8, 9], [20, 21, 0, 0, 0]])


@pytest.mark.parametrize("at_once", [4, 3, 1])
def test_slow_scores_are_the_references_however_many_heads_are_compared_at_once(at_once: int) -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(2, length, 4, 16, generator=draw, dtype=torch.float64) for length in (5, 7))
    longest = int((PAIRS / (16 * at_once)) ** 0.5)
    assert max(1, PAIRS // (16 * longest**2)) == at_once
    actual = GraphSeams().slow_scores(queries, keys, longest)
    expected = slow_scores(queries.transpose(1, 2), keys.transpose(1, 2))
    assert actual.shape == (2, 4, 5, 7)
    assert float((actual - expected).abs().max()) <= 1e-12


def stepped(engine: Engine[object]) -> list[Floats]:
    """Return the logits of a call on BOS and of later calls with two rows per source."""
    state = engine.encode(SOURCE, SOURCE != 0, Capacity(2, 16))
    engine.step(np.array([[1], [1]]), state, Want.LOGITS)
    engine.reorder(state, np.array([0, 0, 1, 1]))
    calls = [[[3, 60, 4], [60, 5, 6], [7, 8, 60], [9, 10, 20]], [[50], [51], [20], [0]], [[60]] * 4, [[7]] * 4]
    return [np.array(engine.step(np.array(call), state, Want.LOGITS).logits) for call in calls]


def test_a_word_model_is_exact_with_two_rows_per_source_and_several_tokens_per_call_in_few_ops(tmp_path: Path) -> None:
    model = tiny(WORDS, base="fat")
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name="words"))
    for logits, expected in zip(stepped(OrtEngine(bundle)), stepped(EagerEngine(model)), strict=True):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
    encoder, decoder = (bundle.manifest.histograms[name]["simplified"] for name in (ENCODER, DECODER))
    # Sums and normaliser are two recurrences, one op each.
    assert (decoder["LinearAttention"], decoder["MultiHeadAttention"]) == (2, 1)
    assert "Transpose" not in decoder
    # All heads are compared at once: one sum per layer.
    assert encoder["ReduceSum"] == 1
    assert "Slice" not in encoder
