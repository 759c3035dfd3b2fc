"""Encoders that see some positions as bundles: standard ops, integers, and padding that changes no bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fatdeploy
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
from fatdeploy.runtimes.proof.verify import verify
from tests.support.choices import name_of, tiny
from tests.support.engines.equalities import tokens_of

SIZES = {"encoder_layers": 2, "decoder_layers": 1, "max_source": 80, "max_target": 16}
ADDED = {"encoder_attention": ("local+global_tokens", "scaled_dot"), "global_tokens": "added", "n_global_tokens": 3}
# Long enough for layouts that compute nothing else.
LONG = {"max_source": 600}
WINDOWS = {"encoder_attention": "local", "window": 3, "encoder_direction": "left_to_right", **LONG}
STRIDES = {"encoder_attention": "strided", "stride": 3, **LONG}
UNIONS = {"encoder_attention": "local+strided", "relative": "angle"}
SLOW = [
    pytest.param(changes, marks=pytest.mark.slow) for changes in (STRIDES, UNIONS, {**WINDOWS, "relative": "table"})
]
SOURCES = [np.random.default_rng(length).integers(3, 64, length).tolist() for length in (1, 80, 33, 32, 7, 65)]


@pytest.mark.parametrize("changes", [ADDED, WINDOWS, *SLOW], ids=name_of)
def test_standard_ops_give_the_references_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny({**SIZES, **changes})
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name="sparse"), target="onnx")
    expected = decode(EagerEngine(model), SOURCES)
    assert tokens_of(decode(OrtEngine(bundle), SOURCES)) == tokens_of(expected)
    assert len({hypothesis.tokens for hypothesis in expected}) > len(SOURCES) // 2


@pytest.mark.parametrize("changes", [ADDED, WINDOWS, *SLOW], ids=name_of)
def test_a_row_of_integers_is_bit_for_bit_what_it_is_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    origin = Origin(name="sparse", random=True)
    bundle = write_bundle(tiny({**SIZES, **changes}), tmp_path / "bundle", origin=origin, precision="int8")
    assert verify(bundle.path).line()
    engine = OrtEngine(bundle)
    assert decode(engine, SOURCES) == [decode(engine, [source])[0] for source in SOURCES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [ADDED, WINDOWS, STRIDES, {"decoder_attention": "local", "window": 4, "max_target": 40}], ids=name_of
)
def test_tensorrt_rtx_builds_engines_of_them(changes: dict[str, Any], tmp_path: Path) -> None:
    request = BuildRequest(flavour="tensorrt-rtx", capabilities=("8.6",))
    model = tiny({**SIZES, **changes})
    bundle = fatdeploy.export_model(model, tmp_path / "bundle", target="tensorrt-rtx", engines=request)
    assert [plan.part for plan in bundle.manifest.plans] == ["encoder", "decoder"]
