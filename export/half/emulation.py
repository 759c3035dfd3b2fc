"""Run a half-precision graph on a machine that cannot: in float32, with every result rounded to half."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fatdeploy.export.graph_files import graphs_of, read_structure, tensor_data, write_structure, write_weights
from fatdeploy.export.half.roles import branches_of, read

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def rounded(graph: Path, result: Path) -> Path:
    """Write a copy of a graph with float32 in place of half precision and the same numbers; return its path.

    Sums inside an op run in float32, as they do in the kernels of GPUs. Optimisers must be off when it runs: rounding
    is a pair of casts that they would remove.
    """
    model = read_structure(graph)
    types = read(model.graph).types
    for part in graphs_of(model.graph):
        _round_nodes(part, types)
        for value in (*part.input, *part.output):
            if types[value.name] in HALVES:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    write_weights(model.graph, result, lambda tensor: _widened(tensor, graph.parent))
    write_structure(model, result)
    onnx.checker.check_model(result, full_check=True)
    return result


def _round_nodes(graph: onnx.GraphProto, types: dict[str, int]) -> None:
    nodes = []
    for node in graph.node:
        halves = [name for name in node.output if types.get(name) in HALVES]
        nodes.append(node)
        # The results of a condition were rounded in its branches.
        if not halves or any(branches_of(node)):
            continue
        _widen(node)
        for index, name in enumerate(node.output):
            if name in halves:
                node.output[index] = f"{name}.exact"
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


def _widened(tensor: TensorProto, folder: Path) -> bytes:
    """Return the data of a weight, which becomes float32 if it is half."""
    data = tensor_data(tensor, folder)
    if tensor.data_type not in HALVES:
        return data
    stored: NDArray[Any] = np.frombuffer(data, helper.tensor_dtype_to_np_dtype(tensor.data_type))
    tensor.data_type = TensorProto.FLOAT
    return stored.astype(np.float32).tobytes()
