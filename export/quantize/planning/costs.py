"""What a product costs in each form: microseconds on this machine, measured once per shape and kept."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from fatdeploy.export.graph_files import move_weights_out, read_structure, write_structure
from fatdeploy.export.quantize.integers import Blocks, Columns, ValueRange, WeightBits
from fatdeploy.export.quantize.lookups import CONTRIB
from fatdeploy.export.quantize.matrices import BIAS, products_of, tensor_from_array
from fatdeploy.export.quantize.recipe import Form, MatrixRecipe, Recipe, stored_matrix
from fatdeploy.export.quantize.rewrite_ort import quantized
from fatdeploy.export.tracing.trace import INNER
from fatdeploy.measured import kept
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module, opened_session

# Several products, as a model has layers: weights come from memory then, not from the processor's cache.
CHAIN_BYTES, LONGEST_CHAIN = 2**26, 16
REPETITIONS, SECONDS = 5, 0.01


@dataclass(frozen=True)
class ProductShape:
    """A product of rows [rows, K] and a matrix [K, N], computed by a number of threads (default: all cores)."""

    width: int
    columns: int
    rows: int
    threads: int | None = None


def cost_of(form: Form, shape: ProductShape, bits: WeightBits, *, smoothed: bool) -> float:
    """Return the microseconds of a product in a form; with ``smoothed``, also those of the Mul before it."""
    key = f"{onnxruntime_module().__version__}|{form}|{bits}|{astuple(shape)}"
    product = float(kept("products", key, lambda: _product_cost(form, shape, bits)))
    return product + _mul_cost(replace(shape, columns=shape.width)) if smoothed else product


def _mul_cost(shape: ProductShape) -> float:
    key = f"{onnxruntime_module().__version__}|mul|{astuple(shape)}"
    return float(kept("products", key, lambda: _least(_graph_of_muls, shape, LONGEST_CHAIN)))


def _product_cost(form: Form, shape: ProductShape, bits: WeightBits) -> float:
    count = int(np.clip(CHAIN_BYTES // (4 * shape.width * shape.columns), 1, LONGEST_CHAIN))
    return _least(partial(_graph_of_products, form, bits), shape, count)


def _least(write: Callable[[Path, ProductShape, int], Path], shape: ProductShape, count: int) -> float:
    """Return the least microseconds of one of ``count`` equal parts of a graph."""
    with tempfile.TemporaryDirectory() as folder:
        graph = write(Path(folder), shape, count)
        session = opened_session(onnxruntime_module(), graph, threads=shape.threads)
    binding = session.io_binding()
    draw = np.random.default_rng(0)
    for tensor in session.get_inputs():
        binding.bind_cpu_input(tensor.name, draw.standard_normal((shape.rows, shape.width), np.float32))
    for tensor in session.get_outputs():
        binding.bind_output(tensor.name)
    return least_microseconds(lambda: session.run_with_iobinding(binding)) / count


def least_microseconds(run: Callable[[], object]) -> float:
    """Return the least time of several repetitions, each long enough for the clock."""
    run()
    count = 1
    while (taken := _seconds(run, count)) < SECONDS:
        count = max(2 * count, int(count * SECONDS / max(taken, 1e-6)))
    return min(taken, *(_seconds(run, count) for _ in range(REPETITIONS))) / count * 1e6


def _seconds(run: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - started


def _graph_of_products(form: Form, bits: WeightBits, folder: Path, shape: ProductShape, count: int) -> Path:
    graph = _written(folder / "floats.onnx", "MatMul", (shape.width, shape.columns), shape, count)
    if form == "fp32":
        return graph
    names = [product.name for product in products_of(read_structure(graph).graph)]
    activations = ValueRange(0.03, 128) if form == "static" else None
    recipe = MatrixRecipe(form, activations, stored=_integers(form, shape, bits))
    return quantized(graph, folder / "integers.onnx", Recipe(dict.fromkeys(names, recipe), frozenset(), bits=bits))


def _graph_of_muls(folder: Path, shape: ProductShape, count: int) -> Path:
    return _written(folder / "muls.onnx", "Mul", (shape.width,), shape, count)


def _integers(form: Form, shape: ProductShape, bits: WeightBits) -> Columns | Blocks:
    """Return integers of a form for a matrix of ones, which are as fast as any others."""
    small = stored_matrix(np.ones((shape.width, 1), np.float32), form, bits)
    if isinstance(small, Columns):
        return Columns(np.repeat(small.values, shape.columns, 1), np.repeat(small.scales, shape.columns))
    return replace(
        small,
        values=np.repeat(small.values, shape.columns, 0),
        scales=np.repeat(small.scales, shape.columns, 0),
        zeros=None if small.zeros is None else np.repeat(small.zeros, shape.columns, 0),
    )


def _written(path: Path, op: str, sizes: tuple[int, ...], shape: ProductShape, count: int) -> Path:
    """Write a graph that applies an op some times, each to an input of its own and a constant; products get a bias."""
    names = [f"{INNER}{index}" for index in range(count)]
    nodes, constants = [], []
    for name in names:
        constants.append(tensor_from_array(f"{name}.weight", np.ones(sizes, np.float32)))
        constants.append(tensor_from_array(f"{name}{BIAS}", np.zeros(shape.columns, np.float32)))
        product, result = f"{name}/product", f"{name}/result"
        biased = op == "MatMul"
        nodes.append(helper.make_node(op, [f"{name}/rows", f"{name}.weight"], [product if biased else result], product))
        if biased:
            nodes.append(helper.make_node("Add", [product, f"{name}{BIAS}"], [result], result))
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info(f"{name}/rows", kind, ["n", shape.width]) for name in names],
        [helper.make_tensor_value_info(f"{name}/result", kind, ["n", shape.columns]) for name in names],
        constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    move_weights_out(model, path)
    write_structure(model, path)
    return path
