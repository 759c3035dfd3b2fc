"""Small graphs, their conversion to half precision, and their outputs on onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from fatdeploy.export.graph_files import graphs_of, initializers_of, read_structure
from fatdeploy.export.half.rewrite import in_half
from fatdeploy.targets import HalfPrecision

OPSETS = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
KINDS = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "int64": TensorProto.INT64}

Shape = list[int | str | None]


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Return a node named after its first output; names are separated by spaces, `-` is an omitted input."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"part/{outputs.split()[0]}", **attributes)


def branch(nodes: list[onnx.NodeProto], output: str, constants: dict[str, Any] | None = None) -> onnx.GraphProto:
    """Return a branch with one output."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    value = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, output, [], [value], tensors)


def written(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[str, Shape]],
    outputs: dict[str, tuple[str, Shape]],
    constants: dict[str, Any],
) -> Path:
    """Write a graph with its weights in it."""
    values = [
        [helper.make_tensor_value_info(name, KINDS[kind], shape) for name, (kind, shape) in described.items()]
        for described in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", *values, tensors)
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, ir_version=10), path)
    return path


def halved(graph: Path, precision: HalfPrecision = "fp16", *border: str) -> Path:
    """Write the graph in half precision beside it, and return its path."""
    return in_half(graph, graph.with_name(f"{precision}.onnx"), precision, border)


def ran(graph: Path, **inputs: Any) -> list[np.ndarray]:
    """Return the outputs of a graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # as in the engine
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray] = session.run(None, inputs)
    return outputs


def ops(graph: Path) -> list[str]:
    """Return the ops of a graph and its branches in order."""
    return [node.op_type for part in graphs_of(read_structure(graph).graph) for node in part.node]


def stored(graph: Path) -> dict[str, int]:
    """Return the types of a graph's constants."""
    return {tensor.name: tensor.data_type for tensor in initializers_of(read_structure(graph).graph)}
