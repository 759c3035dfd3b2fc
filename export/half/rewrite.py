"""A graph in half precision: matrices and activations in fp16 or bf16; sums and all sensitive ops in float32.

The graph is rewritten, not traced again, so this works for every model and both dialects.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fatdeploy.errors import ExportFailed, in_one_line
from fatdeploy.export.graph_files import (
    INLINE_BELOW,
    graphs_of,
    read_structure,
    tensor_data,
    write_structure,
    write_weights,
)
from fatdeploy.export.half.roles import branches_of, in_float32, read, spread
from fatdeploy.spec import ModelSpec
from fatdeploy.targets import HalfPrecision

Casts = dict[tuple[str, int], str]


@dataclass(frozen=True)
class HalfFormat:
    """A half-precision number format."""

    dtype: Literal["float16", "bfloat16"]
    onnx_type: int
    largest: float
    smallest: float  # that keeps all of its digits


FORMATS: dict[HalfPrecision, HalfFormat] = {
    "fp16": HalfFormat("float16", TensorProto.FLOAT16, 65504.0, 2.0**-14),
    "bf16": HalfFormat("bfloat16", TensorProto.BFLOAT16, float(2**128 - 2**120), 2.0**-126),
}
# What onnxruntime's attention adds to hidden scores: an attribute that its kernels convert to the scores' type.
HIDING = "mask_filter_value"


def in_half(graph: Path, result: Path, precision: HalfPrecision, border: Collection[str]) -> Path:
    """Write a simplified fp32 graph in half precision, and return its path.

    Inputs and outputs in ``border`` become half as well. A weight beyond the range of half is an error.
    """
    model = read_structure(graph)
    for part in graphs_of(model.graph):
        _hoist_constants(part)
    rewriter = _Rewriter(model.graph, graph.parent, precision, border)
    rewriter.rewrite()
    write_weights(model.graph, result, rewriter.weight_data)
    write_structure(model, result)
    onnx.checker.check_model(result, full_check=True)
    return result


def half_array(array: NDArray[Any], precision: HalfPrecision | None) -> NDArray[Any]:
    """Return an array in half precision; without a precision, the array itself."""
    return array if precision is None else array.astype(helper.tensor_dtype_to_np_dtype(FORMATS[precision].onnx_type))


def halved(spec: ModelSpec, graphs: dict[str, Path], half: HalfPrecision) -> tuple[ModelSpec, dict[str, Path]]:
    """Return the contract and the graphs of a bundle in half precision; the graphs are written beside the others."""
    dtype = FORMATS[half].dtype
    changed = spec.halved(dtype)
    tensors = (*changed.encoder_outputs(), *changed.past, *changed.present)
    border = {tensor.name for tensor in tensors if tensor.dtype == dtype}
    folder = next(iter(graphs.values())).parent.with_name(half)
    folder.mkdir()
    return changed, {part: in_half(graph, folder / part, half, border) for part, graph in graphs.items()}


def _hoist_constants(graph: onnx.GraphProto) -> None:
    """Turn a graph's float32 constants into initializers, so that there is only one kind of constant."""
    kept = []
    for node in graph.node:
        value = node.attribute[0] if node.op_type == "Constant" else None
        if value is None or value.name not in ("value", "value_float", "value_floats"):
            kept.append(node)
            continue
        if value.name == "value":
            tensor = TensorProto()
            tensor.CopyFrom(value.t)
        else:
            numbers = value.f if value.name == "value_float" else list(value.floats)
            tensor = numpy_helper.from_array(np.array(numbers, np.float32))
        tensor.name = node.output[0]
        graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(kept)


