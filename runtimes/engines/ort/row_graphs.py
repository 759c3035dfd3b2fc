"""Tiny graphs, written as raw ONNX bytes: one picks rows of state, one writes zeros to it, one normalises scores.

onnxruntime has no call for any of them, and the onnx package is not installed on devices.
"""

from collections.abc import Iterable, Sequence

from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES
from fatdeploy.spec import TensorSpec

IR_VERSION, OPSET = 10, 21
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
    nodes = [_node("Gather", [spec.name, ROWS], gathered_name(spec.name)) for spec in tensors]
    inputs = [_value(ROWS, "int64", (ROWS,)), *(_value(spec.name, spec.dtype, spec.shape) for spec in tensors)]
    outputs = [_value(gathered_name(spec.name), spec.dtype, (ROWS, *spec.shape[1:])) for spec in tensors]
    return _model(nodes, inputs, outputs)


def zero_graph(tensors: Sequence[TensorSpec]) -> bytes:
    """Return a graph that writes zeros to every tensor, in the shape that it reads."""
    nodes = [_node("ConstantOfShape", [shape_name(spec.name)], spec.name, _zero(spec.dtype)) for spec in tensors]
    inputs = [_value(shape_name(spec.name), "int64", (len(spec.shape),)) for spec in tensors]
    return _model(nodes, inputs, [_value(spec.name, spec.dtype, spec.shape) for spec in tensors])


def log_softmax_graph() -> bytes:
    """Return a graph that turns scores [R, n] into log-probabilities."""
    scores, log_probs = (_value(name, "float32", ("rows", "n")) for name in (SCORES, LOG_PROBS))
    return _model([_node("LogSoftmax", [SCORES], LOG_PROBS)], [scores], [log_probs])


def _model(nodes: Iterable[bytes], inputs: Iterable[bytes], outputs: Iterable[bytes]) -> bytes:
    graph = _parts(1, nodes) + _part(2, b"rows") + _parts(11, inputs) + _parts(12, outputs)
    return _number(1, IR_VERSION) + _part(7, graph) + _part(8, _number(2, OPSET))


def _node(op: str, inputs: Sequence[str], output: str, attribute: bytes = b"") -> bytes:
    names = _parts(1, (name.encode() for name in inputs)) + _part(2, output.encode())
    return names + _part(3, output.encode()) + _part(4, op.encode()) + (_part(5, attribute) if attribute else b"")


def _value(name: str, dtype: str, shape: Sequence[int | str]) -> bytes:
    axes = (_number(1, axis) if isinstance(axis, int) else _part(2, axis.encode()) for axis in shape)
    tensor_type = _number(1, ELEMENT_TYPES[dtype].onnx) + _part(2, _parts(1, axes))
    return _part(1, name.encode()) + _part(2, _part(1, tensor_type))


def _zero(dtype: str) -> bytes:
    element = ELEMENT_TYPES[dtype]
    tensor = _number(1, 1) + _number(2, element.onnx) + _part(9, bytes(element.n_bytes))
    return _part(1, b"value") + _part(5, tensor) + _number(20, _TENSOR)


def _parts(field: int, parts: Iterable[bytes]) -> bytes:
    return b"".join(_part(field, part) for part in parts)


def _part(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*content, value])
