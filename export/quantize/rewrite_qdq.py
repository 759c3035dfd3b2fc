"""Integer matrices in standard ops: QuantizeLinear and DequantizeLinear around products, as TensorRT reads them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import helper

from fatdeploy.errors import ExportFailed
from fatdeploy.export.graph_files import read_structure
from fatdeploy.export.quantize.integers import Floats, ValueRange, columns_from_matrix
from fatdeploy.export.quantize.matrices import Product, Scope, constant_array, lookups_of, tensor_from_array
from fatdeploy.export.quantize.recipe import Recipe, drop_unread_constants, products_by_name, written_with_weights

RangeMethod = Literal["min-max", "percentile"]
# Of the absolute values of an activation: larger ones are clipped, so that all others get finer steps.
PERCENTILE = 99.99
LIMIT = 127
ZERO = 128  # a ValueRange counts from 0 to 255; signed bytes around zero are the same steps


def symmetric_range(values: Floats, ends: tuple[float, float], method: RangeMethod) -> ValueRange:
    """Return a range for an activation with these values and ends, symmetric around zero as TensorRT requires."""
    largest = max(abs(end) for end in ends) if method == "min-max" else float(np.percentile(np.abs(values), PERCENTILE))
    scale = float(np.float32(largest / LIMIT))
    return ValueRange(scale if scale >= np.finfo(np.float32).tiny else 1.0, ZERO)


def with_scales(graph: Path, result: Path, recipe: Recipe) -> Path:
    """Write a graph with matrices of bytes and scales; without a range activations stay floats. Return its path."""
    model = read_structure(graph)
    products = products_by_name(model, graph, recipe)
    rewrite = _QdqRewrite(model.graph, graph.parent, recipe)
    for name, matrix in recipe.matrices.items():
        if matrix.form in ("static", "weights"):
            rewrite.replace(products[name], matrix.activations)
        elif matrix.form != "fp32":
            raise ExportFailed(f"{name}: graphs of standard ops take int8 and fp32 matrices, found {matrix.kind}")
    if recipe.embedding.precision == "int8":
        rewrite.replace_lookups()
    drop_unread_constants(model.graph)
    return written_with_weights(model, graph, result)


@dataclass
class _QdqRewrite:
    """One pass over a graph; graphs of this dialect have no branches."""

    graph: onnx.GraphProto
    folder: Path
    recipe: Recipe
    numbers: dict[str, str] = field(default_factory=dict)  # constant -> the floats that its bytes stand for
    rounded: dict[tuple[str, ValueRange], str] = field(default_factory=dict)  # activation -> itself after a round trip

    def replace(self, product: Product, chosen: ValueRange | None) -> None:
        """Make a product read its matrix from bytes, and its activation through bytes."""
        node = product.node
        axis = 0 if product.transposed else 1
        node.input[1] = self._from_bytes(product.weight, axis, node)
        if chosen is not None:
            node.input[0] = self._through_bytes(node.input[0], chosen, node)

    def replace_lookups(self) -> None:
        """Look tokens up in tables of bytes."""
        scope = Scope(self.graph)
        for node in lookups_of(scope, self.recipe.table_sizes):
            table = scope.constant(node.input[0])
            assert table is not None  # noqa: S101 - lookups have one
            node.input[0] = self._from_bytes(table, 0, node)

    def _from_bytes(self, constant: onnx.TensorProto, axis: int, reader: onnx.NodeProto) -> str:
        """Return the name of the floats that a matrix of bytes stands for, with one scale per index of ``axis``."""
        name = constant.name
        if name not in self.numbers:
            matrix = constant_array(constant, self.folder)
            if not np.isfinite(matrix).all():
                raise ExportFailed(f"{name} has weights that are not finite")
            columns = columns_from_matrix(np.ascontiguousarray(matrix.T if axis == 0 else matrix), self.recipe.bits)
            stored = np.ascontiguousarray(columns.values.T if axis == 0 else columns.values)
            inputs = [self._constant(f"{name}/bytes", stored), self._constant(f"{name}/scales", columns.scales)]
            inputs.append(self._constant(f"{name}/zeros", np.zeros(len(columns.scales), np.int8)))
            self.numbers[name] = f"{name}/numbers"
            self._insert(helper.make_node("DequantizeLinear", inputs, [self.numbers[name]], axis=axis), reader)
        return self.numbers[name]

    def _through_bytes(self, name: str, chosen: ValueRange, reader: onnx.NodeProto) -> str:
        key = name, chosen
        if key not in self.rounded:
            scale = self._constant(f"scale/{chosen.scale!r}", np.array(chosen.scale, np.float32))
            zero = self._constant("zero/int8", np.array(0, np.int8))
            whole, self.rounded[key] = f"{name}/bytes", f"{name}/rounded"
            self._insert(helper.make_node("QuantizeLinear", [name, scale, zero], [whole]), reader)
            self._insert(helper.make_node("DequantizeLinear", [whole, scale, zero], [self.rounded[key]]), reader)
        return self.rounded[key]

    def _insert(self, node: onnx.NodeProto, before: onnx.NodeProto) -> None:
        node.name = f"{before.name.partition('/')[0]}/{node.output[0]}"
        self.graph.node.insert(list(self.graph.node).index(before), node)

    def _constant(self, name: str, array: np.ndarray) -> str:
        if all(constant.name != name for constant in self.graph.initializer):
            self.graph.initializer.append(tensor_from_array(name, array))
        return name
