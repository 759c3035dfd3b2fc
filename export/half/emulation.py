"""A graph of half precision on a machine that cannot run it: in float32, every result rounded as half would be."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fatdeploy.export.graph_files import (
    INLINE_BELOW,
    graphs_of,
    hold,
    point,
    read_structure,
    tensor_data,
    write_structure,
)
from fatdeploy.export.half.roles import branches_of, read

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def rounded(graph: Path, result: Path) -> Path:
    """Write a graph with float32 where another has half precision, and the same numbers; return its path.

    Sums inside of an op run in float32, as they do in the kernels of GPUs. An optimiser must leave it alone: rounding
    is two casts that undo each other.
    """
    model = read_structure(graph)
    types = read(model.graph).types
    for part in graphs_of(model.graph):
        _round_nodes(part, types)
        for one in (*part.input, *part.output):
            if types[one.name] in HALVES:
                one.type.tensor_type.elem_type = TensorProto.FLOAT
    _widen_weights(model.graph, graph.parent, result)
    write_structure(model, result)
    onnx.checker.check_model(result, full_check=True)
    return result


def _round_nodes(graph: onnx.GraphProto, types: dict[str, int]) -> None:
    nodes = []
    for node in graph.node:
        halves = [name for name in node.output if types.get(name) in HALVES]
        nodes.append(node)
        # What a condition gives was rounded in its branch.
        if not halves or any(branches_of(node)):
            continue
        _widen(node)
        for place, name in enumerate(node.output):
            if name in halves:
                node.output[place] = f"{name}.exact"
                half, wide = f"{name}.rounded", int(TensorProto.FLOAT)
                nodes.append(helper.make_node("Cast", [f"{name}.exact"], [half], name=half, to=types[name]))
                nodes.append(helper.make_node("Cast", [half], [name], name=f"{name}.wide", to=wide))
    del graph.node[:]
    graph.node.extend(nodes)


def _widen(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if node.op_type == "Cast":
            attribute.i = TensorProto.FLOAT
        elif node.op_type == "ConstantOfShape":
            attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float32)))


def _widen_weights(graph: onnx.GraphProto, folder: Path, path: Path) -> None:
    beside = path.with_suffix(".weights")
    with beside.open("wb") as file:
        for tensor in (one for part in graphs_of(graph) for one in part.initializer):
            data = tensor_data(tensor, folder)
            if tensor.data_type in HALVES:
                stored: NDArray[Any] = np.frombuffer(data, helper.tensor_dtype_to_np_dtype(tensor.data_type))
                data, tensor.data_type = stored.astype(np.float32).tobytes(), TensorProto.FLOAT
            if len(data) < INLINE_BELOW:
                hold(tensor, data)
                continue
            offset = file.tell()
            file.write(data)
            point(tensor, beside.name, offset, len(data))
