"""Products with chosen rows of the output matrix: integers give the bits of the logits, wherever a column is."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleError
from fatdeploy.export.quantize.recipe import Form, MatrixRecipe
from fatdeploy.export.quantize.request import QuantizeRequest
from fatdeploy.manifest import OutputMatrix
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.output_product import ByteProduct, FloatProduct
from fatdeploy.runtimes.engines.protocol import Capacity, StepOut, Want, copied
from tests.support.bundles import bundle_of
from tests.support.quantized import formed_of, quantized_of, quantizer_of

TINY = "transformer-tiny"


def stepped(engine: OrtEngine, rows: int = 5) -> StepOut:
    """Return the result of a first step for random sources."""
    source = np.random.default_rng(3).integers(3, 60, (rows, 6))
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, 4))
    return copied(engine.step(np.full((rows, 1), engine.spec.bos_id), state, Want.LOGITS))


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny"])
def test_products_of_bytes_are_the_logits_bit_for_bit(preset: str) -> None:
    with closing(OrtEngine(quantized_of(preset, "int8"))) as engine:
        out, product = stepped(engine), engine.output_product()
        assert isinstance(product, ByteProduct)
        for ids in (np.arange(64), np.array([7]), np.array([60, 3, 41, 8, 9])):
            product.choose(ids)
            np.testing.assert_array_equal(product(out.hidden[:, -1]), out.logits[:, -1, ids])
            # A row alone.
            np.testing.assert_array_equal(product(out.hidden[2:3, -1]), out.logits[2:3, -1, ids])


FORMS = [(form, smoothed) for form in ("static", "row", "blocks8") for smoothed in (False, True)]


@pytest.mark.parametrize(("form", "smoothed"), FORMS)
def test_every_form_of_int8_gives_the_logits(form: Form, smoothed: bool) -> None:
    bundle = formed_of(TINY, form, smoothed=smoothed)
    matrix, ids = bundle.manifest.output_matrix, np.array([60, 3, 41, 8, 9])
    assert (matrix.block_size is not None, matrix.smoothing is not None) == (form == "blocks8", smoothed)
    assert (matrix.activation is not None) == (form == "static")
    with closing(OrtEngine(bundle)) as engine:
        out, product = stepped(engine), engine.output_product()
        product.choose(ids)
        scores, expected = product(out.hidden[:, -1]).copy(), out.logits[:, -1, ids]
        if form == "blocks8":  # floats here, while the graph also rounds activations
            np.testing.assert_allclose(scores, expected, atol=0.02)
            return
        np.testing.assert_array_equal(scores, expected)
        for row in range(len(scores)):
            np.testing.assert_array_equal(product(out.hidden[row : row + 1, -1]), scores[row : row + 1])
        product.choose(np.array([41, 60]))
        np.testing.assert_array_equal(product(out.hidden[:, -1]), scores[:, [2, 0]])


def test_the_bias_of_a_bundle_contains_what_its_integers_lose() -> None:
    quantizer = quantizer_of(TINY, QuantizeRequest(precision="int8"))
    correction = np.arange(4, dtype=np.float32)
    quantizer._written_recipes = {"output": MatrixRecipe("static", correction=correction)}
    assert quantizer.corrected_bias(None).tolist() == [0, 1, 2, 3]
    assert quantizer.corrected_bias(np.ones(4, np.float32)).tolist() == [1, 2, 3, 4]
    quantizer._written_recipes = {"output": MatrixRecipe("static")}
    assert quantizer.corrected_bias(None) is None


def test_a_bundle_that_does_not_say_how_hidden_states_become_bytes_gives_each_row_a_scale() -> None:
    bundle = quantized_of(TINY, "int8")
    matrix = replace(bundle.manifest.output_matrix, activation=None)
    with closing(OrtEngine(replace(bundle, manifest=replace(bundle.manifest, output_matrix=matrix)))) as engine:
        hidden = stepped(engine).hidden[:, -1] * np.array([[1], [20], [1e-3], [0], [1]], np.float32)
        product = engine.output_product()
        product.choose(np.arange(64))
        together = product(hidden)
        rows, bias = engine.output_rows(np.arange(64)), engine.output_bias(np.arange(64))
        expected = hidden @ rows.T + (0 if bias is None else bias)
        scale = np.abs(hidden).max(-1, keepdims=True) * np.abs(rows).sum(-1)
        assert (np.abs(together - expected) <= scale / 254 + 1e-6).all()
        ids = np.array([60, 3, 41])
        product.choose(ids)
        for row in range(5):
            np.testing.assert_array_equal(product(hidden[row : row + 1]), together[row : row + 1, ids])


def float_bundles() -> list[Bundle]:
    """Return bundles whose hidden states are multiplied as floats."""
    return [bundle_of(TINY), bundle_of(TINY, "standard"), quantized_of(TINY, "int4")]


@pytest.mark.parametrize("index", range(3))
def test_products_of_floats_are_those_of_the_output_rows(index: int) -> None:
    with closing(OrtEngine(float_bundles()[index])) as engine:
        hidden, product = stepped(engine).hidden[:, -1], engine.output_product()
        assert isinstance(product, FloatProduct)
        ids = np.array([60, 3, 41, 8, 9])
        product.choose(ids)
        np.testing.assert_allclose(product(hidden), hidden @ engine.output_rows(ids).T, atol=1e-5)


def test_a_model_without_an_output_matrix_has_no_product() -> None:
    bundle = bundle_of(TINY)
    without = replace(bundle, manifest=replace(bundle.manifest, output_matrix=None))
    with closing(OrtEngine(without)) as engine:
        assert engine.output_product() is None


@pytest.mark.parametrize("activation", [(0.0, 128), (float("inf"), 128), (1.0, 256), (1.0, -1)])
def test_a_range_that_cannot_be_one_is_refused(activation: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="a scale above 0 and a zero in 0…255, found"):
        OutputMatrix(0, "int8", transposed=False, scales=64, activation=activation)
    with pytest.raises(ValueError, match="activation of int8 is"):
        OutputMatrix(0, "float32", transposed=False, activation=(1.0, 128))
    with pytest.raises(ValueError, match="activation of int8 is"):
        OutputMatrix(0, "int8", transposed=False, scales=64, block_size=32, activation=(1.0, 128))


def test_a_matrix_beyond_the_weights_is_our_error() -> None:
    bundle = quantized_of(TINY, "int8")
    matrix = replace(bundle.manifest.output_matrix, offset=10**9)
    with closing(OrtEngine(replace(bundle, manifest=replace(bundle.manifest, output_matrix=matrix)))) as engine:
        product = engine.output_product()
        with pytest.raises(BundleError, match="the output matrix must end within"):
            product.choose(np.array([3]))
