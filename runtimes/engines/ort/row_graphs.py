"""Tiny graphs: one picks rows of state, one writes zeros to it, one normalises rows of scores.

onnxruntime has no call for any of them.
"""

from collections.abc import Sequence

from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES
from fatdeploy.runtimes.engines.ort.graph_bytes import model_bytes, node_bytes, number, part, value_bytes
from fatdeploy.spec import TensorSpec

ROWS = "chosen"  # another name than the input's row axis, whose size may differ
SCORES, LOG_PROBS = "scores", "log_probs"
_TENSOR = 4  # the type number of a tensor attribute in onnx.proto


def gathered_name(name: str) -> str:
    """Return the name of a tensor's chosen rows in ``row_graph``."""
    return f"{name}/{ROWS}"


def shape_name(name: str) -> str:
    """Return the name of a tensor's shape in ``zero_graph``."""
    return f"{name}/shape"


def row_graph(tensors: Sequence[TensorSpec]) -> bytes:
    """Return a graph that picks rows of every tensor by their indices."""
    nodes = [node_bytes("Gather", [spec.name, ROWS], gathered_name(spec.name)) for spec in tensors]
    inputs = [
        value_bytes(ROWS, "int64", (ROWS,)),
        *(value_bytes(spec.name, spec.dtype, spec.shape) for spec in tensors),
    ]
    outputs = [value_bytes(gathered_name(spec.name), spec.dtype, (ROWS, *spec.shape[1:])) for spec in tensors]
    return model_bytes(nodes, inputs, outputs)


def zero_graph(tensors: Sequence[TensorSpec]) -> bytes:
    """Return a graph that writes zeros to every tensor, in the shape that it reads."""
    nodes = [node_bytes("ConstantOfShape", [shape_name(spec.name)], spec.name, _zero(spec.dtype)) for spec in tensors]
    inputs = [value_bytes(shape_name(spec.name), "int64", (len(spec.shape),)) for spec in tensors]
    return model_bytes(nodes, inputs, [value_bytes(spec.name, spec.dtype, spec.shape) for spec in tensors])


def log_softmax_graph() -> bytes:
    """Return a graph that turns scores [R, n] into log-probabilities."""
    scores, log_probs = (value_bytes(name, "float32", ("rows", "n")) for name in (SCORES, LOG_PROBS))
    return model_bytes([node_bytes("LogSoftmax", [SCORES], LOG_PROBS)], [scores], [log_probs])


def _zero(dtype: str) -> bytes:
    element = ELEMENT_TYPES[dtype]
    tensor = number(1, 1) + number(2, element.onnx) + part(9, bytes(element.n_bytes))
    return part(1, b"value") + part(5, tensor) + number(20, _TENSOR)
