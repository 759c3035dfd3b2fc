"""Small graphs made by hand, their halves, and what onnxruntime makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from fatdeploy.export.graph_files import graphs_of, read_structure
from fatdeploy.export.half.rewrite import in_half
from fatdeploy.targets import HalfPrecision

OPSETS = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
KINDS = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "int64": TensorProto.INT64}

Shape = list[int | str | None]


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Return a node that is called after what it makes; names are separated by blanks, `-` is one left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"part/{outputs.split()[0]}", **attributes)


def branch(nodes: list[onnx.NodeProto], output: str, constants: dict[str, Any] | None = None) -> onnx.GraphProto:
    """Return a branch with one output."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    told = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, output, [], [told], tensors)


def written(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[str, Shape]],
    outputs: dict[str, tuple[str, Shape]],
    constants: dict[str, Any],
) -> Path:
    """Write a graph with its weights in it."""
    told = [
        [helper.make_tensor_value_info(name, KINDS[kind], shape) for name, (kind, shape) in ones.items()]
        for ones in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", *told, tensors)
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, ir_version=10), path)
    return path


def halved(graph: Path, precision: HalfPrecision = "fp16", *border: str) -> Path:
    """Return the graph's half beside it."""
    return in_half(graph, graph.with_name(f"{precision}.onnx"), precision, border)


def ran(graph: Path, **inputs: Any) -> list[np.ndarray]:
    """Return the outputs of a graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # as the engine's
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, inputs)
    return found


def ops(graph: Path) -> list[str]:
    """Return the ops of a graph and its branches in order."""
    return [one.op_type for part in graphs_of(read_structure(graph).graph) for one in part.node]


def stored(graph: Path) -> dict[str, int]:
    """Return the types of a graph's constants."""
    parts = graphs_of(read_structure(graph).graph)
    return {one.name: one.data_type for part in parts for one in part.initializer}
