"""Both graphs in one folder: structure in the .onnx files, all weights in one file, each stored once."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import numpy_helper

from fatdeploy.bundle import WEIGHTS
from fatdeploy.export.trace import graphs_of

# Smaller tensors (shapes, axes, scales) stay in the graph, where optimisers look at them.
INLINE_BELOW = 1024
# Vector loads want 64 bytes; a page is not needed, onnxruntime aligns its mapping itself.
ALIGNMENT = 64


def write_graphs(graphs: Mapping[str, onnx.ModelProto], folder: Path) -> None:
    """Write graphs by file name; equal tensors of all of them, the tied embedding above all, become one."""
    offsets: dict[tuple[str, int], int] = {}
    with (folder / WEIGHTS).open("wb") as weights:
        for name, graph in graphs.items():
            outside = onnx.ModelProto()
            outside.CopyFrom(graph)
            for part in graphs_of(outside.graph):
                for tensor in part.initializer:
                    data = numpy_helper.to_array(tensor).tobytes()
                    if len(data) < INLINE_BELOW:
                        continue
                    key = hashlib.sha256(data).hexdigest(), len(data)
                    if key not in offsets:
                        weights.write(b"\0" * (-weights.tell() % ALIGNMENT))
                        offsets[key] = weights.tell()
                        weights.write(data)
                    _point(tensor, offsets[key], len(data))
            (folder / name).write_bytes(outside.SerializeToString(deterministic=True))


def _point(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    """Let a tensor read its data from the weights file."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", WEIGHTS), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
