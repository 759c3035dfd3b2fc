"""Graphs above the size limit of a protobuf message: the limit is lowered so that a tiny model exceeds it."""

from pathlib import Path

import numpy as np
import pytest

from fatdeploy.errors import ExportFailed
from fatdeploy.export import graph_files
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.manifest import DECODER, ENCODER, WEIGHTS
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from tests.support.choices import tiny

LIMIT = 40_000


def wide_model() -> ReferenceModel:
    """Return a model with few nodes and, for its size, many weights."""
    return tiny({"encoder_layers": 1, "decoder_layers": 1, "max_source": 24, "max_target": 16, "ffn_width": 400})


def test_weights_beyond_the_limit_of_a_graph_are_exported_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_files, "LARGEST_STRUCTURE", LIMIT)
    model = wide_model()
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name="wide"))
    sizes = {name: bundle.manifest.files[name].size for name in (ENCODER, DECODER, WEIGHTS)}
    assert max(sizes[ENCODER], sizes[DECODER]) < LIMIT
    # Each graph alone has more weights than the limit: its feed-forward network.
    assert sizes[WEIGHTS] > 4 * 2 * (2 * 32 * 400) > 4 * LIMIT
    draw = np.random.default_rng(4)
    sources = [draw.integers(3, 64, length).tolist() for length in (1, 7, 24)]
    hypotheses = decode(OrtEngine(bundle), sources)
    assert hypotheses == decode(EagerEngine(model), sources)
    assert len({hypothesis.tokens for hypothesis in hypotheses}) == 3


def test_a_structure_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_files, "LARGEST_STRUCTURE", 2000)
    with pytest.raises(ExportFailed, match=r"the structure of encoder\.onnx has \d+ bytes, more than 2000"):
        write_bundle(wide_model(), tmp_path / "bundle", origin=Origin(name="wide"))
    assert not list(tmp_path.iterdir())
