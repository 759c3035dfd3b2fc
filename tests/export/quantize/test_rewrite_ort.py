"""Quantized graphs: what they compute, what they store, and that no row depends on its batch."""

from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.errors import ConfigError, ExportFailed, ParityFailed
from fatdeploy.export.graph_files import graphs_of, op_histogram, read_structure
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.quantize import recipe
from fatdeploy.export.quantize import rewrite_ort as quantize
from fatdeploy.export.quantize.calibrate import exposed
from fatdeploy.export.quantize.integers import ValueRange, blocks_from_matrix, columns_from_matrix
from fatdeploy.export.quantize.matrices import Product, products_of, tensor_from_array
from fatdeploy.export.quantize.precisions import matrices_of, precisions_of
from fatdeploy.export.quantize.recipe import MatrixRecipe, Recipe
from fatdeploy.export.quantize.request import QuantizeRequest
from fatdeploy.export.quantize.rewrite_ort import quantized
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import PRESETS
from fatdeploy.manifest import DECODER, ENCODER, OutputMatrix, WideRows
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.proof.gate import ROW_BOUNDS, check_rows, forced_fidelity, read_material, token_agreement
from tests.support.bundles import bundle_of, model_of, shared_bundle
from tests.support.choices import tiny
from tests.support.quantized import quantized_of, quantizer_from, quantizer_of

K, N = 48, 24
DRAW = np.random.default_rng(5)
WEIGHT = DRAW.standard_normal((K, N)).astype(np.float32)
BIAS = DRAW.standard_normal(N).astype(np.float32)


