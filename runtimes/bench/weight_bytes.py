"""How many bytes of weights a decoder step reads, from the graph's file alone: a dozen fields of its protobuf."""

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
# They read a row a token of their first input, not all of it.
_LOOKUPS = ("Gather", "GatherBlockQuantized")


@dataclass
class Weights:
    """What stands in a graph and its branches: tensors by name, and the names that some op reads as a whole."""

    tensors: dict[str, tuple[object, int]] = field(default_factory=dict)  # where it is stored, bytes
    whole: set[str] = field(default_factory=set)

    @property
    def bytes_read(self) -> int:
        """The bytes of all tensors that are read; those of one place once."""
        places = dict(place for name, place in self.tensors.items() if name in self.whole)
        return sum(places.values())


def bytes_a_step_reads(path: Path) -> int:
    """Return the bytes of the weights that a graph reads in one run, embeddings that are looked up left out."""
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
    found = list(_fields(node))
    inputs = [_text(value) for number, value in found if number == _INPUT]
    op = next((_text(value) for number, value in found if number == _OP), "")
    weights.whole.update(inputs[1:] if op in _LOOKUPS else inputs)
    for number, attribute in found:
        if number == _ATTRIBUTE:
            for inner, value in _fields(attribute):
                if inner in (_SUBGRAPH, _SUBGRAPHS):
                    _read_graph(value, weights)


def _read_tensor(tensor: memoryview, weights: Weights) -> None:
    found = list(_fields(tensor))
    name = next(_text(value) for number, value in found if number == _NAME)
    entries = (dict(_fields(value)) for number, value in found if number == _EXTERNAL)
    external = {_text(entry[_KEY]): _text(entry[_VALUE]) for entry in entries}
    inside = sum(len(value) for number, value in found if number == _RAW)
    # Graphs may name one place of the weights' file several times.
    place = (external.get("offset", "0"), external.get("location")) if external else name
    weights.tensors[name] = place, int(external.get("length", inside))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field that has a length; numbers are passed over."""
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
                    raise ValueError("it ends inside of a field")
                yield key >> 3, data[at : at + size]
                at += size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"a field is of the unknown kind {kind}")


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return a variable-length number, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def _text(data: memoryview) -> str:
    return bytes(data).decode()