class _Rewriter:
    """Assigns a type to every value of a graph, and casts where two types meet."""

    def __init__(self, graph: onnx.GraphProto, folder: Path, precision: HalfPrecision, border: Collection[str]) -> None:
        self.graph, self.folder, self.precision, self.border = graph, folder, precision, border
        self.format = FORMATS[precision]
        self.half, self.largest = self.format.onnx_type, self.format.largest
        self.reading = read(graph)
        self.owners = {tensor.name: part for part in graphs_of(graph) for tensor in part.initializer}
        self.used = {name for part in graphs_of(graph) for node in part.node for name in (*node.input, *node.output)}
        self.used |= self.reading.types.keys()
        too_small = self._judge_constants()
        kept = (self.reading.inputs | self.reading.outputs) - set(border)
        self.full = in_float32(self.reading, kept, self.too_large.keys(), too_small)
        # Values that may be beyond the range of half: nearly always hidden scores.
        self.huge = spread(self.reading, self.too_large)
        self._refuse_large_weights()
        self.types = self._types()

    def _judge_constants(self) -> set[str]:
        """Find the constants beyond the range of half: any that is too large, and single numbers that are too small."""
        self.too_large: dict[str, float] = {}
        too_small = set()
        for name, tensor in self.reading.constants.items():
            magnitudes = np.abs(self._array(tensor))
            largest = float(magnitudes.max(initial=0, where=np.isfinite(magnitudes)))
            if largest > self.largest:
                self.too_large[name] = largest
            elif magnitudes.size == 1 and 0 < largest < self.format.smallest:
                too_small.add(name)
        return too_small

    def _refuse_large_weights(self) -> None:
        reasons = [
            f"{name} (read by {op.node.name or op.node.op_type}) has {self.too_large[name]:.4g}"
            for op in self.reading.ops
            for name in op.reads
            if name in self.too_large and op.key not in self.full
        ]
        if reasons:
            problem = f"weights beyond the range of {self.precision}, which ends at {self.largest:.4g}"
            advice = "--precision fp32" if self.precision == "bf16" else "--precision bf16 or fp32"
            raise ExportFailed(f"{in_one_line(problem, reasons)}. Export with {advice}")

    def _types(self) -> dict[str, int]:
        """Return the new type of every value that was float32."""
        types = {name: self.half if name in self.border else int(TensorProto.FLOAT) for name in self.reading.inputs}
        for op in self.reading.ops:
            types.update(dict.fromkeys(op.makes, self._type_of(op.key)))
        for name, tensor in self.reading.constants.items():
            wide = any(op.key in self.full for op in self.reading.readers[name])
            # A large tensor is stored in half whoever reads it: small files are the purpose of half.
            stays = name in self.too_large or (wide and not self._is_large(tensor))
            types[name] = int(TensorProto.FLOAT) if stays else self.half
        return types

    def _type_of(self, key: str) -> int:
        return int(TensorProto.FLOAT) if key in self.full else self.half

    def _is_large(self, tensor: TensorProto) -> bool:
        return 4 * int(np.prod(tensor.dims)) >= INLINE_BELOW

    def _array(self, tensor: TensorProto) -> NDArray[np.float32]:
        return np.frombuffer(tensor_data(tensor, self.folder), np.float32).reshape(tuple(tensor.dims))

    def rewrite(self) -> None:
        """Rewrite the graph, its inputs and its outputs."""
        casts: Casts = {}
        self._rewrite_nodes(self.graph, casts)
        for value in self.graph.input:
            if value.name in self.reading.inputs:
                value.type.tensor_type.elem_type = self.types[value.name]
        for value in self.graph.output:
            if value.name in self.reading.outputs:
                value.type.tensor_type.elem_type = self.half if value.name in self.border else TensorProto.FLOAT
                self._rewrite_output(value.name, value.type.tensor_type.elem_type, casts)

    def _rewrite_output(self, name: str, wanted: int, casts: Casts) -> None:
        """Return an output in another type than it is computed in: the cast gets its name."""
        if wanted == self.types[name]:
            return
        nodes: list[onnx.NodeProto] = []
        cast = self._as(name, wanted, casts, nodes, "")
        self.graph.node.extend(nodes)
        inner = self._unused(name)
        self.types[inner] = self.types[name]
        _rename(self.graph, name, inner)
        _rename(self.graph, cast, name)

    def _rewrite_nodes(self, graph: onnx.GraphProto, casts: Casts) -> None:
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            for branch in branches_of(node):
                self._rewrite_branch(branch, node.output, dict(casts))
            wanted = self._type_of(node.output[0])
            if node.op_type not in ("If", "Shape", "Size"):
                for index, name in enumerate(node.input):
                    node.input[index] = self._as(name, wanted, casts, nodes, node.name)
            self._retype(node, wanted)
            nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)

    def _rewrite_branch(self, branch: onnx.GraphProto, outputs: Sequence[str], casts: Casts) -> None:
        self._rewrite_nodes(branch, casts)
        for value, name in zip(branch.output, outputs, strict=True):
            if name in self.types:
                nodes: list[onnx.NodeProto] = []
                value.name = self._as(value.name, self.types[name], casts, nodes, "")
                value.type.tensor_type.elem_type = self.types[name]
                branch.node.extend(nodes)

    def _as(self, name: str, wanted: int, casts: Casts, nodes: list[onnx.NodeProto], reader: str) -> str:
        """Return the name of a value in the wanted type; ops that this needs are appended to ``nodes``."""
        if self.types.get(name, wanted) == wanted:
            return name
        if (name, wanted) not in casts:
            casts[name, wanted] = self._unused(name)
            constant = self.reading.constants.get(name)
            if constant is not None and not self._is_large(constant):
                copy = self.owners[name].initializer.add()
                copy.CopyFrom(constant)
                copy.name = casts[name, wanted]
                self.types[copy.name] = wanted
            else:
                nodes += self._casting(name, wanted, casts[name, wanted], reader)
        return casts[name, wanted]

    def _casting(self, name: str, wanted: int, result: str, reader: str) -> list[onnx.NodeProto]:
        module = reader.partition("/")[0]
        nodes = []
        if wanted == self.half and name in self.huge:
            # Cast would make -1e30 infinite, and a row of such scores NaN; the end of the range hides as well.
            limits = [self._number(sign * self.largest) for sign in (-1, 1)]
            clipped = self._unused(name)
            nodes.append(helper.make_node("Clip", [name, *limits], [clipped], name=f"{module}/{clipped}"))
            name = clipped
        return [*nodes, helper.make_node("Cast", [name], [result], name=f"{module}/{result}", to=wanted)]

    def _number(self, value: float) -> str:
        name = self._unused("limit")
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
        self.types[name] = int(TensorProto.FLOAT)
        return name

    def _unused(self, name: str) -> str:
        number = 1
        while f"{name}.{number}" in self.used:
            number += 1
        self.used.add(f"{name}.{number}")
        return f"{name}.{number}"

    def _retype(self, node: onnx.NodeProto, wanted: int) -> None:
        """Set the new type in the attributes of a node that depend on it."""
        for attribute in node.attribute:
            if node.op_type == "Cast" and node.output[0] in self.types:
                attribute.i = wanted
            elif node.op_type == "ConstantOfShape" and node.output[0] in self.types:
                filled = numpy_helper.to_array(attribute.t).astype(helper.tensor_dtype_to_np_dtype(wanted))
                attribute.t.CopyFrom(numpy_helper.from_array(filled))
            elif attribute.name == HIDING:
                attribute.f = max(attribute.f, -self.largest)

    def weight_data(self, tensor: TensorProto) -> bytes:
        """Return the data of a weight in its new type, which the tensor gets."""
        if tensor.data_type != TensorProto.FLOAT or self.types[tensor.name] != self.half:
            return tensor_data(tensor, self.folder)
        data = half_array(self._array(tensor), self.precision).tobytes()
        tensor.data_type = self.half
        return data


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value wherever it is computed or read."""
    for part in graphs_of(graph):
        for node in part.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == old:
                        names[index] = new
            if node.output[0] == new:
                # onnxruntime requires unique names of nodes, and ours end in the name of their output.
                node.name = f"{node.name.partition('/')[0]}/{new}"
        for tensor in part.initializer:
            if tensor.name == old:
                tensor.name = new
