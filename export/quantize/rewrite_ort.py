"""Integer matrices in ops of onnxruntime: a simplified graph and a recipe in, a quantized graph out."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from fatdeploy.errors import ExportFailed
from fatdeploy.export.graph_files import graphs_of, read_structure
from fatdeploy.export.quantize.blocks.products import block_node, split_nodes
from fatdeploy.export.quantize.blocks.split import SplitBlocks
from fatdeploy.export.quantize.integers import Blocks, Columns, Floats, ValueRange
from fatdeploy.export.quantize.lookups import CONTRIB, row_nodes, rows_constant
from fatdeploy.export.quantize.matrices import (
    Product,
    Scope,
    constant_array,
    lookups_of,
    matrix_of,
    tensor_from_array,
)
from fatdeploy.export.quantize.recipe import (
    STORED_AS,
    MatrixRecipe,
    Recipe,
    Stored,
    drop_unread_constants,
    products_by_name,
    read_names,
    written_with_weights,
)

NORMS = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")


def quantized(graph: Path, result: Path, recipe: Recipe) -> Path:
    """Write a graph with its matrices stored as the recipe says; return its path."""
    model = read_structure(graph)
    products = products_by_name(model, graph, recipe)
    rewrite = _OrtRewrite(recipe, graph.parent)
    for name, matrix in recipe.matrices.items():
        if matrix.form != "fp32":
            rewrite.replace(products[name], matrix)
    rewrite.finish(model)
    return written_with_weights(model, graph, result)


@dataclass
class _OrtRewrite:
    """One pass over a graph. New nodes take the places of old ones, so that nodes stay in the order of computation."""

    recipe: Recipe
    folder: Path
    stored: dict[str, Stored] = field(default_factory=dict)  # by the constant's name
    recipes: dict[str, MatrixRecipe] = field(default_factory=dict)  # of stored matrices, by the constant's name
    # The integers of activations that have some already.
    bytes_of: dict[tuple[int, str, ValueRange], str] = field(default_factory=dict)
    # What onnxruntime computes from constants once at load time, by the name of the result.
    at_load: dict[str, onnx.NodeProto] = field(default_factory=dict)

    def replace(self, product: Product, recipe: MatrixRecipe) -> None:
        """Replace a product, the bias added to it and the ReLU before it by integer ops."""
        graph = product.scope.graph
        bias, last = self._bias(product)
        if recipe.correction is not None:
            bias = self._corrected(product, bias, recipe.correction)
        place = list(graph.node).index(last)
        before = len(graph.node)
        smoothing = self._smoothed(product, recipe)
        nodes = [*smoothing, *self._product_nodes(product, recipe, bias, last.output[0])]
        for offset, node in enumerate(nodes):
            node.name = f"{product.node.name.partition('/')[0]}/{node.output[0]}"
            graph.node.insert(place + 1 + offset, node)
        graph.node.remove(last)
        if last is not product.node:
            graph.node.remove(product.node)
        assert len(graph.node) == before + len(nodes) - (1 if last is product.node else 2)  # noqa: S101

    def finish(self, model: onnx.ModelProto) -> None:
        """Look rows up in the integers that replaced a tied matrix, and drop what no node reads any more."""
        for scope in Scope(model.graph).inner():
            for node in lookups_of(scope, self.recipe.table_sizes):
                table = scope.constant(node.input[0])
                assert table is not None  # noqa: S101 - lookups have one
                if table.name not in self.stored and self.recipe.embedding.form != "fp32":
                    self._store(table.name, constant_array(table, self.folder).T, self.recipe.embedding)
                if table.name in self.stored:
                    self._look_up(scope, node, table.name)
        for node in self.at_load.values():
            model.graph.node.insert(0, node)
        _drop_unread_nodes(model.graph)
        drop_unread_constants(model.graph)
        if not any(opset.domain == CONTRIB for opset in model.opset_import):
            model.opset_import.append(helper.make_opsetid(CONTRIB, 1))

    # -- the forms of a product ----------------------------------------------------------------------------------------

    def _product_nodes(self, product: Product, recipe: MatrixRecipe, bias: str, output: str) -> list[onnx.NodeProto]:
        stored = self._stored(product, recipe)
        if isinstance(stored, SplitBlocks):
            return self._in_parts(product, stored, bias, output)
        if isinstance(stored, Blocks):
            constant = partial(self._constant, product.scope)
            return [block_node(constant, product.weight.name, stored, product.activation, bias, output)]
        if recipe.form == "row":
            return self._by_row(product, bias, output)
        if recipe.activations is None:
            raise ExportFailed(f"{product.name}: a static form needs the range of its activations")
        return self._in_range(product, recipe.activations, bias, output)

    def _smoothed(self, product: Product, recipe: MatrixRecipe) -> list[onnx.NodeProto]:
        """Let a product read its activation divided by the channels' factors; return the node that does it, if any.

        Where a norm makes the activation for this product alone, its gain and bias carry the factors: no op is needed.
        """
        if recipe.smoothing is None:
            return []
        factors = (1 / recipe.smoothing).astype(np.float32)
        if self._folded(product, factors):
            return []
        constant = self._constant(product.scope, f"{product.name}/smoothing", factors)
        output = f"{product.name}/smoothed"
        node = helper.make_node("Mul", [product.activation, constant], [output])
        product.node.input[0] = output
        return [node]

    def _folded(self, product: Product, factors: Floats) -> bool:
        """Multiply the gain and bias of the norm before a product; False if something else reads the norm."""
        graph, x = product.scope.graph, product.activation
        norm = next((node for node in graph.node if x in node.output), None)
        if norm is None or norm.op_type not in NORMS or x != norm.output[0]:
            return False
        parts = list(graphs_of(graph))
        n_readers = sum(list(node.input).count(x) for part in parts for node in part.node)
        constants = [product.scope.constant(name) for name in norm.input[1:]]
        if n_readers > 1 or x in {output.name for part in parts for output in part.output} or None in constants:
            return False
        for place, constant in enumerate(constants, 1):
            assert constant is not None  # noqa: S101 - checked above
            scaled = constant_array(constant, self.folder) * factors
            norm.input[place] = self._constant(product.scope, f"{product.name}/norm/{place}", scaled)
        return True

    def _corrected(self, product: Product, bias: str, correction: Floats) -> str:
        """Return the name of a bias with what the integers lose on average added to it."""
        constant = product.scope.constant(bias) if bias else None
        known = np.zeros(product.shape[1], np.float32) if constant is None else constant_array(constant, self.folder)
        return self._constant(product.scope, f"{product.name}/corrected", (known + correction).astype(np.float32))

    def _in_range(self, product: Product, chosen: ValueRange, bias: str, output: str) -> list[onnx.NodeProto]:
        """Two ops: activations become integers in the calibrated range, and the product scales and adds the bias."""
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
        """Each row gets a scale from its own largest number, so that no row depends on another."""
        values, scales = self._columns(product)
        scope, x = product.scope, product.activation
        unit, zero = self._range_constants(scope, ValueRange(1.0, 128))
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
            helper.make_node("QuantizeLinear", [made["share"], unit, zero], [made["bytes"]]),
            helper.make_node(
                "MatMulIntegerToFloat",
                [made["bytes"], values, unit, scales, zero, "", ""],
                [made["product"]],
                domain=CONTRIB,
            ),
            helper.make_node("Mul", [made["product"], made["scale"]], [scaled]),
        ]
        return nodes + ([helper.make_node("Add", [scaled, bias], [output])] if bias else [])

    def _in_parts(self, product: Product, stored: SplitBlocks, bias: str, output: str) -> list[onnx.NodeProto]:
        constant, biases = partial(self._constant, product.scope), ("", "")
        if bias:
            biases = self._cut_bias(product, bias, stored.n_wide)
        return split_nodes(constant, product.weight.name, stored, product.activation, biases, output)

    def _cut_bias(self, product: Product, bias: str, place: int) -> tuple[str, str]:
        """Return the names of both parts of a bias, which onnxruntime cuts once at load time: it is stored whole."""
        constant = product.scope.constant(bias)
        assert constant is not None  # noqa: S101 - a bias is one
        # Outside of branches the names of their constants are unknown; equal constants are stored once.
        add = partial(self._constant, product.scope)
        whole = add(f"{product.name}/whole", constant_array(constant, self.folder))
        ends = [add(f"end/{end}", np.array([end])) for end in (0, place, product.shape[1])]
        cut = f"{product.name}/bias/wide", f"{product.name}/bias/narrow"
        for name, begin, end in zip(cut, ends, ends[1:], strict=False):
            self.at_load[name] = helper.make_node("Slice", [whole, begin, end], [name], name=name)
        return cut

    # -- constants -----------------------------------------------------------------------------------------------------

    def _stored(self, product: Product, recipe: MatrixRecipe) -> Stored:
        name = product.weight.name
        if name not in self.stored:
            self._store(name, matrix_of(product, self.folder), recipe)
        stored = self.stored[name]
        if not isinstance(stored, STORED_AS[recipe.form]):
            raise ExportFailed(f"{product.name}: another product reads the same matrix in another form")
        return stored

    def _store(self, name: str, matrix: Floats, recipe: MatrixRecipe) -> None:
        if not np.isfinite(matrix).all():
            raise ExportFailed(f"{name} has weights that are not finite")
        self.stored[name] = recipe.integers(np.ascontiguousarray(matrix), self.recipe.bits)
        self.recipes[name] = recipe

    def _columns(self, product: Product) -> tuple[str, str]:
        """Return the names of a matrix [K, N] of bytes and of its scales."""
        name, scope = product.weight.name, product.scope
        stored = self.stored[name]
        assert isinstance(stored, Columns)  # noqa: S101 - only these forms ask
        scales = self._constant(scope, f"{name}/scales", stored.scales)
        if not product.transposed:
            return self._constant(scope, f"{name}/bytes", stored.values), scales
        # Rows are looked up in it, so it keeps its layout, and onnxruntime transposes it once at load time. Not inside
        # a branch: there onnxruntime would keep the result in memory beside the copy that its kernel reads.
        rows = rows_constant(partial(self._constant, scope), name, stored)
        turned = f"{name}/turned"
        self.at_load[turned] = helper.make_node("Transpose", [rows], [turned], name=turned, perm=[1, 0])
        return turned, scales

    def _range_constants(self, scope: Scope, chosen: ValueRange) -> tuple[str, str]:
        scale = self._constant(scope, f"scale/{chosen.scale!r}", np.array(chosen.scale, np.float32))
        return scale, self._constant(scope, f"zero/{chosen.zero}", np.array(chosen.zero, np.uint8))

    def _constant(self, scope: Scope, name: str, array: NDArray[Any]) -> str:
        """Return the name of a constant of the outermost graph, adding it on first use."""
        while scope.outer is not None:
            scope = scope.outer
        if name not in scope.constants:
            scope.graph.initializer.append(tensor_from_array(name, array))
            scope.constants[name] = scope.graph.initializer[-1]
        return name

    # -- nodes around a product ----------------------------------------------------------------------------------------

    def _quantized_input(self, product: Product, chosen: ValueRange) -> str | onnx.NodeProto:
        """Return the name of an activation's integers, or the node that makes them; a graph's products share it."""
        graph, x = product.scope.graph, product.activation
        key = id(graph), x, chosen
        if key in self.bytes_of:
            return self.bytes_of[key]
        scale, zero = self._range_constants(product.scope, chosen)
        producer = next((node for node in graph.node if x in node.output), None)
        # The range has no levels below zero, so it does the work of a ReLU.
        if producer is not None and producer.op_type == "Relu" and chosen.zero == 0:
            x = producer.input[0]
        output = self.bytes_of[key] = f"{product.activation}/bytes/{len(self.bytes_of)}"
        return helper.make_node("QuantizeLinear", [x, scale, zero], [output])

    def _bias(self, product: Product) -> tuple[str, onnx.NodeProto]:
        """Return the name of the bias [N] added to a product, empty if none, and the last node of both."""
        node = product.node
        if node.op_type == "Gemm":
            return node.input[2] if len(node.input) > 2 else "", node
        nodes = (other for graph in graphs_of(product.scope.graph) for other in graph.node)
        readers = [reader for reader in nodes if node.output[0] in reader.input]
        outputs = {output.name for output in product.scope.graph.output}
        if len(readers) == 1 and readers[0].op_type == "Add" and node.output[0] not in outputs:
            (bias,) = [name for name in readers[0].input if name != node.output[0]] or [""]
            constant = product.scope.constant(bias)
            if constant is not None and list(constant.dims) == [product.shape[1]]:
                return bias, readers[0]
        return "", node

    # -- rows of a tied matrix -----------------------------------------------------------------------------------------

    def _look_up(self, scope: Scope, node: onnx.NodeProto, name: str) -> None:
        """Read rows of a tied matrix from its integers."""
        place = list(scope.graph.node).index(node)
        constant = partial(self._constant, scope)
        smoothing = self.recipes[name].smoothing
        for offset, new in enumerate(row_nodes(constant, name, self.stored[name], node, smoothing)):
            new.name = f"{node.name.partition('/')[0]}/{new.output[0]}"
            scope.graph.node.insert(place + 1 + offset, new)
        scope.graph.node.remove(node)


def _drop_unread_nodes(graph: onnx.GraphProto) -> None:
    """Remove nodes whose results nobody reads, such as ReLUs before integers."""
    parts = list(graphs_of(graph))
    while True:
        read = read_names(parts)
        unread = [(part, node) for part in parts for node in part.node if not read.intersection(node.output)]
        if not unread:
            return
        for part, node in unread:
            part.node.remove(node)
        parts = list(graphs_of(graph))
