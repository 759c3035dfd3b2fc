"""Half precision as a stage: what becomes half, what must not, and what is refused. The graphs are small."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from fatdeploy.errors import ExportFailed
from fatdeploy.export.half.emulation import rounded
from fatdeploy.targets import HalfPrecision
from tests.support.half_graphs import branch, halved, node, ops, ran, stored, written

DRAW = np.random.default_rng(0)
MATRIX = DRAW.standard_normal((32, 32), np.float32)
X = DRAW.standard_normal((3, 32), np.float32)
HALF, FULL = int(TensorProto.FLOAT16), int(TensorProto.FLOAT)


def half(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16)


def test_matrices_and_activations_become_half_and_the_border_stays(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "y"), node("Add", "y b", "z"), node("Relu", "z", "a"), node("MatMul", "a w", "out")]
    inputs, outputs = {"x": ("float32", ["n", 32])}, {"out": ("float32", ["n", 32])}
    graph = halved(written(tmp_path / "g.onnx", nodes, inputs, outputs, {"w": MATRIX, "b": X[0]}))
    assert stored(graph) == {"w": HALF, "b": HALF}
    assert ops(graph) == ["Cast", "MatMul", "Add", "Relu", "MatMul", "Cast"]
    [output] = ran(graph, x=X)
    assert output.dtype == np.float32
    np.testing.assert_allclose(output, np.maximum(X @ MATRIX + X[0], 0) @ MATRIX, rtol=5e-3, atol=5e-2)


def test_inputs_and_outputs_in_the_border_become_half(tmp_path: Path) -> None:
    inputs, outputs = {"x": ("float32", ["n", 32])}, {"y": ("float32", ["n", 32])}
    graph = halved(
        written(tmp_path / "g.onnx", [node("MatMul", "x w", "y")], inputs, outputs, {"w": MATRIX}), "fp16", "x", "y"
    )
    assert ops(graph) == ["MatMul"]
    [output] = ran(graph, x=half(X))
    assert output.dtype == np.float16


def attention(path: Path, hidden: float) -> Path:
    nodes = [
        node("MatMul", "q k", "scores"),
        node("Where", "mask zero hidden", "added"),
        node("Add", "scores added", "visible"),
        node("Softmax", "visible", "weights"),
        node("MatMul", "weights v", "out"),
    ]
    inputs = {"q": ("float32", [3, 32]), "k": ("float32", [32, 4]), "v": ("float32", [4, 32]), "mask": ("bool", [3, 4])}
    constants = {"zero": np.float32(0), "hidden": np.float32(hidden)}
    return written(path, nodes, inputs, {"out": ("float32", [3, 32])}, constants)


def test_a_mask_beyond_the_range_hides_without_nan(tmp_path: Path) -> None:
    graph = halved(attention(tmp_path / "g.onnx", -1e30), "fp16", "q", "k", "v")
    mask = np.array([[True, True, False, False], [True, False, False, True], [False] * 4])
    k, v = half(MATRIX[:, :4]), half(MATRIX[:4])
    [output] = ran(graph, q=half(X), k=k, v=v, mask=mask)
    [other] = ran(graph, q=half(X), k=k, v=v + half(~mask[0])[:, None] * half(np.float32(100)), mask=mask)
    assert np.isfinite(output).all()
    np.testing.assert_array_equal(output[0], other[0])  # hidden values have a weight of exactly 0
    np.testing.assert_allclose(output[2], v.mean(0), atol=2e-3)  # all hidden: as in fp32, no NaN
    assert stored(graph)["hidden"] == FULL


def test_a_mask_that_an_op_reads_in_half_is_clipped_to_the_range(tmp_path: Path) -> None:
    nodes = [
        node("Where", "mask zero hidden", "added"),
        node(
            "MultiHeadAttention", "q k v - - added", "out", domain="com.microsoft", num_heads=2, mask_filter_value=-1e30
        ),
        node("Identity", "added", "mask_out"),
    ]
    inputs = {name: ("float32", [1, 3, 32]) for name in "qkv"} | {"mask": ("bool", [1, 1, 3, 3])}
    outputs = {"out": ("float32", [1, 3, 32]), "mask_out": ("float32", [1, 1, 3, 3])}
    constants = {"zero": np.float32(0), "hidden": np.float32(-1e30)}
    graph = halved(written(tmp_path / "g.onnx", nodes, inputs, outputs, constants), "fp16", "q", "k", "v", "mask_out")
    assert ops(graph).count("Clip") == 2  # for the attention, and for the output
    mask = np.tril(np.ones((1, 1, 3, 3), bool))
    out, mask_out = ran(graph, q=half(X[None]), k=half(X[None]), v=half(X[None]), mask=mask)
    np.testing.assert_array_equal(mask_out, np.where(mask, 0, np.float16(-65504)))
    np.testing.assert_array_equal(out[0, 0], half(X)[0])  # the first position sees itself alone


@pytest.mark.parametrize(("precision", "largest"), [("fp16", 7e4), ("bf16", 3.4e38)])
def test_a_weight_beyond_the_range_is_named(tmp_path: Path, precision: HalfPrecision, largest: float) -> None:
    matrix = MATRIX.copy()
    matrix[3, 4] = -largest
    nodes = [node("MatMul", "x fine", "y"), node("MatMul", "y heavy", "out")]
    inputs, outputs = {"x": ("float32", ["n", 32])}, {"out": ("float32", ["n", 32])}
    graph = written(tmp_path / "g.onnx", nodes, inputs, outputs, {"fine": MATRIX, "heavy": matrix})
    reason = re.escape(f"heavy (read by part/out) has {largest:.4g}. Export with")
    with pytest.raises(ExportFailed, match=f"weights beyond the range of {precision}, .*: {reason}"):
        halved(graph, precision)
    if precision == "fp16":
        assert stored(halved(graph, "bf16"))["heavy"] == TensorProto.BFLOAT16


@pytest.mark.parametrize("first", [True, False])
def test_branches_of_a_condition_have_one_type_and_read_outer_values(tmp_path: Path, first: bool) -> None:
    then = branch([node("MatMul", "y w", "inner"), node("Add", "inner one", "a")], "a", {"one": np.float32(1)})
    otherwise = branch([node("Exp", "y", "b")], "b")
    nodes = [
        node("MatMul", "x w", "y"),
        node("If", "first", "c", then_branch=then, else_branch=otherwise),
        node("Add", "c y", "out"),
    ]
    inputs = {"x": ("float32", ["n", 32]), "first": ("bool", [])}
    outputs = {"out": ("float32", ["n", 32]), "c": ("float32", ["n", 32])}
    graph = written(tmp_path / "g.onnx", nodes, inputs, outputs, {"w": MATRIX / 8})
    outputs = ran(halved(graph), x=X, first=np.array(first))
    for output, expected in zip(outputs, ran(graph, x=X, first=np.array(first)), strict=True):
        np.testing.assert_allclose(output, expected, rtol=5e-3, atol=5e-3)
        assert np.abs(output - expected).max() > 1e-5


def test_a_condition_between_matrices_is_half(tmp_path: Path) -> None:
    then, otherwise = branch([node("MatMul", "y w", "a")], "a"), branch([node("Mul", "y none", "b")], "b")
    nodes = [
        node("MatMul", "x w", "y"),
        node("If", "first", "c", then_branch=then, else_branch=otherwise),
        node("MatMul", "c w", "out"),
    ]
    inputs = {"x": ("float32", ["n", 32]), "first": ("bool", [])}
    constants = {"w": MATRIX, "none": np.float32(0)}
    graph = halved(written(tmp_path / "g.onnx", nodes, inputs, {"out": ("float32", ["n", 32])}, constants), "fp16", "x")
    assert ops(graph).count("Cast") == 1  # at the border
    [output] = ran(graph, x=half(X), first=np.array(0, bool))
    assert not output.any()


def test_the_body_of_a_loop_is_refused(tmp_path: Path) -> None:
    inputs, outputs = {"x": ("float32", ["n", 32])}, {"out": ("float32", ["n", 32])}
    nodes = [node("Loop", "n - x", "out", body=branch([], "x"))]
    graph = written(tmp_path / "g.onnx", nodes, inputs, outputs, {"n": np.array(2)})
    with pytest.raises(ExportFailed, match=r"Loop \(part/out\) cannot be converted to half precision"):
        halved(graph)


def test_squares_are_summed_in_float32(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x w", "q"),
        node("Add", "q b", "a"),
        node("Relu", "a", "p"),
        node("Mul", "p p", "squares"),
        node("ReduceSum", "squares axes", "total", keepdims=0),
        node("Sqrt", "total", "out"),
    ]
    constants = {"w": 100 * np.eye(32, dtype=np.float32), "b": np.full(32, 300, np.float32), "axes": np.array([1])}
    inputs, outputs = {"x": ("float32", ["n", 32])}, {"out": ("float32", ["n"])}
    graph = written(tmp_path / "g.onnx", nodes, inputs, outputs, constants)
    [output] = ran(halved(graph), x=X)  # 32 · 300² is far beyond the range
    np.testing.assert_allclose(output, np.sqrt((np.maximum(100 * X + 300, 0) ** 2).sum(1)), rtol=1e-3)


def test_a_number_that_half_would_round_to_zero_keeps_a_logarithm_finite(tmp_path: Path) -> None:
    nodes = [node("Mul", "x x", "p"), node("Add", "p tiny", "safe"), node("Log", "safe", "out")]
    inputs, outputs = {"x": ("float32", [2])}, {"out": ("float32", [2])}
    graph = halved(written(tmp_path / "g.onnx", nodes, inputs, outputs, {"tiny": np.float32(1e-9)}), "fp16", "x")
    [output] = ran(graph, x=np.array([0, 1], np.float16))
    np.testing.assert_allclose(output, np.log([1e-9, 1]), atol=1e-6)


def test_recurrent_sums_do_not_lose_what_a_step_adds(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x w", "h"),
        node("Relu", "h", "features"),
        node("Transpose", "features", "columns", perm=[1, 0]),
        node("MatMul", "columns h", "new"),
        node("Add", "past new", "present"),
        node("MatMul", "features present", "read"),
        node("ReduceSum", "read axes", "whole"),
        node("Div", "read whole", "share"),
        node("MatMul", "share w", "out"),
    ]
    inputs = {"x": ("float32", [1, 32]), "past": ("float32", [32, 32])}
    outputs = {"present": ("float32", [32, 32]), "out": ("float32", [1, 32])}
    constants = {"w": np.eye(32, dtype=np.float32), "axes": np.array([1])}
    graph = halved(written(tmp_path / "g.onnx", nodes, inputs, outputs, constants), "fp16", "x")
    x, past = np.full((1, 32), 0.5, np.float16), np.full((32, 32), 4000, np.float32)
    present, out = ran(graph, x=x, past=past)
    np.testing.assert_array_equal(present, 4000.25)  # half would round to 4000
    np.testing.assert_allclose(out, 1 / 32, rtol=1e-3)  # 16 · 4000 · 32 is beyond the range


def test_small_constants_have_a_copy_of_each_type_and_large_ones_none(tmp_path: Path) -> None:
    nodes = [
        node("Gather", "table ids", "x"),
        node("Mul", "x scale", "scaled"),
        node("Gemm", "scaled table", "logits", transB=1),
        node("Softmax", "logits", "weights"),
        node("Mul", "weights scale", "out"),
        node("Add", "table added", "shifted"),
        node("ReduceSum", "shifted -", "total"),
    ]
    outputs = {"out": ("float32", ["n", 32]), "total": ("float32", [1, 1])}
    constants = {"table": MATRIX, "scale": np.float32(3), "added": np.float32(1e9)}
    graph = halved(written(tmp_path / "g.onnx", nodes, {"ids": ("int64", ["n"])}, outputs, constants))
    assert sorted(stored(graph).values()) == sorted([HALF, HALF, FULL, FULL])  # table, scale; scale, added
    assert graph.with_suffix(".weights").stat().st_size == 2 * MATRIX.size
    out, total = ran(graph, ids=np.array([3, 1]))
    np.testing.assert_allclose(out.sum(1), 3, rtol=1e-5)
    np.testing.assert_allclose(total, 1024 * 1e9, rtol=1e-6)


def test_whole_numbers_are_not_rounded(tmp_path: Path) -> None:
    nodes = [node("Cast", "n", "x", to=FULL), node("Mul", "x scale", "out")]
    inputs, outputs = {"n": ("int64", [2])}, {"out": ("float32", [2])}
    graph = halved(written(tmp_path / "g.onnx", nodes, inputs, outputs, {"scale": np.float32(0.5)}), "bf16")
    np.testing.assert_array_equal(ran(graph, n=np.array([257, 511]))[0], [128.5, 255.5])


def test_the_copy_in_float32_rounds_every_result(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "y"), node("Add", "y b", "z"), node("Tanh", "z", "out")]
    inputs, outputs = {"x": ("float32", ["n", 32])}, {"out": ("float32", ["n", 32])}
    graph = halved(written(tmp_path / "g.onnx", nodes, inputs, outputs, {"w": MATRIX, "b": X[0]}), "bf16", "x", "out")
    copy = rounded(graph, tmp_path / "copy.onnx")
    short = X.astype(ml_dtypes.bfloat16)
    steps = (short.astype(np.float32) @ MATRIX.astype(ml_dtypes.bfloat16).astype(np.float32)).astype(ml_dtypes.bfloat16)
    steps = steps + X[0].astype(ml_dtypes.bfloat16)
    expected = np.tanh(steps.astype(np.float32)).astype(ml_dtypes.bfloat16)
    [output] = ran(copy, x=short.astype(np.float32))
    assert (output == expected.astype(np.float32)).mean() > 0.95  # a sum in another order may round differently
    assert np.abs(output - np.tanh(X @ MATRIX + X[0])).max() > 1e-3
    np.testing.assert_array_equal(output, output.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(output, expected.astype(np.float32), atol=1e-2)
