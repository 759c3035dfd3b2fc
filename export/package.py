"""Both graphs in one folder: structure in the .onnx files, all weights in one file, each stored once."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray

from fatdeploy.export.graph_files import (
    INLINE_BELOW,
    graphs_of,
    hold,
    initializers_of,
    place_of,
    point,
    read_structure,
    tensor_data,
    write_structure,
)
from fatdeploy.export.quantize.blocks.split import SplitBlocks
from fatdeploy.export.quantize.integers import Blocks, Columns, WeightBits
from fatdeploy.export.quantize.recipe import BESIDE_INTEGERS, MatrixRecipe
from fatdeploy.export.tracing.trace import INNER
from fatdeploy.manifest import DECODER, WEIGHTS, OutputMatrix, WeightGroup, WideRows

# For vector loads. A page is not needed: onnxruntime aligns its mapping itself.
ALIGNMENT = 64
# Weights per element of a type: 4-bit weights are stored two per byte.
PARAMETERS: dict[int, int] = {
    **dict.fromkeys((onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16), 1),
    onnx.TensorProto.INT8: 1,
    onnx.TensorProto.UINT8: 2,
}


def write_graphs(graphs: Mapping[str, Path], folder: Path) -> dict[str, WeightGroup]:
    """Write graphs by file name; equal tensors of all graphs, such as the tied embedding, are stored once.

    Returns how much of the weights belongs to which part of the model.
    """
    offsets: dict[tuple[str, int], int] = {}
    groups: dict[str, WeightGroup] = {}
    counted: set[tuple[str, int]] = set()  # not ``offsets``: a constant that is no weight may have the bytes of one
    with (folder / WEIGHTS).open("wb") as weights:
        for name, path in graphs.items():
            graph = read_structure(path)
            parts = _parts_of_tensors(graph.graph)
            for tensor in initializers_of(graph.graph):
                data = tensor_data(tensor, path.parent)
                key = hashlib.sha256(data).hexdigest(), len(data)
                if key not in counted and (n_parameters := _parameters_of(tensor)):
                    counted.add(key)
                    part = parts.get(tensor.name, "")
                    groups[part] = _grown(groups.get(part), n_parameters, len(data))
                if len(data) < INLINE_BELOW:
                    offsets[key] = -1
                    hold(tensor, data)
                    continue
                if key not in offsets:
                    offsets[key] = _appended(weights, data)
                point(tensor, WEIGHTS, offsets[key], len(data))
            write_structure(graph, folder / name)
    return dict(sorted(groups.items()))


def _parameters_of(tensor: onnx.TensorProto) -> int:
    """Return how many weights of the model a tensor contains; scales and zeros of integers do not count."""
    if not tensor.dims or tensor.name.endswith(BESIDE_INTEGERS):
        return 0
    return int(math.prod(tensor.dims)) * PARAMETERS.get(tensor.data_type, 0)


def placed_integers(matrix: NDArray[np.float32], recipe: MatrixRecipe, bits: WeightBits, folder: Path) -> OutputMatrix:
    """Return where the weights file has the output matrix [V, M] as integers; what no graph has is appended."""
    if recipe.form == "fp32":
        return placed_output_matrix(matrix, folder)
    stored = recipe.integers(np.ascontiguousarray(matrix.T), bits)
    smoothing = None if recipe.smoothing is None else _placed(recipe.smoothing, folder)
    if isinstance(stored, Columns):
        rows, scales = _placed(np.ascontiguousarray(stored.values.T), folder), _placed(stored.scales, folder)
        return OutputMatrix(rows, "int8", transposed=False, scales=scales, smoothing=smoothing)
    wide = None
    if isinstance(stored, SplitBlocks):
        wide, stored = _placed_wide(stored.wide, folder), stored.narrow
    return OutputMatrix(
        _placed(stored.values, folder),
        "int4" if stored.bits == 4 else "int8",
        transposed=False,
        scales=_placed(stored.scales, folder),
        zeros=None if stored.zeros is None else _placed(stored.zeros, folder),
        block_size=stored.size,
        smoothing=smoothing,
        wide=wide,
    )


def _placed_wide(blocks: Blocks, folder: Path) -> WideRows:
    return WideRows(len(blocks.scales), _placed(blocks.values, folder), _placed(blocks.scales, folder), blocks.size)


def _placed(array: NDArray[Any], folder: Path) -> int:
    """Return the offset of an array in the weights file; it is appended if no graph has it."""
    data = array.tobytes()
    for tensor in initializers_of(read_structure(folder / DECODER).graph):
        may_match = tensor.data_location == onnx.TensorProto.EXTERNAL and place_of(tensor).length == len(data)
        if may_match and tensor_data(tensor, folder) == data:
            return place_of(tensor).offset
    with (folder / WEIGHTS).open("ab") as weights:
        return _appended(weights, data)


def placed_output_matrix(matrix: NDArray[Any], folder: Path) -> OutputMatrix:
    """Return where the weights file has the output matrix [V, M], of any type; it is appended if no graph has it.

    It is recognised by its content: a graph may share it with an embedding, or read its transpose.
    """
    dtype: Any = matrix.dtype.name
    tensors = list(initializers_of(read_structure(folder / DECODER).graph))
    for transposed, form in enumerate((matrix, matrix.T)):
        for tensor in tensors:
            may_match = tensor.data_location == onnx.TensorProto.EXTERNAL and tuple(tensor.dims) == form.shape
            if may_match and tensor_data(tensor, folder) == form.tobytes():
                return OutputMatrix(place_of(tensor).offset, dtype, bool(transposed))
    with (folder / WEIGHTS).open("ab") as weights:
        return OutputMatrix(_appended(weights, matrix.tobytes()), dtype, transposed=False)


def with_bias(matrix: OutputMatrix, bias: NDArray[np.float32] | None, folder: Path) -> OutputMatrix:
    """Return the record of an output matrix together with where the weights file has its bias [V]."""
    return matrix if bias is None else replace(matrix, bias=_placed(bias, folder))


def _appended(weights: BinaryIO, data: bytes) -> int:
    """Append data to a file, aligned, and return its offset."""
    weights.write(b"\0" * (-weights.tell() % ALIGNMENT))
    offset = weights.tell()
    weights.write(data)
    return offset


def _grown(group: WeightGroup | None, parameters: int, size: int) -> WeightGroup:
    old = group or WeightGroup(0, 0, 0)
    return WeightGroup(old.tensors + 1, old.parameters + parameters, old.bytes + size)


def _parts_of_tensors(graph: onnx.GraphProto) -> dict[str, str]:
    """Return which part of the model reads each tensor; layers of one stack are one part, ``decoder.layers.*.ffn``."""
    parts: dict[str, str] = {}
    for node in (node for part in graphs_of(graph) for node in part.node):
        module = node.name.partition("/")[0]
        for name in node.input:
            # A node outside all modules, such as the output projection, is placed by the name of the tensor it reads.
            part = module or name.removeprefix(INNER).rpartition(".")[0]
            parts.setdefault(name, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", part))
    return parts
