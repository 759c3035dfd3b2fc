"""Two tiny graphs that a device runs on state: rows by their numbers, and zeros. Written as the bytes of ONNX itself.

onnxruntime has no call that copies a row on a device, and the package that writes graphs is not on devices.
"""

from collections.abc import Iterable, Sequence

from fatdeploy.spec import TensorSpec

# Of onnx.proto: how numpy's types are counted there.
ELEMENTS = {"float32": 1, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
WIDTHS = {"float32": 4, "int64": 8, "bool": 1, "float16": 2, "bfloat16": 2}
IR_VERSION, OPSET = 10, 21
ROWS = "chosen"  # rows before are called otherwise, and may be more or fewer
_TENSOR = 4  # the kind of an attribute that is one


def gathered_name(name: str) -> str:
    """Return what a tensor's chosen rows are called in ``row_graph``."""
    return f"{name}/{ROWS}"


def shape_name(name: str) -> str:
    """Return what the wanted shape of a tensor is called in ``zero_graph``."""
    return f"{name}/shape"


def row_graph(tensors: Sequence[TensorSpec]) -> bytes:
    """Return a graph that gives of each tensor the rows whose numbers it reads."""
    nodes = [_node("Gather", [one.name, ROWS], gathered_name(one.name)) for one in tensors]
    inputs = [_value(ROWS, "int64", (ROWS,)), *(_value(one.name, one.dtype, one.shape) for one in tensors)]
    outputs = [_value(gathered_name(one.name), one.dtype, (ROWS, *one.shape[1:])) for one in tensors]
    return _model(nodes, inputs, outputs)


def zero_graph(tensors: Sequence[TensorSpec]) -> bytes:
    """Return a graph that makes each tensor of zeros, in the shape that it reads."""
    nodes = [_node("ConstantOfShape", [shape_name(one.name)], one.name, _zero(one.dtype)) for one in tensors]
    inputs = [_value(shape_name(one.name), "int64", (len(one.shape),)) for one in tensors]
    return _model(nodes, inputs, [_value(one.name, one.dtype, one.shape) for one in tensors])


def _model(nodes: Iterable[bytes], inputs: Iterable[bytes], outputs: Iterable[bytes]) -> bytes:
    graph = _parts(1, nodes) + _part(2, b"rows") + _parts(11, inputs) + _parts(12, outputs)
    return _number(1, IR_VERSION) + _part(7, graph) + _part(8, _number(2, OPSET))


def _node(op: str, inputs: Sequence[str], output: str, attribute: bytes = b"") -> bytes:
    named = _parts(1, (name.encode() for name in inputs)) + _part(2, output.encode())
    return named + _part(3, output.encode()) + _part(4, op.encode()) + (_part(5, attribute) if attribute else b"")


def _value(name: str, dtype: str, shape: Sequence[int | str]) -> bytes:
    axes = (_number(1, axis) if isinstance(axis, int) else _part(2, axis.encode()) for axis in shape)
    return _part(1, name.encode()) + _part(2, _part(1, _number(1, ELEMENTS[dtype]) + _part(2, _parts(1, axes))))


def _zero(dtype: str) -> bytes:
    tensor = _number(1, 1) + _number(2, ELEMENTS[dtype]) + _part(9, bytes(WIDTHS[dtype]))
    return _part(1, b"value") + _part(5, tensor) + _number(20, _TENSOR)


def _parts(field: int, parts: Iterable[bytes]) -> bytes:
    return b"".join(_part(field, part) for part in parts)


def _part(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
