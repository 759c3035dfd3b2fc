"""The larger sizes: base models on ONNX Runtime in both dialects, and small ones of the other presets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.presets import PRESETS
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS

# The reference needs minutes for a probe of 512 positions on one core; the graphs are those of the full model.
LIMITS = Choices(max_source=16, max_target=16)
BASE = ("fat-base", "transformer-base")
# Presets whose parts are in others: linear attention in `fat`, cells in `at`; or in their tiny size.
ALIKE = ["at-linear", "rnn", "fast-published", "fat-published"]
CASES: list[Any] = [
    *((preset, "ort") for preset in BASE),
    *(pytest.param(preset, "standard", marks=pytest.mark.slow) for preset in BASE),
    *((f"{preset}-small", "ort") for preset in PRESETS if f"{preset}-base" not in BASE and preset not in ALIKE),
    *(pytest.param(f"{preset}-small", "ort", marks=pytest.mark.slow) for preset in ALIKE),
]


@pytest.mark.parametrize(("preset", "dialect"), CASES)
def test_a_larger_model_gives_the_references_tokens(preset: str, dialect: Dialect, tmp_path: Path) -> None:
    model = model_from_preset(preset)
    bundle = write_bundle(
        exportable_model(model, LIMITS), tmp_path / "bundle", origin=Origin(name=preset), target=TARGETS[dialect]
    )
    engine, reference = OrtEngine(bundle), EagerEngine(model)
    draw = np.random.default_rng(5)
    sources = [draw.integers(3, model.config.vocab_size, length).tolist() for length in (1, 9, 16)]
    options = DecodeOptions(max_new_tokens=12)
    expected = decode(reference, sources, options)
    assert decode(engine, sources, options) == expected
    assert len(set(expected)) == 3
