"""The matrices of a graph: products of an activation and a constant, in branches too, named after their module."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from fatdeploy.export.graph_files import hold, tensor_data
from fatdeploy.export.tracing.trace import INNER

# Smaller matrices (a gate of one column, say) gain nothing and are often what the numbers hang on.
SMALLEST = 1024
PRODUCTS = {("", "MatMul"), ("", "Gemm"), ("com.microsoft", "FusedMatMul")}
BIAS = ".bias"
OUTPUT = "output"


@dataclass
class Scope:
    """A graph or the branch of one, and what it can see of the graphs around it."""

    graph: onnx.GraphProto
    outer: "Scope | None" = None
    constants: dict[str, onnx.TensorProto] = field(init=False)

    def __post_init__(self) -> None:
        self.constants = {one.name: one for one in self.graph.initializer}

    def constant(self, name: str) -> onnx.TensorProto | None:
        """Return the constant that a name means here, if it is one."""
        found = self.constants.get(name)
        return self.outer.constant(name) if found is None and self.outer is not None else found

    def inner(self) -> Iterator["Scope"]:
        """Yield this scope and those of all branches."""
        yield self
        for node in self.graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    yield from Scope(attribute.g, self).inner()


@dataclass
class Product:
    """A node that multiplies an activation [..., K] with a constant matrix."""

    scope: Scope
    node: onnx.NodeProto
    weight: onnx.TensorProto
    transposed: bool  # the constant stands as [N, K]
    name: str = ""

    @property
    def activation(self) -> str:
        """The name of what is multiplied."""
        return str(self.node.input[0])

    @property
    def shape(self) -> tuple[int, int]:
        """K and N."""
        first, second = self.weight.dims
        return (second, first) if self.transposed else (first, second)


def products_of(graph: onnx.GraphProto) -> list[Product]:
    """Return all products with a constant matrix, with names that are unique in the graph."""
    found = [one for scope in Scope(graph).inner() for node in scope.graph.node if (one := _product(scope, node))]
    count = Counter(_module(one) for one in found)
    seen: Counter[str] = Counter()
    for one in found:
        module = _module(one)
        seen[module] += 1
        one.name = f"{module}.{seen[module]}" if count[module] > 1 else module
    return found


def _product(scope: Scope, node: onnx.NodeProto) -> Product | None:
    if (node.domain, node.op_type) not in PRODUCTS:
        return None
    weight = scope.constant(node.input[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type != onnx.TensorProto.FLOAT:
        return None
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    plain = attributes.get("transA", 0) == 0 and attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    if not plain or math.prod(weight.dims) < SMALLEST:
        return None
    return Product(scope, node, weight, bool(attributes.get("transB", 0)))


def _module(product: Product) -> str:
    """Return the module that a product comes from: of its bias, because torch forgets the modules of branches."""
    added = [node.input for node in product.scope.graph.node if product.node.output[0] in node.input]
    biases = [name for inputs in added for name in inputs if name.startswith(INNER) and name.endswith(BIAS)]
    if biases:
        return str(biases[0]).removeprefix(INNER).removesuffix(BIAS)
    # A node outside of all modules, such as the output projection, reads a tensor that has a name of its own.
    module = product.node.name.partition("/")[0]
    if module:
        return module
    # Of standard graphs it is turned round beforehand, and called after that.
    name = product.weight.name
    return name.removeprefix(INNER).removesuffix(".weight") if name.startswith(INNER) else OUTPUT


def matrix_of(product: Product, folder: Path) -> NDArray[np.float32]:
    """Return the constant [K, N] of a product; its data stands in the graph or in a file of the folder."""
    return constant_array(product.weight, folder).T if product.transposed else constant_array(product.weight, folder)


def constant_array(tensor: onnx.TensorProto, folder: Path) -> NDArray[np.float32]:
    """Return a float constant as an array."""
    array: NDArray[np.float32] = np.frombuffer(tensor_data(tensor, folder), np.float32).reshape(tuple(tensor.dims))
    return array


def lookups_of(scope: Scope, n_rows: int) -> list[onnx.NodeProto]:
    """Return the nodes of a graph that look rows up in a constant table [n_rows, M] of numbers."""
    return [node for node in scope.graph.node if node.op_type == "Gather" and _is_table(scope, node, n_rows)]


def _is_table(scope: Scope, node: onnx.NodeProto, n_rows: int) -> bool:
    table = scope.constant(node.input[0])
    if table is None or len(table.dims) != 2 or table.data_type != onnx.TensorProto.FLOAT:
        return False
    axis = sum(one.i for one in node.attribute if one.name == "axis")
    return axis == 0 and int(table.dims[0]) == n_rows and math.prod(table.dims) >= SMALLEST


def tensor_from_array(name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
    """Return a constant that keeps its data in the graph."""
    tensor = numpy_helper.from_array(array, name)
    hold(tensor, array.tobytes())
    return tensor
