"""The forms of a matrix: each computes what its kernels compute, and its error is that of onnxruntime."""

from pathlib import Path

import numpy as np
import pytest

from fatdeploy.export.quantize.integers import range_from_ends
from fatdeploy.export.quantize.planning.forms import Sample, candidates_of, measured_form
from fatdeploy.export.quantize.recipe import Form, MatrixRecipe, Recipe
from fatdeploy.export.quantize.rewrite_ort import quantized
from tests.support.half_graphs import node, ops, ran, written

DRAW = np.random.default_rng(0)
ROWS = DRAW.standard_normal((200, 64)).astype(np.float32)
ROWS[:, 5] *= 40  # a channel that one range for all does not suit
ROWS[:, 9] += 3
MATRIX = DRAW.standard_normal((64, 48)).astype(np.float32)
BIAS = DRAW.standard_normal(48).astype(np.float32)
SAMPLE = Sample(ROWS, MATRIX, np.full(48, 1 / 48, np.float32))


def computed(tmp_path: Path, recipe: MatrixRecipe) -> tuple[np.ndarray, list[str]]:
    """Return what onnxruntime computes, and the ops that do it."""
    graph = written(
        tmp_path / "graph.onnx",
        [node("MatMul", "x model.inner.part.weight", "p"), node("Add", "p model.inner.part.bias", "y")],
        {"x": ("float32", ["n", 64])},
        {"y": ("float32", ["n", 48])},
        {"model.inner.part.weight": MATRIX, "model.inner.part.bias": BIAS},
    )
    result = quantized(graph, tmp_path / "new.onnx", Recipe({"part": recipe}, frozenset([99]), bits=8))
    return ran(result, x=ROWS)[0], ops(result)


@pytest.mark.parametrize("form", ["static", "row", "blocks8", "blocks4"])
def test_the_error_of_a_form_is_that_of_onnxruntime(tmp_path: Path, form: Form) -> None:
    candidates = candidates_of(SAMPLE, [form], 8, smoothed=True)
    assert [candidate.recipe.smoothing is None for candidate in candidates] == [True, False][: len(candidates)]
    for candidate in candidates:
        result, _ = computed(tmp_path, candidate.recipe)
        error = float(np.square(result - (ROWS @ MATRIX + BIAS)).mean())
        assert error == pytest.approx(candidate.error, rel=0.02)


def test_factors_help_a_single_range_most() -> None:
    errors = {
        form: [candidate.error for candidate in candidates_of(SAMPLE, [form], 8, smoothed=True)]
        for form in ("static", "row", "blocks8")
    }
    plain, smoothed = errors["static"]
    assert smoothed < 0.3 * plain
    assert errors["blocks8"][-1] < errors["row"][-1] < smoothed
    assert [len(candidates_of(SAMPLE, ["static"], 8, smoothed=False))] == [1]


def test_factors_are_one_op_and_a_correction_none(tmp_path: Path) -> None:
    plain, smoothed = candidates_of(SAMPLE, ["static"], 8, smoothed=True)
    assert computed(tmp_path, plain.recipe)[1] == ["QuantizeLinear", "MatMulIntegerToFloat"]
    assert computed(tmp_path, smoothed.recipe)[1] == ["Mul", "QuantizeLinear", "MatMulIntegerToFloat"]


def test_a_correction_takes_the_mean_error_away() -> None:
    rows = np.abs(DRAW.standard_normal((300, 64))).astype(np.float32)
    sample = Sample(rows, MATRIX, np.full(48, 1 / 48, np.float32))
    assert measured_form(sample, MatrixRecipe("row"), 8).recipe.correction is None
    # A range that clips one side loses something on average, which the bias can give back.
    clipped = range_from_ends(0.0, 1.0)
    candidate = measured_form(sample, MatrixRecipe("static", clipped), 8)
    assert candidate.recipe.correction is not None
    lost = clipped.restored(rows) @ MATRIX - rows @ MATRIX
    np.testing.assert_allclose(candidate.recipe.correction, -lost.mean(0), atol=0.1)
    assert candidate.error < 0.9 * np.square(lost).mean()


def test_4_bits_are_rounded_with_care_and_floats_have_no_error() -> None:
    careful, *_ = candidates_of(SAMPLE, ["blocks4"], 8, smoothed=False)
    assert careful.recipe.stored is not None
    assert careful.error < measured_form(SAMPLE, MatrixRecipe("blocks4"), 8).error
    [floats] = candidates_of(SAMPLE, ["fp32"], 8, smoothed=True)
    assert (floats.recipe.form, floats.error) == ("fp32", 0.0)


def test_unknown_weights_count_an_error_as_large_as_the_results() -> None:
    unknown = Sample(ROWS, MATRIX, None).weighed(3.0)
    assert unknown.weights is not None
    assert float(unknown.powers() @ unknown.weights) == pytest.approx(3.0, rel=1e-4)
    assert SAMPLE.weighed(3.0) is SAMPLE
