"""The larger sizes: small presets on ONNX Runtime, and the base models in both dialects."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fatdeploy.bundle import Dialect
from fatdeploy.export.contract import Choices
from fatdeploy.export.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.presets import PRESETS
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.runtimes.decode import decode
from fatdeploy.runtimes.options import DecodeOptions
from fatdeploy.runtimes.ort import OrtEngine

# The reference needs minutes for a probe of 512 positions on one core; the graphs are those of the full model.
LIMITS = Choices(max_source=32, max_target=32)
CASES: list[Any] = [
    ("fat-base", "ort"),
    pytest.param("fat-base", "standard", marks=pytest.mark.slow),
    *(("transformer-base", dialect) for dialect in ("ort", "standard")),
    *((f"{preset}-small", "ort") for preset in PRESETS),
]


@pytest.mark.parametrize(("preset", "dialect"), CASES)
def test_a_larger_model_gives_the_references_tokens(preset: str, dialect: Dialect, tmp_path: Path) -> None:
    model = model_from_preset(preset)
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name=preset), dialect=dialect, choices=LIMITS)
    engine, reference = OrtEngine(bundle), EagerEngine(model)
    draw = np.random.default_rng(5)
    sources = [draw.integers(3, model.config.vocab_size, length).tolist() for length in (1, 12, 32)]
    options = DecodeOptions(max_new_tokens=20)
    expected = decode(reference, sources, options)
    assert decode(engine, sources, options) == expected
    assert len(set(expected)) == 3
