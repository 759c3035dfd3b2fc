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
from fatdeploy.export.quantize.rewrite_ort import Recipe, products_by_name, written_elsewhere

RangeMethod = Literal["min-max", "percentile"]
# Of the sizes of an activation: what lies beyond is cut off, so that all others get finer steps.
PERCENTILE = 99.99
LIMIT = 127
ZERO = 128  # a Range counts from 0 to 255; signed bytes around zero are the same steps


def symmetric_range(values: Floats, ends: tuple[float, float], method: RangeMethod) -> ValueRange:
    """Return the range, symmetric around zero as TensorRT wants it, of an activation with these values and ends."""
    largest = max(abs(end) for end in ends) if method == "min-max" else float(np.percentile(np.abs(values), PERCENTILE))
    scale = float(np.float32(largest / LIMIT))
    return ValueRange(scale if scale >= np.finfo(np.float32).tiny else 1.0, ZERO)


def with_scales(graph: Path, result: Path, recipe: Recipe) -> Path:
    """Write a graph whose matrices are bytes with scales; without a range, activations stay floats. Return its path."""
    model = read_structure(graph)
    products = products_by_name(model, graph, recipe)
    rewrite = _QdqRewrite(model.graph, graph.parent, recipe)
    for name, one in recipe.matrices.items():
        if one.precision == "int8":
            rewrite.replace(products[name], one.activations)
        elif one.precision != "fp32":
            raise ExportFailed(f"{name}: graphs of standard ops have int8 and fp32 matrices, not {one.precision}")
    if recipe.embedding == "int8":
        rewrite.replace_lookups()
    rewrite.drop_unread()
    return written_elsewhere(model, graph, result)


@dataclass
class _QdqRewrite:
    """One pass over a graph, which has no branches in this dialect."""

    graph: onnx.GraphProto
    folder: Path
    recipe: Recipe
    numbers: dict[str, str] = field(default_factory=dict)  # constant -> what its bytes stand for
    rounded: dict[tuple[str, ValueRange], str] = field(
        default_factory=dict
    )  # activation -> the same after a round trip

    def replace(self, product: Product, chosen: ValueRange | None) -> None:
        """Let a product read its matrix from bytes, and its activation through bytes."""
        node = product.node
        axis = 0 if product.transposed else 1
        node.input[1] = self._from_bytes(product.weight, axis, node)
        if chosen is not None:
            node.input[0] = self._through_bytes(node.input[0], chosen, node)

    def replace_lookups(self) -> None:
        """Let tokens be looked up in tables of bytes."""
        scope = Scope(self.graph)
        for node in lookups_of(scope, self.recipe.vocab_size):
            table = scope.constant(node.input[0])
            assert table is not None  # noqa: S101 - it is what makes it a lookup
            node.input[0] = self._from_bytes(table, 0, node)

    def drop_unread(self) -> None:
        """Take away the float matrices."""
        read = {name for node in self.graph.node for name in node.input} | {one.name for one in self.graph.output}
        for tensor in [one for one in self.graph.initializer if one.name not in read]:
            self.graph.initializer.remove(tensor)

    def _from_bytes(self, constant: onnx.TensorProto, axis: int, reader: onnx.NodeProto) -> str:
        """Return the name of the numbers that a matrix of bytes stands for; ``axis`` has a scale for each place."""
        name = constant.name
        if name not in self.numbers:
            matrix = constant_array(constant, self.folder)
            if not np.isfinite(matrix).all():
                raise ExportFailed(f"{name} has weights that are no numbers")
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
        if all(one.name != name for one in self.graph.initializer):
            self.graph.initializer.append(tensor_from_array(name, array))
        return name
