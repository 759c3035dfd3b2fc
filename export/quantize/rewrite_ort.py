"""Integer matrices in the place of float ones: a simplified graph and a recipe in, a quantized graph out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from fatdeploy.errors import ExportFailed
from fatdeploy.export.graph_files import (
    graphs_of,
    hold,
    move_weights_out,
    read_structure,
    tensor_data,
    write_structure,
)
from fatdeploy.export.quantize.integers import (
    Blocks,
    Columns,
    Floats,
    ValueRange,
    WeightBits,
    best_blocks,
    columns_from_matrix,
)
from fatdeploy.export.quantize.matrices import (
    Product,
    Scope,
    constant_array,
    lookups_of,
    matrix_of,
    products_of,
    tensor_from_array,
)

CONTRIB = "com.microsoft"
# Products of int8 activations and 4-bit weights, summed in int32: with another level weights are restored every call.
ACCURACY_LEVEL = 4

MatrixPrecision = Literal["fp32", "int8", "int4"]
# How the names of constants end that belong to integers and are no weights themselves.
BESIDE_INTEGERS = ("/scales", "/row_scales", "/zeros")


@dataclass(frozen=True)
class MatrixRecipe:
    """How one matrix is stored, and how what it multiplies becomes integers.

    ``activations`` is the range that calibration chose; None gives every row a scale of its own, at every step.
    """

    precision: MatrixPrecision
    activations: ValueRange | None = None


@dataclass(frozen=True)
class Recipe:
    """How every matrix of a graph is stored, by its name; matrices without an entry stay as they are.

    ``embedding`` is for tables of ``vocab_size`` rows that tokens are looked up in and nothing is multiplied with.
    """

    matrices: Mapping[str, MatrixRecipe]
    vocab_size: int
    embedding: MatrixPrecision = "fp32"
    bits: WeightBits = 7


def quantized(graph: Path, result: Path, recipe: Recipe) -> Path:
    """Write a graph whose matrices are stored as the recipe says; return its path."""
    model = read_structure(graph)
    products = products_by_name(model, graph, recipe)
    rewrite = _OrtRewrite(recipe, graph.parent)
    for name, one in recipe.matrices.items():
        if one.precision != "fp32":
            rewrite.replace(products[name], one)
    rewrite.finish(model)
    return written_elsewhere(model, graph, result)


def products_by_name(model: onnx.ModelProto, graph: Path, recipe: Recipe) -> dict[str, Product]:
    """Return the products of a graph; a recipe for matrices that it does not have is refused."""
    products = {one.name: one for one in products_of(model.graph)}
    unknown = [name for name in recipe.matrices if name not in products]
    if unknown:
        raise ExportFailed(f"{graph.name} has no matrices {unknown}, only {list(products)}")
    return products


def written_elsewhere(model: onnx.ModelProto, graph: Path, result: Path) -> Path:
    """Write what was made of a graph, with weights of its own; return its path."""
    for tensor in (one for part in graphs_of(model.graph) for one in part.initializer):
        hold(tensor, tensor_data(tensor, graph.parent))
    move_weights_out(model, result)
    write_structure(model, result)
    return result


@dataclass
class _OrtRewrite:
    """One pass over a graph. Nodes are put where the old ones stood, so the order stays the one of computation."""

    recipe: Recipe
    folder: Path
    stored: dict[str, Columns | Blocks] = field(default_factory=dict)  # by the constant's name
    bytes_of: dict[tuple[int, str, ValueRange], str] = field(
        default_factory=dict
    )  # activations that are integers already
    turned: dict[str, onnx.NodeProto] = field(default_factory=dict)  # what turns a tied matrix round, by its rows' name

    def replace(self, product: Product, recipe: MatrixRecipe) -> None:
        """Put integer ops in the place of a product, of the bias added to it, and of a ReLU before it."""
        graph = product.scope.graph
        bias, last = self._bias(product)
        place = list(graph.node).index(last)
        before = len(graph.node)
        if recipe.precision == "int4":
            nodes = self._in_blocks(product, bias, last.output[0])
        elif recipe.activations is None:
            nodes = self._by_row(product, bias, last.output[0])
        else:
            nodes = self._in_range(product, recipe.activations, bias, last.output[0])
        for offset, node in enumerate(nodes):
            node.name = f"{product.node.name.partition('/')[0]}/{node.output[0]}"
            graph.node.insert(place + 1 + offset, node)
        graph.node.remove(last)
        if last is not product.node:
            graph.node.remove(product.node)
        assert len(graph.node) == before + len(nodes) - (1 if last is product.node else 2)  # noqa: S101

    def finish(self, model: onnx.ModelProto) -> None:
        """Look rows up in the integers that replaced a tied matrix, and drop what nobody reads any more."""
        for scope in Scope(model.graph).inner():
            for node in lookups_of(scope, self.recipe.vocab_size):
                table = scope.constant(node.input[0])
                assert table is not None  # noqa: S101 - it is what makes it a lookup
                if table.name not in self.stored and self.recipe.embedding != "fp32":
                    self._store(table.name, constant_array(table, self.folder).T, self.recipe.embedding)
                if table.name in self.stored:
                    self._look_up(scope, node, table.name, self.stored[table.name])
        for node in self.turned.values():
            model.graph.node.insert(0, node)
        _drop_unread(model.graph)
        if not any(one.domain == CONTRIB for one in model.opset_import):
            model.opset_import.append(helper.make_opsetid(CONTRIB, 1))

    # -- the forms of a product ----------------------------------------------------------------------------------------

    def _in_range(self, product: Product, chosen: ValueRange, bias: str, output: str) -> list[onnx.NodeProto]:
        """Two ops: activations by the range of calibration, and a product that scales and adds the bias."""
        values, scales = self._columns(product)
        quantized_input = self._quantized_input(product, chosen)
        nodes = [] if isinstance(quantized_input, str) else [quantized_input]
        activation = quantized_input if isinstance(quantized_input, str) else quantized_input.output[0]
        scale, zero = self._range_constants(product.scope, chosen)
        nodes.append(
            helper.make_node(
                "MatMulIntegerToFloat",
                [activation, values, scale, scales, zero, "", bias],
                [output],
                domain=CONTRIB,
            )
        )
        return nodes

    def _by_row(self, product: Product, bias: str, output: str) -> list[onnx.NodeProto]:
        """A scale for each row, made of its own largest number: no row depends on another."""
        values, scales = self._columns(product)
        scope, x = product.scope, product.activation
        one, zero = self._range_constants(scope, ValueRange(1.0, 128))
        made = {name: f"{output}/{name}" for name in ("size", "largest", "safe", "scale", "share", "bytes", "product")}
        last_axis = self._constant(scope, "last_axis", np.array([-1]))
        tiny = self._constant(scope, "tiny", np.array(np.finfo(np.float32).tiny * 127, np.float32))
        levels = self._constant(scope, "levels", np.array(1 / 127, np.float32))
        scaled = f"{output}/scaled" if bias else output
        nodes = [
            helper.make_node("Abs", [x], [made["size"]]),
            helper.make_node("ReduceMax", [made["size"], last_axis], [made["largest"]], keepdims=1),
            helper.make_node("Max", [made["largest"], tiny], [made["safe"]]),
            helper.make_node("Mul", [made["safe"], levels], [made["scale"]]),
            helper.make_node("Div", [x, made["scale"]], [made["share"]]),
            helper.make_node("QuantizeLinear", [made["share"], one, zero], [made["bytes"]]),
            helper.make_node(
                "MatMulIntegerToFloat",
                [made["bytes"], values, one, scales, zero, "", ""],
                [made["product"]],
                domain=CONTRIB,
            ),
            helper.make_node("Mul", [made["product"], made["scale"]], [scaled]),
        ]
        return nodes + ([helper.make_node("Add", [scaled, bias], [output])] if bias else [])

    def _in_blocks(self, product: Product, bias: str, output: str) -> list[onnx.NodeProto]:
        """4-bit weights; the kernel makes integers of each row by itself."""
        stored = self._stored(product, "int4")
        if not isinstance(stored, Blocks):
            raise ExportFailed(f"{product.name}: another product reads the same matrix with another precision")
        name, scope = product.weight.name, product.scope
        inputs = [product.activation, self._constant(scope, f"{name}/blocks", stored.values)]
        inputs.append(self._constant(scope, f"{name}/scales", stored.scales))
        inputs.append("" if stored.zeros is None else self._constant(scope, f"{name}/zeros", stored.zeros))
        return [
            helper.make_node(
                "MatMulNBits",
                [*inputs, "", bias] if bias else inputs,
                [output],
                domain=CONTRIB,
                K=product.shape[0],
                N=product.shape[1],
                bits=4,
                block_size=stored.size,
                accuracy_level=ACCURACY_LEVEL,
            )
        ]

    # -- constants -----------------------------------------------------------------------------------------------------

    def _stored(self, product: Product, precision: MatrixPrecision) -> Columns | Blocks:
        name = product.weight.name
        if name not in self.stored:
            self._store(name, matrix_of(product, self.folder), precision)
        return self.stored[name]

    def _store(self, name: str, matrix: Floats, precision: MatrixPrecision) -> None:
        if not np.isfinite(matrix).all():
            raise ExportFailed(f"{name} has weights that are no numbers")
        matrix = np.ascontiguousarray(matrix)
        self.stored[name] = (
            best_blocks(matrix) if precision == "int4" else columns_from_matrix(matrix, self.recipe.bits)
        )

    def _columns(self, product: Product) -> tuple[str, str]:
        """Return the names of a matrix [K, N] of bytes and of its scales."""
        stored, name, scope = self._stored(product, "int8"), product.weight.name, product.scope
        if not isinstance(stored, Columns):
            raise ExportFailed(f"{product.name}: another product reads the same matrix with another precision")
        scales = self._constant(scope, f"{name}/scales", stored.scales)
        if not product.transposed:
            return self._constant(scope, f"{name}/bytes", stored.values), scales
        # Rows are looked up in it, so it is stored as it was; onnxruntime turns it round once, when it is loaded. Not
        # inside of a branch: there it would hold the result a second time, beside the one that its kernel reads.
        rows = self._rows(scope, name, stored)
        if rows not in self.turned:
            turned = f"{name}/turned"
            self.turned[rows] = helper.make_node("Transpose", [rows], [turned], name=turned, perm=[1, 0])
        return self.turned[rows].output[0], scales

    def _rows(self, scope: Scope, name: str, stored: Columns) -> str:
        return self._constant(scope, f"{name}/rows", np.ascontiguousarray(stored.values.T))

    def _range_constants(self, scope: Scope, chosen: ValueRange) -> tuple[str, str]:
        scale = self._constant(scope, f"scale/{chosen.scale!r}", np.array(chosen.scale, np.float32))
        return scale, self._constant(scope, f"zero/{chosen.zero}", np.array(chosen.zero, np.uint8))

    def _constant(self, scope: Scope, name: str, array: NDArray[Any]) -> str:
        """Return the name of a constant of the outermost graph, which is added the first time."""
        while scope.outer is not None:
            scope = scope.outer
        if name not in scope.constants:
            scope.graph.initializer.append(tensor_from_array(name, array))
            scope.constants[name] = scope.graph.initializer[-1]
        return name

    # -- what stands around a product ----------------------------------------------------------------------------------

    def _quantized_input(self, product: Product, chosen: ValueRange) -> str | onnx.NodeProto:
        """Return the integers of an activation, or the node that makes them; one serves all products of a graph."""
        graph, x = product.scope.graph, product.activation
        key = id(graph), x, chosen
        if key in self.bytes_of:
            return self.bytes_of[key]
        scale, zero = self._range_constants(product.scope, chosen)
        made = next((node for node in graph.node if x in node.output), None)
        # Below zero there are no levels, so a ReLU before them changes nothing.
        if made is not None and made.op_type == "Relu" and chosen.zero == 0:
            x = made.input[0]
        output = self.bytes_of[key] = f"{product.activation}/bytes/{len(self.bytes_of)}"
        return helper.make_node("QuantizeLinear", [x, scale, zero], [output])

    def _bias(self, product: Product) -> tuple[str, onnx.NodeProto]:
        """Return the name of the bias [N] that is added to a product, if any, and the last node of both."""
        node = product.node
        if node.op_type == "Gemm":
            given = node.input[2] if len(node.input) > 2 else ""
            return given, node
        readers = [one for graph in graphs_of(product.scope.graph) for one in graph.node if node.output[0] in one.input]
        outputs = {one.name for one in product.scope.graph.output}
        if len(readers) == 1 and readers[0].op_type == "Add" and node.output[0] not in outputs:
            (other,) = [one for one in readers[0].input if one != node.output[0]] or [""]
            constant = product.scope.constant(other)
            if constant is not None and list(constant.dims) == [product.shape[1]]:
                return other, readers[0]
        return "", node

    def _look_up(self, scope: Scope, node: onnx.NodeProto, name: str, stored: Columns | Blocks) -> None:
        """Read rows of a tied matrix from its integers."""
        ids, output, place = node.input[1], node.output[0], list(scope.graph.node).index(node)
        if isinstance(stored, Blocks):
            # The same bytes as the product's, in two axes instead of three: the weights file holds them once.
            data = self._constant(scope, f"{name}/rows", stored.values.reshape(len(stored.values), -1))
            inputs = [data, ids, self._constant(scope, f"{name}/scales", stored.scales)]
            if stored.zeros is not None:
                inputs.append(self._constant(scope, f"{name}/zeros", stored.zeros))
            filled = stored.n_rows % stored.size != 0
            nodes = [
                helper.make_node(
                    "GatherBlockQuantized",
                    inputs,
                    [f"{output}/filled" if filled else output],
                    domain=CONTRIB,
                    bits=4,
                    block_size=stored.size,
                    gather_axis=0,
                    quantize_axis=1,
                )
            ]
            if filled:
                nodes.append(self._cut(scope, nodes[0].output[0], stored.n_rows, output))
        else:
            scales: Floats = stored.scales[:, None]
            made = [f"{output}/{part}" for part in ("bytes", "numbers", "scale")]
            nodes = [
                helper.make_node("Gather", [self._rows(scope, name, stored), ids], made[:1]),
                helper.make_node("Cast", made[:1], made[1:2], to=onnx.TensorProto.FLOAT),
                helper.make_node("Gather", [self._constant(scope, f"{name}/row_scales", scales), ids], made[2:]),
                helper.make_node("Mul", made[1:], [output]),
            ]
        for offset, one in enumerate(nodes):
            one.name = f"{node.name.partition('/')[0]}/{one.output[0]}"
            scope.graph.node.insert(place + 1 + offset, one)
        scope.graph.node.remove(node)

    def _cut(self, scope: Scope, rows: str, width: int, output: str) -> onnx.NodeProto:
        """Leave out of rows what fills their last block: the op returns whole blocks."""
        ends = [("no_width", 0), (f"width/{width}", width), ("last_axis", -1)]
        constants = [self._constant(scope, name, np.array([number])) for name, number in ends]
        return helper.make_node("Slice", [rows, *constants], [output])


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Take away nodes and constants that nobody reads: ReLUs before integers, float matrices."""
    while True:
        parts = list(graphs_of(graph))
        read = {name for part in parts for node in part.node for name in node.input}
        read |= {one.name for part in parts for one in part.output}
        unread = [(part, node) for part in parts for node in part.node if not read.intersection(node.output)]
        for part, node in unread:
            part.node.remove(node)
        if not unread:
            break
    for part in parts:
        for tensor in [one for one in part.initializer if one.name not in read]:
            part.initializer.remove(tensor)
