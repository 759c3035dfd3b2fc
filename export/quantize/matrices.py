"""The matrices of a graph: products of an activation and a constant, also in branches, named after their module."""

import math
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from fatdeploy.export.graph_files import hold, tensor_data
from fatdeploy.export.tracing.trace import INNER

# Smaller matrices (such as a gate of one column) gain nothing, and results often depend on them.
SMALLEST = 1024
PRODUCTS = {("", "MatMul"), ("", "Gemm"), ("com.microsoft", "FusedMatMul")}
BIAS = ".bias"
OUTPUT = "output"


@dataclass
class Scope:
    """A graph or a branch, with the constants that it sees in the graphs around it."""

    graph: onnx.GraphProto
    outer: "Scope | None" = None
    constants: dict[str, onnx.TensorProto] = field(init=False)

    def __post_init__(self) -> None:
        self.constants = {constant.name: constant for constant in self.graph.initializer}

    def constant(self, name: str) -> onnx.TensorProto | None:
        """Return the constant of this name, None if it is not a constant."""
        constant = self.constants.get(name)
        return self.outer.constant(name) if constant is None and self.outer is not None else constant

    def inner(self) -> Iterator["Scope"]:
        """Yield this scope and those of all branches.

        The body of a loop is none: its values cannot be looked at from outside, so its matrices stay as they are.
        """
        yield self
        for node in self.graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH and node.op_type == "If":
                    yield from Scope(attribute.g, self).inner()


@dataclass
class Product:
    """A node that multiplies an activation [..., K] with a constant matrix."""

    scope: Scope
    node: onnx.NodeProto
    weight: onnx.TensorProto
    transposed: bool  # the constant is stored as [N, K]
    name: str = ""

    @property
    def activation(self) -> str:
        """The name of the activation."""
        return str(self.node.input[0])

    @property
    def shape(self) -> tuple[int, int]:
        """K and N."""
        first, second = self.weight.dims
        return (second, first) if self.transposed else (first, second)


def products_of(graph: onnx.GraphProto) -> list[Product]:
    """Return all products with a constant matrix, with names that are unique in the graph."""
    products = [
        product for scope in Scope(graph).inner() for node in scope.graph.node if (product := _product(scope, node))
    ]
    count = Counter(_module(product) for product in products)
    numbers: Counter[str] = Counter()
    for product in products:
        module = _module(product)
        numbers[module] += 1
        product.name = f"{module}.{numbers[module]}" if count[module] > 1 else module
    return products


def _product(scope: Scope, node: onnx.NodeProto) -> Product | None:
    if (node.domain, node.op_type) not in PRODUCTS:
        return None
    weight = scope.constant(node.input[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type != onnx.TensorProto.FLOAT:
        return None
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    plain = attributes.get("transA", 0) == 0 and attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    if not plain or math.prod(weight.dims) < SMALLEST:
        return None
    return Product(scope, node, weight, bool(attributes.get("transB", 0)))


def _module(product: Product) -> str:
    """Return the module of a product: that of its bias, because torch forgets the modules of branches."""
    readers = [node for node in product.scope.graph.node if product.node.output[0] in node.input]
    biases = [name for node in readers for name in node.input if name.startswith(INNER) and name.endswith(BIAS)]
    if biases:
        return str(biases[0]).removeprefix(INNER).removesuffix(BIAS)
    # A node outside all modules, such as the output projection, reads a tensor with a name of its own.
    module = product.node.name.partition("/")[0]
    if module:
        return module
    # Standard graphs transpose the output matrix beforehand, which renames it.
    name = product.weight.name
    return name.removeprefix(INNER).removesuffix(".weight") if name.startswith(INNER) else OUTPUT


def matrix_of(product: Product, folder: Path) -> NDArray[np.float32]:
    """Return the constant [K, N] of a product; its data is in the graph or in a file of the folder."""
    return constant_array(product.weight, folder).T if product.transposed else constant_array(product.weight, folder)


def constant_array(tensor: onnx.TensorProto, folder: Path) -> NDArray[np.float32]:
    """Return a float constant as an array."""
    array: NDArray[np.float32] = np.frombuffer(tensor_data(tensor, folder), np.float32).reshape(tuple(tensor.dims))
    return array


def lookups_of(scope: Scope, n_rows: Container[int]) -> list[onnx.NodeProto]:
    """Return the nodes of a graph that look rows up in a constant table of numbers with one of these sizes."""
    return [node for node in scope.graph.node if node.op_type == "Gather" and _is_table(scope, node, n_rows)]


def _is_table(scope: Scope, node: onnx.NodeProto, n_rows: Container[int]) -> bool:
    table = scope.constant(node.input[0])
    if table is None or len(table.dims) != 2 or table.data_type != onnx.TensorProto.FLOAT:
        return False
    axis = sum(attribute.i for attribute in node.attribute if attribute.name == "axis")
    return axis == 0 and int(table.dims[0]) in n_rows and math.prod(table.dims) >= SMALLEST


def tensor_from_array(name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
    """Return a constant that keeps its data in the graph."""
    tensor = numpy_helper.from_array(array, name)
    hold(tensor, array.tobytes())
    return tensor
