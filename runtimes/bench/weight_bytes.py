"""Counts the bytes of weights that a decoder step reads, from a dozen protobuf fields of the graph file."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fatdeploy.errors import BundleError

# Field numbers of onnx.proto, which never change: ModelProto, GraphProto, NodeProto, AttributeProto, TensorProto.
_GRAPH = 7
_NODE, _INITIALIZER = 1, 5
_INPUT, _OP, _ATTRIBUTE = 1, 4, 5
_SUBGRAPH, _SUBGRAPHS = 6, 11
_NAME, _RAW, _EXTERNAL = 8, 9, 13
_KEY, _VALUE = 1, 2
# These read one row of their first input per token, not all of it.
_LOOKUPS = ("Gather", "GatherBlockQuantized")


@dataclass
class Weights:
    """The tensors of a graph and its branches by name, and the names that some op reads as a whole."""

    tensors: dict[str, tuple[object, int]] = field(default_factory=dict)  # place in a file, bytes
    whole: set[str] = field(default_factory=set)

    @property
    def bytes_read(self) -> int:
        """The bytes of all tensors that are read as a whole; tensors in the same place count once."""
        places = dict(place for name, place in self.tensors.items() if name in self.whole)
        return sum(places.values())


def bytes_a_step_reads(path: Path) -> int:
    """Return the bytes of weights that a graph reads in one run, without embeddings that it looks up."""
    weights = Weights()
    try:
        for number, graph in _fields(memoryview(path.read_bytes())):
            if number == _GRAPH:
                _read_graph(graph, weights)
    except (ValueError, IndexError, TypeError) as error:
        raise BundleError(f"cannot read {path}: {error}; export the bundle again") from error
    return weights.bytes_read


def _read_graph(graph: memoryview, weights: Weights) -> None:
    for number, value in _fields(graph):
        if number == _NODE:
            _read_node(value, weights)
        elif number == _INITIALIZER:
            _read_tensor(value, weights)


def _read_node(node: memoryview, weights: Weights) -> None:
    fields = list(_fields(node))
    inputs = [_text(value) for number, value in fields if number == _INPUT]
    op = next((_text(value) for number, value in fields if number == _OP), "")
    weights.whole.update(inputs[1:] if op in _LOOKUPS else inputs)
    for number, attribute in fields:
        if number == _ATTRIBUTE:
            for inner, value in _fields(attribute):
                if inner in (_SUBGRAPH, _SUBGRAPHS):
                    _read_graph(value, weights)


def _read_tensor(tensor: memoryview, weights: Weights) -> None:
    fields = list(_fields(tensor))
    name = next(_text(value) for number, value in fields if number == _NAME)
    entries = (dict(_fields(value)) for number, value in fields if number == _EXTERNAL)
    external = {_text(entry[_KEY]): _text(entry[_VALUE]) for entry in entries}
    inside = sum(len(value) for number, value in fields if number == _RAW)
    # Several tensors may share one place in the weights file.
    place = (external.get("offset", "0"), external.get("location")) if external else name
    weights.tensors[name] = place, int(external.get("length", inside))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field that has a length; skip numeric fields."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        match key & 7:
            case 0:
                _, at = _number(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _number(data, at)
                if at + size > len(data):
                    raise ValueError("it ends inside a field")
                yield key >> 3, data[at : at + size]
                at += size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"a field has the unknown kind {kind}")


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return a variable-length number and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def _text(data: memoryview) -> str:
    return bytes(data).decode()