def graph_of(nodes: list[onnx.NodeProto], folder: Path, **constants: np.ndarray) -> Path:
    """Write a graph x [rows, K] -> y with these constants."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [tensor_from_array(name, array) for name, array in constants.items()],
    )
    path = folder / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(["y"], {"x": x})[0]
    return result


def small_product(folder: Path) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="part/p"),
        helper.make_node("Add", ["p", "b"], ["y"], name="part/y"),
    ]
    return graph_of(nodes, folder, w=WEIGHT, b=BIAS)


def as_integers(graph: Path, recipe: MatrixRecipe, bits: int = 7) -> Path:
    (only,) = products_of(read_structure(graph).graph)
    return quantized(
        graph, graph.with_name("new.onnx"), Recipe({only.name: recipe}, table_sizes=frozenset([99]), bits=bits)
    )


@pytest.mark.parametrize("bits", [7, 8])
def test_a_static_product_is_exact_integer_arithmetic(tmp_path: Path, bits: int) -> None:
    chosen, x = ValueRange(0.03, 120), DRAW.standard_normal((5, K)).astype(np.float32)
    new = as_integers(small_product(tmp_path), MatrixRecipe("static", chosen), bits)
    expected = chosen.restored(x).astype(np.float64) @ columns_from_matrix(WEIGHT, bits).restored() + BIAS
    np.testing.assert_allclose(run(new, x), expected, atol=1e-5)
    assert op_histogram(new) == {"MatMulIntegerToFloat": 1, "QuantizeLinear": 1}


def test_a_product_by_row_gives_every_row_its_own_scale(tmp_path: Path) -> None:
    x = DRAW.standard_normal((4, K)).astype(np.float32) * np.array([[1e-3], [1], [50], [0]], np.float32)
    new = as_integers(small_product(tmp_path), MatrixRecipe("row"))
    result, exact = run(new, x), x @ WEIGHT + BIAS
    sizes = np.abs(x @ WEIGHT).max(1)
    assert (np.abs(result - exact).max(1) <= 0.03 * sizes + 1e-6).all()
    np.testing.assert_array_equal(result, np.concatenate([run(new, row[None]) for row in x]))


def test_one_scale_for_a_whole_batch_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: Any, product: Product, chosen: ValueRange, bias: str, output: str) -> list[onnx.NodeProto]:
        values, scales = self._columns(product)
        inputs = [product.activation, values, scales, "", bias]
        return [helper.make_node("DynamicQuantizeMatMul", inputs, [output], domain=quantize.CONTRIB)]

    monkeypatch.setattr(quantize._OrtRewrite, "_in_range", whole)
    quantizer = quantizer_of("transformer-tiny", QuantizeRequest(precision="int8"))
    with pytest.raises(ParityFailed, match=r"of a batch of 8 gets logits that differ .*: a row depends on its batch"):
        quantizer.written(tmp_path, enforced=False)
    # It is built, it runs, and a row alone is as accurate as in the other forms: only rows in a batch are wrong.
    for part in (ENCODER, DECODER):
        ops = op_histogram(tmp_path / part)
        assert ops["DynamicQuantizeMatMul"] >= 8
        assert "MatMulIntegerToFloat" not in ops
    engine = OrtEngine(read_bundle(tmp_path))
    assert forced_fidelity(engine, quantizer.gate.material.rows(slice(1))).share > 0.9


def looked_up_and_multiplied(folder: Path, table: np.ndarray) -> tuple[onnx.ModelProto, Path]:
    """Return a graph that looks up rows of a table [V, M] and multiplies them by the whole table, in 4 bits."""
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["w", "ids"], ["rows"], name="part/rows"),
            helper.make_node("MatMul", ["rows", "turned"], ["other"], name="other/y"),
            helper.make_node("FusedMatMul", ["rows", "w"], ["y"], name="part/y", domain="com.microsoft", transB=1),
        ],
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "m"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("rows", "other", "y")],
        [tensor_from_array("w", table), tensor_from_array("turned", np.ascontiguousarray(table.T))],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "tied.onnx")
    recipe = Recipe({"part": MatrixRecipe("blocks4")}, table_sizes=frozenset([len(table)]))
    new = quantized(folder / "tied.onnx", folder / "new.onnx", recipe)
    return onnx.load(new), new


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("width", "size"), [(24, 16), (40, 16), (48, 16), (64, 16), (24, 32), (40, 32), (48, 32), (64, 32)]
)
def test_rows_of_4_bits_have_the_width_of_the_table_whatever_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, size: int, symmetric: bool
) -> None:
    table = np.random.default_rng(width).standard_normal((99, width)).astype(np.float32)
    blocks = blocks_from_matrix(np.ascontiguousarray(table.T), size, symmetric=symmetric)
    monkeypatch.setattr(recipe, "best_blocks", lambda _: blocks)
    model, new = looked_up_and_multiplied(tmp_path, table)
    ops = Counter(node.op_type for node in model.graph.node)
    assert ops == Counter(["GatherBlockQuantized", "MatMulNBits", "MatMul"] + ["Slice"] * (width % size > 0))
    ids = np.array([[3, 98, 0], [50, 3, 7]])
    session = onnxruntime.InferenceSession(str(new), providers=["CPUExecutionProvider"])
    rows, other, product = session.run(["rows", "other", "y"], {"ids": ids})
    np.testing.assert_array_equal(rows, blocks.restored().T[ids])
    np.testing.assert_allclose(other, rows @ table.T, atol=1e-4)
    # The kernel rounds the rows as well.
    np.testing.assert_allclose(product, rows @ blocks.restored(), atol=0.01 * np.abs(product).max())


@cache
def narrow() -> tuple[Bundle, ReferenceModel]:
    """Return an exported model whose width is not a multiple of a block; a few positions have a huge activation."""
    sizes = {"width": 48, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "max_source": 8, "max_target": 8}
    model = tiny(sizes)
    ffn = model.decoder.layers[0].ffn
    with torch.no_grad():
        # One unit in 64 is almost always zero, and dwarfs all others where it is not.
        ffn.into.weight[0] *= 300
        ffn.into.bias[0] = -2 * ffn.into.weight[0].norm()
        ffn.out.weight[:, 0] /= 300
    write = partial(write_bundle, model, origin=Origin(name="narrow"))
    return shared_bundle("narrow", write), model


def test_a_model_whose_width_is_not_a_multiple_of_a_block_is_quantized_to_4_bits(tmp_path: Path) -> None:
    plain, model = narrow()
    judged = quantizer_from(plain, exportable_model(model), QuantizeRequest(precision="int4")).written(
        tmp_path, enforced=False
    )
    assert judged.quantization.matrices["output"] == judged.quantization.matrices["embedding"] == "int4"
    assert op_histogram(tmp_path / ENCODER)["Slice"] > op_histogram(plain.path / ENCODER).get("Slice", 0)
    assert judged.judgement.agreement.share > 0.5


def test_an_activation_that_no_range_fits_is_far_better_with_a_scale_per_row() -> None:
    plain, model = narrow()
    quantizer = quantizer_from(plain, exportable_model(model), QuantizeRequest(precision="int8"))
    errors = {
        name: {option.recipe.kind: option.error for option in options} for name, options in quantizer.options.items()
    }
    hard, easy = errors["decoder.layers.0.ffn.out"], errors["decoder.layers.0.cross.q"]
    assert hard["int8 static"] > 5 * min(hard.values())
    assert easy["int8 static"] < 5 * min(error for error in easy.values() if error)


def test_a_relu_before_unsigned_integers_is_left_out(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="part/r"),
        helper.make_node("MatMul", ["r", "w"], ["y"], name="part/y"),
    ]
    graph = graph_of(nodes, tmp_path, w=WEIGHT)
    x = DRAW.standard_normal((3, K)).astype(np.float32)
    new = as_integers(graph, MatrixRecipe("static", ValueRange(0.02, 0)))
    assert op_histogram(new) == {"MatMulIntegerToFloat": 1, "QuantizeLinear": 1}
    expected = ValueRange(0.02, 0).restored(np.maximum(x, 0)) @ columns_from_matrix(WEIGHT, 7).restored()
    np.testing.assert_allclose(run(new, x), expected, atol=1e-5)
    with_sign = as_integers(graph, MatrixRecipe("static", ValueRange(0.02, 3)))
    assert op_histogram(with_sign)["Relu"] == 1


def test_matrices_that_stay_are_untouched_and_unknown_ones_refused(tmp_path: Path) -> None:
    graph, x = small_product(tmp_path), DRAW.standard_normal((3, K)).astype(np.float32)
    np.testing.assert_array_equal(run(as_integers(graph, MatrixRecipe("fp32")), x), run(graph, x))
    with pytest.raises(ExportFailed, match=r"small.onnx has no matrices \['other'\], only \['part'\]"):
        quantized(graph, tmp_path / "new.onnx", Recipe({"other": MatrixRecipe("row")}, table_sizes=frozenset([99])))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="part/y")]
    graph = graph_of(nodes, tmp_path, w=np.where(WEIGHT > 2, np.nan, WEIGHT).astype(np.float32))
    with pytest.raises(ExportFailed, match="w has weights that are not finite"):
        as_integers(graph, MatrixRecipe("static", ValueRange(1.0, 0)))


def test_values_inside_branches_can_be_read(tmp_path: Path) -> None:
    def branch(name: str, factor: float) -> onnx.GraphProto:
        return helper.make_graph(
            [
                helper.make_node("Mul", ["x", f"{name}/f"], [f"{name}/m"]),
                helper.make_node("Neg", [f"{name}/m"], [name]),
            ],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
            [tensor_from_array(f"{name}/f", np.array(factor, np.float32))],
        )

    node = helper.make_node("If", ["positive"], ["y"], then_branch=branch("up", 2), else_branch=branch("down", 3))
    before = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
    ]
    path = graph_of([*before, node], tmp_path, zero=np.array(0, np.float32))
    model = onnx.load(path)
    shown = exposed(model.graph, ["up/m", "down/m", "sum"])
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for x, up, down in ((1.0, 2.0, None), (-1.0, None, -3.0)):
        feed = np.full((1, K), x, np.float32)
        values = dict(zip(shown, session.run(list(shown.values()), {"x": feed}), strict=True))
        assert values["sum"] == x * K
        for name, expected in (("up/m", up), ("down/m", down)):
            assert values[name].tolist() == ([] if expected is None else [[expected] * K])


# Random weights of the published forms, whose scores have no scale, turn on the rounding of integers more often.
CALM = [preset for preset in PRESETS if not preset.endswith("-published")]


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("preset", CALM)
def test_a_quantized_preset_mostly_agrees_with_the_reference(preset: str, precision: str) -> None:
    bundle = quantized_of(f"{preset}-tiny", precision)
    engine, material = OrtEngine(bundle), read_material(bundle)
    kind = {"int8": "int8", "int4": "blocks"}[precision]
    assert check_rows(engine, material, kind) <= ROW_BOUNDS[kind]
    agreement = token_agreement(engine, material)
    assert agreement.tokens == int(material.lengths.sum())
    # Random weights decide by small margins: a fifth of the 4-bit steps may differ, nearly all 8-bit steps agree.
    assert agreement.share >= (0.9 if precision == "int8" else 0.5)
    assert token_agreement(EagerEngine(model_of(f"{preset}-tiny")), material).share == 1.0


@pytest.mark.parametrize("preset", PRESETS)
def test_no_matrix_of_a_quantized_preset_is_left_as_floats(preset: str) -> None:
    bundle = quantized_of(f"{preset}-tiny", "int8")
    for part in (ENCODER, DECODER):
        assert products_of(read_structure(bundle.path / part).graph) == []
    if preset not in CALM or model_of(f"{preset}-tiny").config.recurrent_decoder:
        return  # no feed-forward network, one of another width, or one inside a branch, whose parts have no names
    parts = bundle.manifest.weights, bundle_of(f"{preset}-tiny").manifest.weights
    (_, mine), (_, plain) = ((kind, groups["decoder.layers.*.ffn.into"]) for kind, groups in enumerate(parts))
    assert (mine.parameters, mine.bytes) == (
        plain.parameters,
        2 * 64 * (32 + 4),
    )  # bytes for weights, floats for biases


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_tied_matrix_is_stored_once_and_its_rows_can_be_read(precision: str) -> None:
    bundle = quantized_of("fat-tiny", precision)
    matrix = bundle.manifest.output_matrix
    assert matrix is not None
    assert matrix.dtype == precision
    places = {
        entry.value
        for part in (ENCODER, DECODER)
        for graph in graphs_of(read_structure(bundle.path / part).graph)
        for tensor in graph.initializer
        if tensor.name.startswith("model.inner.output.weight/") and tensor.name.endswith(("/rows", "/blocks"))
        for entry in tensor.external_data
        if entry.key == "offset"
    }
    assert places == {str(matrix.offset)}
    ids = np.array([60, 2, 17])
    rows, exact = (engine.output_rows(ids) for engine in (OrtEngine(bundle), EagerEngine(model_of("fat-tiny"))))
    assert np.abs(rows - exact).max() <= np.abs(exact).max() * (0.01 if precision == "int8" else 0.15)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_tied_matrix_is_transposed_outside_branches(preset: str) -> None:
    # Inside a branch, onnxruntime would keep the result in memory beside the copy that its kernel makes.
    outer, *branches = graphs_of(read_structure(quantized_of(f"{preset}-tiny", "int8").path / DECODER).graph)
    constants = {tensor.name for tensor in outer.initializer}
    turning = [
        [node.input[0] in constants for node in branch.node if node.op_type == "Transpose"] for branch in branches
    ]
    assert not any(any(reads_constant) for reads_constant in turning)
    assert [node.input[0] for node in outer.node if node.op_type == "Transpose" and node.input[0] in constants] == [
        "model.inner.output.weight/rows"
    ]


def test_records_of_integers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="only integers have scales"):
        OutputMatrix(0, "int8", transposed=False)
    with pytest.raises(ValueError, match="floats have none: found float32 with 32"):
        OutputMatrix(0, "float32", transposed=False, block_size=32)
    with pytest.raises(ValueError, match=r"int4 has blocks of 2 or more, .*found int4 with None"):
        OutputMatrix(0, "int4", transposed=False, scales=8)
    with pytest.raises(ValueError, match="only integers are smoothed, found float32"):
        OutputMatrix(0, "float32", transposed=False, smoothing=64)
    with pytest.raises(ValueError, match="scales must be 0 or more, found -1"):
        OutputMatrix(0, "int8", transposed=False, scales=-1)
    with pytest.raises(ValueError, match="only int4 has wide rows, found int8"):
        OutputMatrix(0, "int8", transposed=False, scales=8, block_size=32, wide=WideRows(16, 0, 0, 32))
    with pytest.raises(ValueError, match="rows must be 1 or more, found 0"):
        WideRows(0, 0, 0, 32)


def test_precisions_of_single_matrices_are_chosen_by_pattern() -> None:
    bundle = bundle_of("transformer-tiny")
    matrices = matrices_of({part: bundle.path / part for part in (ENCODER, DECODER)}, bundle.spec)
    assert [matrix.name for matrix in matrices if matrix.tied] == ["output"]
    precisions = precisions_of(matrices, "int4", {"output": "int8", "encoder.layers.0.*": "fp32"})
    assert (precisions["output"], precisions["embedding"]) == ("int8", "int8")
    assert precisions["encoder.layers.0.ffn.into"] == "fp32"
    assert precisions["encoder.layers.1.ffn.into"] == "int4"
    with pytest.raises(ConfigError, match=r"names nothing of this model: outptu\. There are encoder\.layers\.0"):
        precisions_of(matrices, "int8", {"outptu": "fp32"})
    with pytest.raises(ConfigError, match="give both the same precision, found fp32 and int8"):
        precisions_of(matrices, "int8", {"embedding": "fp32"})


def test_matrices_can_be_mixed(tmp_path: Path) -> None:
    quantizer = quantizer_of(
        "transformer-tiny", QuantizeRequest(precision="int4", of={"output": "int8", "*ffn*": "fp32"})
    )
    judged = quantizer.written(tmp_path / "mixed" if (tmp_path / "mixed").mkdir() is None else tmp_path, enforced=False)
    kinds = judged.quantization.matrices
    assert kinds["output"].startswith("int8 blocks")
    assert kinds["decoder.layers.0.ffn.out"] == "fp32"
    assert kinds["decoder.layers.0.cross.q"].startswith("int4")
    assert judged.row_difference <= ROW_BOUNDS["blocks"]
