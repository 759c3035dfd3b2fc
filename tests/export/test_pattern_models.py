"""Patterns and mixing without attention as bundles: both dialects, int8, half precision, probes and live comparison."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fatdeploy
from fatdeploy.errors import ExportFailed, ParityFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.export.proof.live_model import compared_by_decisions
from fatdeploy.export.reference.checkpoint import save_checkpoint
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS, logit_agreement
from fatdeploy.runtimes.proof.verify import verify
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS
from tests.support.choices import name_of, tiny
from tests.support.engines.equalities import tokens_of

SMALL: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "max_source": 24, "max_target": 16}
ROUTING: dict[str, Any] = {"encoder_attention": "routing", "clusters": 3}
SINKHORN: dict[str, Any] = {"encoder_attention": "sinkhorn", "block_length": 4}
MIXING = {"encoder_attention": "gmlp", "decoder_attention": "aft", "encoder_direction": "right_to_left"}
FREE = {"encoder_attention": "aft", "decoder_attention": "aft", "decoder_heads": 4}
SOURCES = [[5], list(range(3, 27)), [9, 9, 8, 40, 41], [40, 3]]


def model_with(changes: dict[str, Any]) -> ReferenceModel:
    return tiny({**SMALL, **changes})


# The ordinary tests of every choice export each of these for onnxruntime.
EXPORTED: list[Any] = [
    (SINKHORN, "standard"),
    *(pytest.param(changes, "standard", marks=pytest.mark.slow) for changes in (ROUTING, MIXING, FREE)),
    *(
        pytest.param(changes, "ort", marks=pytest.mark.slow)
        for changes in (ROUTING, SINKHORN, MIXING, FREE, SINKHORN | {"relative": "matrix"})
    ),
]


@pytest.mark.parametrize(("changes", "dialect"), EXPORTED, ids=name_of)
def test_both_dialects_give_the_references_tokens(tmp_path: Path, changes: dict[str, Any], dialect: Dialect) -> None:
    model = model_with(changes)
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name="model"), target=TARGETS[dialect])
    engine, reference = OrtEngine(bundle), EagerEngine(model)
    for options in (DecodeOptions(), DecodeOptions(num_beams=3)):
        expected = tokens_of(decode(reference, SOURCES, options))
        assert tokens_of(decode(engine, SOURCES, options)) == expected
        assert [tokens_of(decode(engine, [source], options))[0] for source in SOURCES] == expected
    save_checkpoint(model, tmp_path / "model")
    assert verify(bundle.path, against=str(tmp_path / "model")).line()


INTEGERS: list[Any] = [
    MIXING,
    *(pytest.param(changes, marks=pytest.mark.slow) for changes in (ROUTING, SINKHORN, FREE)),
]


@pytest.mark.parametrize("changes", INTEGERS, ids=name_of)
def test_matrices_become_integers_and_rows_stay_what_they_are_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    origin = Origin(name="model", random=True)
    bundle = write_bundle(model_with(changes), tmp_path / "bundle", origin=origin, precision="int8")
    for part in (ENCODER, DECODER):
        histogram = bundle.manifest.histograms[part]["quantized"]
        assert sum(count for op, count in histogram.items() if op in ("MatMulIntegerToFloat", "MatMulNBits")) >= 2
    assert verify(bundle.path).line()
    options = DecodeOptions(max_new_tokens=12)
    together = decode(OrtEngine(bundle), SOURCES, options)
    assert tokens_of(together) == [tokens_of(decode(OrtEngine(bundle), [source], options))[0] for source in SOURCES]


HALVES: list[Any] = [
    pytest.param(changes, precision, marks=pytest.mark.slow)
    for changes in (ROUTING, SINKHORN, MIXING, FREE)
    for precision in ("fp16", "bf16")
]


@pytest.mark.parametrize(("changes", "precision"), HALVES, ids=name_of)
def test_half_precision_keeps_sums_in_float32(tmp_path: Path, changes: dict[str, Any], precision: Any) -> None:
    origin = Origin(name="model", random=True)
    bundle = write_bundle(model_with(changes), tmp_path / "bundle", origin=origin, target="onnx", precision=precision)
    assert {tensor.dtype for tensor in bundle.spec.memory} == {"float16" if precision == "fp16" else "bfloat16"}
    if changes["decoder_attention" if "decoder_attention" in changes else "encoder_attention"] == "aft":
        assert {tensor.dtype for tensor in bundle.spec.state} == {"float32"}


def moved(model: ReferenceModel, distance: float) -> None:
    """Put the other centroids of each layer about this far from the first."""
    with torch.no_grad():
        for layer in model.encoder.layers:
            centroids = layer.attention.centroids
            centroids[1:] = centroids[0] + distance * torch.randn(centroids[1:].shape)


def test_probes_are_drawn_until_every_cluster_is_clear() -> None:
    model = model_with(ROUTING)
    engine = EagerEngine(model)
    probe = drawn_probe(engine, [24] * 6, 8)
    margins = engine.decision_margins(probe.source, probe.mask)
    assert margins is not None
    assert (margins >= SAFE_MARGINS * NOISE).all()
    draw = np.random.default_rng(0)
    source = draw.integers(3, 64, (64, 24))
    first = engine.decision_margins(source, np.ones_like(source, bool))
    assert first is not None
    assert (first < SAFE_MARGINS * NOISE).any()  # otherwise nothing had to be drawn again
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.attention.centroids.fill_(1.0)
    with pytest.raises(ExportFailed, match="none of 96 random sources of length 24 keeps a safe margin"):
        drawn_probe(engine, [24], 8)


def test_a_cluster_within_the_noise_is_a_tie_of_a_live_comparison_and_any_other_a_miss() -> None:
    torch.manual_seed(0)
    model, other = model_with(ROUTING), model_with(ROUTING)
    source = np.random.default_rng(1).integers(3, 64, (8, 24))
    mask = np.ones_like(source, bool)
    for distance, is_tie in ((1e-6, True), (1e-2, False)):
        moved(model, distance)
        moved(other, distance)
        result = compared_by_decisions(EagerEngine(other), EagerEngine(model), source, mask, 6)
        if is_tie:
            assert (result.differences > result.bounds[:, None]).any()
            agreement = logit_agreement([result])
            assert agreement.ties == int((result.differences > result.bounds[:, None]).sum())
            assert agreement.largest_of_bound <= 1
        else:
            with pytest.raises(ParityFailed, match="logits differ by"):
                logit_agreement([result])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [ROUTING, SINKHORN, MIXING, FREE], ids=name_of)
def test_tensorrt_rtx_builds_engines(changes: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(model_with(changes), tmp_path / "model")
    request = BuildRequest(flavour="tensorrt-rtx", capabilities=("8.6",))
    bundle = fatdeploy.export_model(
        str(tmp_path / "model"), tmp_path / "bundle", target="tensorrt-rtx", engines=request
    )
    assert [plan.part for plan in bundle.manifest.plans] == ["encoder", "decoder"]
