"""How every matrix of a graph is to be stored, and what both rewrites do with a graph around that."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from fatdeploy.errors import ExportFailed
from fatdeploy.export.graph_files import graphs_of, hold, move_weights_out, tensor_data, write_structure
from fatdeploy.export.quantize.integers import ValueRange, WeightBits
from fatdeploy.export.quantize.matrices import Product, products_of

MatrixPrecision = Literal["fp32", "int8", "int4"]
# Name endings of constants that belong to integers and are not weights themselves.
BESIDE_INTEGERS = ("/scales", "/row_scales", "/zeros")


@dataclass(frozen=True)
class MatrixRecipe:
    """How one matrix is stored, and how its activations become integers.

    ``activations`` is the range that calibration chose; None gives every row its own scale at every step.
    """

    precision: MatrixPrecision
    activations: ValueRange | None = None


@dataclass(frozen=True)
class Recipe:
    """How every matrix of a graph is stored, by name; matrices without an entry stay as they are.

    ``embedding`` is for tables of ``table_sizes`` rows that are only looked up in, never multiplied.
    """

    matrices: Mapping[str, MatrixRecipe]
    table_sizes: frozenset[int]
    embedding: MatrixPrecision = "fp32"
    bits: WeightBits = 7


def products_by_name(model: onnx.ModelProto, graph: Path, recipe: Recipe) -> dict[str, Product]:
    """Return the products of a graph; a recipe for matrices that the graph does not have is refused."""
    products = {product.name: product for product in products_of(model.graph)}
    unknown = [name for name in recipe.matrices if name not in products]
    if unknown:
        raise ExportFailed(f"{graph.name} has no matrices {unknown}, only {list(products)}")
    return products


def drop_unread_constants(graph: onnx.GraphProto) -> None:
    """Remove constants that no node reads, such as the float matrices that integers replaced."""
    parts = list(graphs_of(graph))
    read = read_names(parts)
    for part in parts:
        for tensor in [constant for constant in part.initializer if constant.name not in read]:
            part.initializer.remove(tensor)


def read_names(parts: list[onnx.GraphProto]) -> set[str]:
    """Return the names that nodes read or that are outputs, in a graph and its branches."""
    inputs = {name for part in parts for node in part.node for name in node.input}
    return inputs | {output.name for part in parts for output in part.output}


def written_with_weights(model: onnx.ModelProto, graph: Path, result: Path) -> Path:
    """Write a rewritten graph with a weights file of its own; return its path."""
    for tensor in (constant for part in graphs_of(model.graph) for constant in part.initializer):
        hold(tensor, tensor_data(tensor, graph.parent))
    move_weights_out(model, result)
    write_structure(model, result)
    return result
