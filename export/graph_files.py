"""ONNX graphs on disk: a graph's structure is read and written here, its weights stay in separate files.

protobuf cannot write a message of more than 2 GB, so a graph and its weights are never in memory together.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import numpy_helper

from fatdeploy.errors import ExportFailed

LARGEST_STRUCTURE = 2**31 - 1
# Smaller tensors (shapes, axes, scales) stay in the graph, where optimisers can read them.
INLINE_BELOW = 1024


class Place(NamedTuple):
    """Where a tensor's bytes are: a file beside the graph, and the range in it."""

    location: str
    offset: int
    length: int


def read_structure(path: Path) -> onnx.ModelProto:
    """Return a graph without its weights."""
    return onnx.load(path, load_external_data=False)


def write_structure(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph; equal graphs have equal bytes."""
    size = model.ByteSize()
    if size > LARGEST_STRUCTURE:
        raise ExportFailed(f"the structure of {path.name} has {size} bytes, more than {LARGEST_STRUCTURE}")
    path.write_bytes(model.SerializeToString(deterministic=True))


def tensor_data(tensor: onnx.TensorProto, folder: Path) -> bytes:
    """Return the raw bytes of a tensor, wherever they are stored."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        data: bytes = numpy_helper.to_array(tensor).tobytes()
        return data
    place = place_of(tensor)
    with (folder / place.location).open("rb") as file:
        file.seek(place.offset)
        return bytes(file.read(place.length))


def place_of(tensor: onnx.TensorProto) -> Place:
    """Return where a tensor's data is stored beside the graph."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Place(entries["location"], int(entries.get("offset", 0)), int(entries["length"]))


def hold(tensor: onnx.TensorProto, data: bytes) -> None:
    """Store a tensor's data in the graph."""
    _empty(tensor)
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.raw_data = data


def point(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Make a tensor refer to its data in a file beside the graph."""
    _empty(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _empty(tensor: onnx.TensorProto) -> None:
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(field)


def move_weights_out(model: onnx.ModelProto, path: Path) -> None:
    """Move the weights that are stored in a graph to a file beside ``path``, where the graph will be written."""
    beside = path.with_suffix(".weights")
    with beside.open("wb") as file:
        for tensor in initializers_of(model.graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                continue
            data = tensor_data(tensor, path.parent)
            if len(data) >= INLINE_BELOW:
                point(tensor, beside.name, file.tell(), len(data))
                file.write(data)


def write_weights(graph: onnx.GraphProto, path: Path, data_of: Callable[[onnx.TensorProto], bytes]) -> None:
    """Write the weights that ``data_of`` returns to a file beside ``path``; small ones stay in the graph.

    Only one weight at a time is in memory. ``data_of`` may also change the type of its tensor.
    """
    beside = path.with_suffix(".weights")
    with beside.open("wb") as file:
        for tensor in initializers_of(graph):
            data = data_of(tensor)
            if len(data) < INLINE_BELOW:
                hold(tensor, data)
            else:
                point(tensor, beside.name, file.tell(), len(data))
                file.write(data)


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs of its branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_of(attribute.g)


def initializers_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a graph and of its branches."""
    for part in graphs_of(graph):
        yield from part.initializer


def op_histogram(path: Path) -> dict[str, int]:
    """Return how often each op occurs in a graph and its branches, sorted by name."""
    counts = Counter(node.op_type for part in graphs_of(read_structure(path).graph) for node in part.node)
    return dict(sorted(counts.items()))


def strip(model: onnx.ModelProto) -> None:
    """Remove everything but the graph: torch writes this machine's paths into every node."""
    del model.metadata_props[:]
    for graph in graphs_of(model.graph):
        graph.ClearField("doc_string")
        # Shapes inside the graph are torch's assumptions; some that we declare are not true (an empty branch).
        del graph.value_info[:], graph.metadata_props[:]
        for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
            part.ClearField("doc_string")
            del part.metadata_props[:]
