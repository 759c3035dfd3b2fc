"""Matrices with their first columns in 8 bits: products, lookups, rows for shortlists, and damaged records."""

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleError, ExportFailed
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.quantize.blocks.split import SplitBlocks, split_blocks
from fatdeploy.export.quantize.integers import best_blocks, restored_row_blocks, wide_blocks
from fatdeploy.export.quantize.recipe import MatrixRecipe, Recipe
from fatdeploy.export.quantize.rewrite_ort import quantized
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.proof.gate import check_rows, read_material, row_kind
from tests.support.bundles import model_of, shared_bundle
from tests.support.choices import tiny
from tests.support.half_graphs import node, ops, ran, written
from tests.support.quantized import split_from, split_of

V, PLACE = 99, 32
DRAW = np.random.default_rng(0)


def split_of_matrix(matrix: np.ndarray) -> SplitBlocks:
    return split_blocks(wide_blocks(matrix), best_blocks(matrix), PLACE)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("smoothed", [True, False])
def test_a_split_product_is_the_products_with_its_parts(tmp_path: Path, biased: bool, smoothed: bool) -> None:
    matrix, rows = DRAW.standard_normal((64, V), np.float32), DRAW.standard_normal((5, 64), np.float32)
    bias = DRAW.standard_normal(V).astype(np.float32)
    factors = np.linspace(0.5, 2, 64, dtype=np.float32) if smoothed else None
    stored = split_of_matrix(matrix if factors is None else matrix * factors[:, None])
    nodes = [node("MatMul", "x model.inner.part.weight", "p" if biased else "y")]
    nodes += [node("Add", "p model.inner.part.bias", "y")] if biased else []
    constants = {"model.inner.part.weight": matrix} | ({"model.inner.part.bias": bias} if biased else {})
    shapes = {"x": ("float32", ["n", 64])}, {"y": ("float32", ["n", V])}
    graph = written(tmp_path / "graph.onnx", nodes, *shapes, constants)
    recipe = MatrixRecipe("split", smoothing=factors, stored=stored)
    result = quantized(graph, tmp_path / "new.onnx", Recipe({"part": recipe}, frozenset([7])))
    assert Counter(ops(result)) == Counter(
        ["MatMulNBits"] * 2 + ["Concat"] + ["Slice"] * 2 * biased + ["Mul"] * smoothed
    )
    numbers = rows if factors is None else rows / factors
    parts = [restored_row_blocks(numbers, part.size) @ part.restored() for part in (stored.wide, stored.narrow)]
    expected = np.concatenate(parts, 1) + bias * biased
    np.testing.assert_allclose(ran(result, x=rows)[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    # The first columns are far more exact than the others, and a row does not depend on its batch.
    lost = np.abs(ran(result, x=rows)[0] - (rows @ matrix + bias * biased)).mean(0)
    assert lost[:PLACE].mean() < 0.2 * lost[PLACE:].mean()
    np.testing.assert_allclose(ran(result, x=rows[3:4])[0][0], ran(result, x=rows)[0][3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("smoothed", [True, False])
def test_rows_are_looked_up_in_their_own_part(tmp_path: Path, width: int, smoothed: bool) -> None:
    table = DRAW.standard_normal((V, width)).astype(np.float32)
    factors = np.linspace(0.5, 2, width, dtype=np.float32) if smoothed else None
    stored = split_of_matrix(np.ascontiguousarray(table.T) if factors is None else table.T * factors[:, None])
    shapes = {"ids": ("int64", ["n", "t"])}, {"rows": ("float32", None)}
    graph = written(tmp_path / "graph.onnx", [node("Gather", "table ids", "rows")], *shapes, {"table": table})
    recipe = MatrixRecipe("split", smoothing=factors, stored=stored)
    result = quantized(graph, tmp_path / "new.onnx", Recipe({}, frozenset([V]), recipe))
    ids = np.array([[0, PLACE - 1, PLACE], [PLACE + 1, V - 1, 5]])
    restored = stored.restored().T
    expected = restored[ids] if factors is None else restored[ids] * (1 / factors)
    np.testing.assert_array_equal(ran(result, ids=ids)[0], expected)


def test_a_split_recipe_says_where_it_is_split() -> None:
    matrix = DRAW.standard_normal((64, V)).astype(np.float32)
    stored = split_of_matrix(matrix)
    recipe = MatrixRecipe("split", stored=stored)
    assert (recipe.precision, recipe.kind, stored.n_wide) == ("int4", f"int4 split at {PLACE}", PLACE)
    # 512 numbers of a column: 8 bits or 4, and a scale per block; two zeros per byte.
    narrow = best_blocks(matrix)
    assert stored.nbytes == wide_blocks(matrix).nbytes * PLACE // V + narrow.nbytes * (V - PLACE) // V
    np.testing.assert_array_equal(stored.restored()[:, :PLACE], wide_blocks(matrix).restored()[:, :PLACE])
    np.testing.assert_array_equal(stored.restored()[:, PLACE:], narrow.restored()[:, PLACE:])
    with pytest.raises(ExportFailed, match="only they say where it is split"):
        MatrixRecipe("split").integers(matrix, 8)


def untied() -> Bundle:
    model = tiny({"tie_embeddings": False, "output_bias": True, "encoder_layers": 1, "decoder_layers": 1})
    plain = shared_bundle("untied", lambda folder: write_bundle(model, folder, origin=Origin(name="untied")))
    return split_from(plain, exportable_model(model), "untied-split")


@pytest.mark.parametrize("make", [lambda: split_of("fat-tiny"), untied], ids=["tied", "untied"])
def test_a_bundle_with_a_split_output_matrix(make: Callable[[], Bundle]) -> None:
    bundle = make()
    matrix = bundle.manifest.output_matrix
    assert (matrix.dtype, matrix.wide.rows) == ("int4", 16)
    assert bundle.manifest.quantization.matrices["output"].startswith("int4 split at 16")
    with closing(OrtEngine(bundle)) as engine:
        assert check_rows(engine, read_material(bundle), row_kind("int4", bundle.manifest.quantization)) <= 2e-6
        source = np.array([[5, 6, 7, 8], [9, 4, 0, 0]])
        state = engine.encode(source, source != 0, Capacity(1, 4))
        out, product = engine.step(np.array([[1, 7, 30], [1, 8, 20]]), state, Want.LOGITS), engine.output_product()
        for ids in (np.arange(64), np.array([60, 3, 15, 16, 41]), np.array([40, 17]), np.array([2]), np.arange(0)):
            rows = engine.output_rows(ids)
            np.testing.assert_array_equal(rows, engine.output_rows(np.arange(64))[ids])
            if not ids.size:
                continue
            product.choose(ids)
            # Floats here, while the graph also rounds activations.
            expected = out.logits[:, -1, ids]
            np.testing.assert_allclose(product(out.hidden[:, -1]), expected, atol=0.03 * np.abs(out.logits).max())


def test_the_rows_of_a_split_matrix_are_those_of_the_model_and_the_first_are_exact() -> None:
    bundle = split_of("fat-tiny")
    exact = exportable_model(model_of("fat-tiny")).output_matrix().detach().numpy()
    with closing(OrtEngine(bundle)) as engine:
        lost = np.abs(engine.output_rows(np.arange(64)) - exact).max(1) / np.abs(exact).max()
    assert lost[:16].max() < 0.01 < lost[16:].max() < 0.3


def test_wide_rows_beyond_the_matrix_or_the_file_are_refused() -> None:
    bundle = split_of("fat-tiny")
    matrix = bundle.manifest.output_matrix
    for changes, reason in (
        ({"rows": 64}, "has 64 rows, and the manifest says that the first 64 are wide"),
        ({"offset": 10**9}, "must end within"),
        ({"scales": 10**9}, "must end within"),
    ):
        damaged = replace(matrix, wide=replace(matrix.wide, **changes))
        manifest = replace(bundle.manifest, output_matrix=damaged)
        with closing(OrtEngine(replace(bundle, manifest=manifest))) as engine, pytest.raises(BundleError, match=reason):
            engine.output_rows(np.array([3]))
