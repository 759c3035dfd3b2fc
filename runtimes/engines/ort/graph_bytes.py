"""Tiny ONNX graphs as raw bytes: the onnx package is not installed on devices."""

from collections.abc import Iterable, Sequence

from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES

IR_VERSION, OPSET = 10, 21
CONTRIB = "com.microsoft"  # onnxruntime's own ops


def model_bytes(nodes: Iterable[bytes], inputs: Iterable[bytes], outputs: Iterable[bytes]) -> bytes:
    """Return a model of these nodes, in the order of computation."""
    graph = parts(1, nodes) + part(2, b"rows") + parts(11, inputs) + parts(12, outputs)
    opsets = number(2, OPSET), part(1, CONTRIB.encode()) + number(2, 1)
    return number(1, IR_VERSION) + part(7, graph) + parts(8, opsets)


def node_bytes(op: str, inputs: Sequence[str], output: str, attribute: bytes = b"", domain: str = "") -> bytes:
    """Return a node with one output and at most one attribute; an input that is left out is empty."""
    names = parts(1, (name.encode() for name in inputs)) + part(2, output.encode())
    named = names + part(3, output.encode()) + part(4, op.encode())
    return named + (part(5, attribute) if attribute else b"") + (part(7, domain.encode()) if domain else b"")


def value_bytes(name: str, dtype: str, shape: Sequence[int | str]) -> bytes:
    """Return an input or output of a graph; axes without a fixed size have names."""
    axes = (number(1, axis) if isinstance(axis, int) else part(2, axis.encode()) for axis in shape)
    tensor_type = number(1, ELEMENT_TYPES[dtype].onnx) + part(2, parts(1, axes))
    return part(1, name.encode()) + part(2, part(1, tensor_type))


def parts(field: int, contents: Iterable[bytes]) -> bytes:
    """Return a repeated field."""
    return b"".join(part(field, content) for content in contents)


def part(field: int, content: bytes) -> bytes:
    """Return a field that contains bytes."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def number(field: int, value: int) -> bytes:
    """Return a field that is a number."""
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*content, value])
