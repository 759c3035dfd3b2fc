"""Recurrent models as bundles: both dialects, int8, half precision, engines, and padding that changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import fatdeploy
from fatdeploy.errors import ExportFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
from fatdeploy.runtimes.proof.verify import verify
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS, bundle_of, half_of, model_of
from tests.support.choices import name_of, tiny
from tests.support.engines.equalities import sources_of, tokens_of
from tests.support.quantized import quantized_of

DIALECTS: list[Dialect] = ["ort", "standard"]
GRU: dict[str, Any] = {"encoder_attention": "gru", "decoder_attention": "gru"}
# Exports take seconds. This one has most of what presets do not; the slow tests have the other dialect and the rest.
DEEP = {"encoder_attention": "gru", "encoder_direction": "right_to_left", "encoder_layers": 2, "decoder_layers": 2}
REVERSED = {**GRU, "encoder_direction": "right_to_left", "cross_attention": "additive"}
BOTH_WAYS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_direction": "both"}
EXPORTED: list[Any] = [
    ("at", DEEP, "standard"),
    pytest.param("at", DEEP, "ort", marks=pytest.mark.slow),
    *(
        pytest.param(preset, changes, dialect, marks=pytest.mark.slow)
        for preset, changes in (("rnn", REVERSED), ("at", BOTH_WAYS))
        for dialect in DIALECTS
    ),
]


@pytest.mark.parametrize(("preset", "changes", "dialect"), EXPORTED, ids=name_of)
def test_other_cells_directions_and_depths_are_exported(
    tmp_path: Path, preset: str, changes: dict[str, Any], dialect: Dialect
) -> None:
    model = tiny({**changes, "max_source": 12, "max_target": 16}, base=preset)
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name=preset), target=TARGETS[dialect])
    sources = [[5], list(range(3, 15)), [9, 9, 8], [40, 3]]
    engine, reference = OrtEngine(bundle), EagerEngine(model)
    for options in (DecodeOptions(), DecodeOptions(num_beams=3)):
        assert tokens_of(decode(engine, sources, options)) == tokens_of(decode(reference, sources, options))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("preset", ["at-tiny", "rnn-tiny"])
def test_a_cell_is_one_op_that_knows_the_length_of_every_source(preset: str, dialect: Dialect) -> None:
    bundle, config = bundle_of(preset, dialect), model_of(preset).config
    counts = {part: bundle.manifest.histograms[part]["simplified"] for part in (ENCODER, DECODER)}
    assert counts[ENCODER]["LSTM"] == config.encoder_layers
    assert (counts[DECODER].get("LSTM", 0), counts[DECODER].get("Scan", 0)) == (
        (0, 1) if preset == "at-tiny" else (2, 0)
    )
    encoder = onnx.load(bundle.file(ENCODER), load_external_data=False)
    lengths = [node.input[4] for node in encoder.graph.node if node.op_type == "LSTM"]
    assert all(lengths)
    # Weights with their gates in the order of the op are constants, not computed at every call.
    constants = {tensor.name for tensor in encoder.graph.initializer}
    assert all(set(node.input[1:4]) <= constants for node in encoder.graph.node if node.op_type == "LSTM")


@pytest.mark.parametrize("preset", ["at-tiny", "rnn-tiny"])
def test_padding_with_any_tokens_changes_no_bit_of_what_the_encoder_returns(preset: str) -> None:
    engine = OrtEngine(bundle_of(preset))
    source = np.array([[5, 6, 7, 50, 51], [8, 9, 10, 11, 12]])
    mask = np.array([[True] * 3 + [False] * 2, [True] * 5])
    logits = []
    for padding in (0, 33):
        source[0, 3:] = padding
        state = engine.encode(source, mask, Capacity(1, 4))
        logits.append(np.array(engine.step(np.array([[1], [1]]), state, Want.LOGITS).logits))
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.parametrize("preset", ["at-tiny", "rnn-tiny"])
def test_integers_take_the_matrices_around_the_recurrence(preset: str) -> None:
    bundle = quantized_of(preset, "int8")
    histogram = bundle.manifest.histograms[DECODER]["quantized"]
    assert sum(count for op, count in histogram.items() if op in ("MatMulIntegerToFloat", "MatMulNBits")) >= 2
    assert verify(bundle.path).line()
    sources = sources_of(preset)[:4]
    together = decode(OrtEngine(bundle), sources, DecodeOptions(max_new_tokens=12))
    alone = [decode(OrtEngine(bundle), [source], DecodeOptions(max_new_tokens=12))[0] for source in sources]
    assert tokens_of(together) == tokens_of(alone)


def test_half_precision_keeps_cells_in_float32_and_refuses_a_loop_by_name(tmp_path: Path) -> None:
    bundle = half_of("rnn-tiny")
    assert [tensor.dtype for tensor in bundle.spec.starts] == ["float32"] * 4
    assert {tensor.dtype for tensor in bundle.spec.memory} == {"float16"}
    with pytest.raises(ExportFailed, match=r"Scan .* cannot be converted to half precision: export in fp32 or"):
        write_bundle(model_of("at-tiny"), tmp_path / "half", origin=Origin(name="at"), target="onnx", precision="fp16")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["at-tiny", "rnn-tiny"])
def test_tensorrt_rtx_builds_engines_of_recurrent_models(preset: str, tmp_path: Path) -> None:
    request = BuildRequest(flavour="tensorrt-rtx", capabilities=("8.6",))
    bundle = fatdeploy.export_model(preset, tmp_path / "bundle", target="tensorrt-rtx", engines=request)
    assert [plan.part for plan in bundle.manifest.plans] == ["encoder", "decoder"]
