"""Integers in standard ops: their results on onnxruntime, builds by TensorRT-RTX, and what is refused."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from click.testing import CliRunner

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.errors import ConfigError
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.pipeline import Origin, Plain, trial_of, write_quantized
from fatdeploy.export.quantize.examples import random_examples
from fatdeploy.export.quantize.integers import columns_from_matrix
from fatdeploy.export.quantize.recipe import MatrixRecipe, Recipe
from fatdeploy.export.quantize.request import QuantizeRequest, check_request
from fatdeploy.export.quantize.rewrite_qdq import symmetric_range, with_scales
from fatdeploy.manifest import DECODER, EMBEDDING, ENCODER, PARITY, WEIGHTS, Quantization
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.output_matrix import stored_output_rows
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest, build_engines
from fatdeploy.runtimes.proof.gate import row_kind
from fatdeploy.runtimes.proof.verify import verified_quantized
from fatdeploy.targets import TARGETS
from tests.support.bundles import bundle_of, model_of, shared_bundle
from tests.support.half_graphs import node, ops, ran, written

Kind = Literal["int8", "float"]


@cache
def quantized_of(preset: str, activations: Kind) -> Bundle:
    """Return a preset in standard ops with bytes for matrices; nothing is traced again."""
    plain, exportable = bundle_of(preset, "standard"), exportable_model(model_of(preset))
    graphs = {part: plain.path / part for part in (ENCODER, DECODER)}
    examples = random_examples(exportable.spec, 0), random_examples(exportable.spec, 1)[:12]
    request = QuantizeRequest(precision="int8", activations=activations)

    def write(folder: Path) -> None:
        folder.mkdir()
        origin = Origin(name=preset, random=True)
        model = Plain(exportable, origin, "onnx", traced={}, graphs=graphs, stage=lambda _: None)
        write_quantized(model, plain, folder, trial_of(origin, request, examples, None, lambda _: None))

    return shared_bundle(f"{preset}-qdq-{activations}", write)


KINDS: list[tuple[Kind, str, float]] = [("int8", "int8 static", 0.0), ("float", "int8 weights", 2e-6)]


@pytest.mark.parametrize(("activations", "described", "bound"), KINDS)
def test_the_gate_judges_standard_graphs_and_a_batch_is_its_rows(
    activations: Kind, described: str, bound: float
) -> None:
    bundle = quantized_of("transformer-tiny", activations)
    manifest = bundle.manifest
    assert (manifest.precision, manifest.dialect) == ("int8", "standard")
    assert manifest.quantization is not None
    kinds = {name: kind for name, kind in manifest.quantization.matrices.items() if name != EMBEDDING}
    assert set(kinds.values()) == {described}
    assert "output" in kinds
    assert manifest.quantization.weight_bits == (7 if activations == "int8" else 8)
    gate = json.loads(bundle.file(PARITY).read_text())["gate"]
    assert gate["agreement"]["share"] > 0.9
    assert gate["row_difference"] <= bound
    check = verified_quantized(bundle, OrtEngine(bundle, OrtOptions(threads=1)))
    assert check.share == gate["agreement"]["share"]
    histogram = manifest.histograms[DECODER]["quantized"]
    # Six matrices per layer, the output matrix and the embedding; with int8 also the activations.
    assert (histogram["DequantizeLinear"] == 14) == (activations == "float")
    assert ("QuantizeLinear" in histogram) == (activations == "int8")
    assert manifest.files[WEIGHTS].size < 0.5 * bundle_of("transformer-tiny", "standard").manifest.files[WEIGHTS].size


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_beams_in_a_batch_are_those_of_each_source_alone(activations: Kind) -> None:
    engine = OrtEngine(quantized_of("transformer-tiny", activations), OrtOptions(threads=1))
    sources = [[5, 6, 7, 8, 9], [20, 21], [33]]
    options = DecodeOptions(num_beams=3, max_new_tokens=8)
    together = decode(engine, sources, options)
    alone = [decode(engine, [source], options)[0] for source in sources]
    assert [hypothesis.tokens for hypothesis in together] == [hypothesis.tokens for hypothesis in alone]


def test_rows_of_the_output_matrix_are_those_of_its_bytes() -> None:
    matrix = model_of("transformer-tiny").output.weight.detach().numpy()
    columns = columns_from_matrix(np.ascontiguousarray(matrix.T), 7)
    rows = stored_output_rows(quantized_of("transformer-tiny", "int8"), np.array([3, 9]))
    np.testing.assert_array_equal(rows, columns.restored().T[[3, 9]])


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_engines_are_built_from_it(activations: Kind, tmp_path: Path) -> None:
    bundle = quantized_of("transformer-tiny", activations)
    folder = Path(shutil.copytree(bundle.path, tmp_path / "copy"))
    after = build_engines(
        folder, BuildRequest(flavour="tensorrt-rtx", capabilities=("8.6", "8.9", "12.0")), stage=lambda _: None
    )
    assert [plan.part for plan in after.manifest.plans] == ["encoder", "decoder"]
    log = (folder / after.manifest.plans[1].file).with_suffix(".log").read_text()
    assert "DequantizeLinear" in log
    assert after.manifest.quantization == bundle.manifest.quantization


def test_numbers_are_those_of_bytes_and_their_scales(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    matrix, x = draw.standard_normal((32, 64), np.float32), draw.standard_normal((3, 32), np.float32)
    graph = written(
        tmp_path / "graph.onnx",
        [node("MatMul", "x matrix", "y")],
        {"x": ("float32", ["n", 32])},
        {"y": ("float32", ["n", 64])},
        {"matrix": matrix},
    )
    chosen = symmetric_range(x, (float(x.min()), float(x.max())), "min-max")
    columns = columns_from_matrix(matrix, 8)
    for activations, expected in ((None, x), (chosen, chosen.restored(x))):
        form = "weights" if activations is None else "static"
        recipe = Recipe({"part": MatrixRecipe(form, activations)}, frozenset([99]), bits=8)
        result = with_scales(graph, tmp_path / "quantized.onnx", recipe)
        np.testing.assert_allclose(ran(result, x=x)[0], expected @ columns.restored(), rtol=1e-4, atol=1e-4)
        rounding = [] if activations is None else ["QuantizeLinear", "DequantizeLinear"]
        assert ops(result) == ["DequantizeLinear", *rounding, "MatMul"]


def test_a_range_holds_all_or_nearly_all_of_an_activation() -> None:
    values = np.append(np.linspace(-1, 1, 100_000, dtype=np.float32), np.float32(40))[:, None]
    whole = symmetric_range(values, (-1.0, 50.0), "min-max")
    assert (whole.scale, whole.zero) == (pytest.approx(50 / 127), 128)
    cut = symmetric_range(values, (-1.0, 50.0), "percentile")
    assert cut.scale == pytest.approx(1 / 127, rel=1e-3)
    assert symmetric_range(np.zeros((4, 1), np.float32), (0.0, 0.0), "percentile").scale == 1.0
    np.testing.assert_allclose(whole.restored(np.array([50.0, 0.0, -50.0], np.float32)), [50, 0, -50], rtol=1e-6)


def test_weight_only_quantization_is_recognised() -> None:
    def of(**matrices: str) -> Quantization:
        return Quantization("any", 8, matrices, enforced=False)

    assert of(a="int8 weights", b="fp32", embedding="int8").weights_alone
    assert not of(a="int8 weights", b="int8 static").weights_alone
    assert not of(a="fp32", embedding="int8").weights_alone
    assert row_kind("int8", of(a="int8 weights")) == "int8 weights"
    assert row_kind("int8", of(a="int8 static")) == "int8"
    assert row_kind("fp16", None) == "fp16"


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rows_are_compared_by_how_matrices_are_stored(precision: str) -> None:
    def kind_of(**matrices: str) -> str:
        return row_kind(precision, Quantization("any", 7, matrices, enforced=False))

    assert kind_of(a="int8 static", b="int4", embedding="int8") == "blocks"
    assert kind_of(a="int8 static", b="int8 blocks smoothed", embedding="int8") == "blocks"
    assert kind_of(a="int8 static", b="int8 by row", c="fp32") == "int8"
    # Rows that are looked up are not summed.
    assert kind_of(a="int8 static", embedding="int4") == "int8"


def test_everything_a_dialect_lacks_is_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--activations float is for graphs .*; --ranges min-max is for graphs"):
        check_request(QuantizeRequest(precision="int8", activations="float", ranges="min-max"), TARGETS["ort-cpu"])
    with pytest.raises(ConfigError, match=r"onnx takes .*found int4: .*export with --target ort-cpu"):
        check_request(QuantizeRequest(precision="int8", of={"output": "int4"}), TARGETS["onnx"])
    check_request(QuantizeRequest(precision="int8", activations="float"), TARGETS["onnx"])
    run = CliRunner().invoke(
        main, ["export", "fat-tiny", "--out", str(tmp_path / "x"), "--activations", "float", "--ranges", "min-max"]
    )
    assert "nothing is quantized in fp32" in run.stderr
    assert "--activations is for integers; --ranges is for integers" in run.stderr
