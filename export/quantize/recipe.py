"""How every matrix of a graph is to be stored, and what both rewrites do with a graph around that."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from fatdeploy.errors import ExportFailed
from fatdeploy.export.graph_files import graphs_of, hold, move_weights_out, tensor_data, write_structure
from fatdeploy.export.quantize.blocks.split import SplitBlocks
from fatdeploy.export.quantize.integers import (
    Blocks,
    Columns,
    Floats,
    ValueRange,
    WeightBits,
    best_blocks,
    columns_from_matrix,
    wide_blocks,
)
from fatdeploy.export.quantize.matrices import Product, products_of
from fatdeploy.manifest import WEIGHTS_ALONE

MatrixPrecision = Literal["fp32", "int8", "int4"]
# How a matrix is multiplied: as floats; as bytes with a calibrated range of activations, or with a scale per row of
# them; in blocks of 8 or 4 bits, or of 8 for the first columns and 4 for the others, with a scale per block of
# activations; or as bytes that floats are multiplied with.
Form = Literal["fp32", "static", "row", "blocks8", "blocks4", "split", "weights"]
Stored = Columns | Blocks | SplitBlocks
PRECISION_OF: dict[Form, MatrixPrecision] = {
    "fp32": "fp32",
    "static": "int8",
    "row": "int8",
    "blocks8": "int8",
    "blocks4": "int4",
    "split": "int4",
    "weights": "int8",
}
# What manifests call the forms.
KINDS: dict[Form, str] = {
    "fp32": "fp32",
    "static": "int8 static",
    "row": "int8 by row",
    "blocks8": "int8 blocks",
    "blocks4": "int4",
    "split": "int4 split",
    "weights": WEIGHTS_ALONE,
}
STORED_AS: dict[Form, type[Stored]] = {
    "static": Columns,
    "row": Columns,
    "blocks8": Blocks,
    "blocks4": Blocks,
    "split": SplitBlocks,
    "weights": Columns,
}
SMOOTHED = "smoothed"
# Name endings of constants that belong to integers and are not weights themselves.
BESIDE_INTEGERS = ("/scales", "/row_scales", "/zeros", "/smoothing", "/unsmoothed")


@dataclass(frozen=True, eq=False)
class MatrixRecipe:
    """How one matrix is stored, and how its activations become integers.

    ``activations`` is the range that calibration chose for ``static``. Activations are divided by ``smoothing`` [K],
    and the rows of the matrix are multiplied with it. ``correction`` [N] is added to the bias. ``stored`` are integers
    that were rounded with care; None rounds each number to the nearest. A ``split`` form always has them.
    """

    form: Form
    activations: ValueRange | None = None
    smoothing: Floats | None = None
    correction: Floats | None = None
    stored: Stored | None = None

    @property
    def precision(self) -> MatrixPrecision:
        """The precision that the form belongs to."""
        return PRECISION_OF[self.form]

    @property
    def kind(self) -> str:
        """What manifests call it."""
        kind = KINDS[self.form]
        if isinstance(self.stored, SplitBlocks):
            kind = f"{kind} at {self.stored.n_wide}"
        return kind if self.smoothing is None else f"{kind} {SMOOTHED}"

    def integers(self, matrix: Floats, bits: WeightBits) -> Stored:
        """Return a matrix [K, N] as this recipe stores it."""
        if self.stored is not None:
            return self.stored
        if self.form == "split":
            raise ExportFailed("a split matrix needs its integers: only they say where it is split")
        return stored_matrix(smoothed_matrix(matrix, self.smoothing), self.form, bits)


def smoothed_matrix(matrix: Floats, smoothing: Floats | None) -> Floats:
    """Return a matrix [K, N] with its rows multiplied."""
    return np.ascontiguousarray(matrix if smoothing is None else matrix * smoothing[:, None])


def stored_matrix(matrix: Floats, form: Form, bits: WeightBits) -> Columns | Blocks:
    """Return a matrix [K, N] as integers, each number rounded to the nearest."""
    if form == "blocks4":
        return best_blocks(matrix)
    return wide_blocks(matrix) if form == "blocks8" else columns_from_matrix(matrix, bits)


FLOATS = MatrixRecipe("fp32")


@dataclass(frozen=True)
class Recipe:
    """How every matrix of a graph is stored, by name; matrices without an entry stay as they are.

    ``embedding`` is for tables of ``table_sizes`` rows that this graph only looks up in.
    """

    matrices: Mapping[str, MatrixRecipe]
    table_sizes: frozenset[int]
    embedding: MatrixRecipe = FLOATS
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
