"""Rows that are looked up in a matrix of integers: the ops of onnxruntime that replace a Gather."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from fatdeploy.export.quantize.blocks.split import SplitBlocks
from fatdeploy.export.quantize.integers import Blocks, Columns, Floats
from fatdeploy.export.quantize.recipe import Stored

CONTRIB = "com.microsoft"
# Adds a constant to a graph on first use, and returns its name.
AddConstant = Callable[[str, NDArray[Any]], str]


def row_nodes(
    constant: AddConstant, name: str, stored: Stored, node: onnx.NodeProto, smoothing: Floats | None
) -> list[onnx.NodeProto]:
    """Return the nodes that read the rows of a Gather from integers, divided by the matrix's factors if it has any."""
    ids, output = node.input[1], node.output[0]
    rows = output if smoothing is None else f"{output}/multiplied"
    if isinstance(stored, SplitBlocks):
        nodes = _of_parts(constant, name, stored, ids, rows)
    elif isinstance(stored, Blocks):
        nodes = _of_blocks(constant, name, stored, ids, rows)
    else:
        nodes = _of_columns(constant, name, stored, ids, rows)
    if smoothing is None:
        return nodes
    factors = constant(f"{name}/unsmoothed", (1 / smoothing).astype(np.float32))
    return [*nodes, helper.make_node("Mul", [rows, factors], [output])]


def rows_constant(constant: AddConstant, name: str, stored: Columns) -> str:
    """Return the name of the bytes of a matrix [K, N], stored as [N, K]."""
    return constant(f"{name}/rows", np.ascontiguousarray(stored.values.T))


def wide_name(name: str) -> str:
    """Return the name of the part of a split matrix that has 8 bits."""
    return f"{name}/wide"


def _of_parts(constant: AddConstant, name: str, stored: SplitBlocks, ids: str, output: str) -> list[onnx.NodeProto]:
    """Look every id up in both parts, with the nearest id that each of them has, and choose."""
    made = {step: f"{output}/{step}" for step in ("low", "above", "high", "wide", "narrow", "is_low", "is_wide")}
    first = constant(f"{name}/split", np.array(stored.n_wide))
    last = constant(f"{name}/last_wide", np.array(stored.n_wide - 1))
    return [
        helper.make_node("Min", [ids, last], [made["low"]]),
        helper.make_node("Max", [ids, first], [made["above"]]),
        helper.make_node("Sub", [made["above"], first], [made["high"]]),
        *_of_blocks(constant, wide_name(name), stored.wide, made["low"], made["wide"]),
        *_of_blocks(constant, name, stored.narrow, made["high"], made["narrow"]),
        helper.make_node("Less", [ids, first], [made["is_low"]]),
        helper.make_node("Unsqueeze", [made["is_low"], constant("last_axis", np.array([-1]))], [made["is_wide"]]),
        helper.make_node("Where", [made["is_wide"], made["wide"], made["narrow"]], [output]),
    ]


def _of_blocks(constant: AddConstant, name: str, stored: Blocks, ids: str, output: str) -> list[onnx.NodeProto]:
    # The same bytes as the product's, with two axes instead of three: the weights file holds them once.
    data = constant(f"{name}/rows", stored.values.reshape(len(stored.values), -1))
    inputs = [data, ids, constant(f"{name}/scales", stored.scales)]
    if stored.zeros is not None:
        inputs.append(constant(f"{name}/zeros", stored.zeros))
    filled = stored.n_rows % stored.size != 0
    gather = helper.make_node(
        "GatherBlockQuantized",
        inputs,
        [f"{output}/filled" if filled else output],
        domain=CONTRIB,
        bits=stored.bits,
        block_size=stored.size,
        gather_axis=0,
        quantize_axis=1,
    )
    return [gather, _cut(constant, gather.output[0], stored.n_rows, output)] if filled else [gather]


def _of_columns(constant: AddConstant, name: str, stored: Columns, ids: str, output: str) -> list[onnx.NodeProto]:
    scales = constant(f"{name}/row_scales", stored.scales[:, None])
    made = [f"{output}/{part}" for part in ("bytes", "numbers", "scale")]
    return [
        helper.make_node("Gather", [rows_constant(constant, name, stored), ids], made[:1]),
        helper.make_node("Cast", made[:1], made[1:2], to=onnx.TensorProto.FLOAT),
        helper.make_node("Gather", [scales, ids], made[2:]),
        helper.make_node("Mul", made[1:], [output]),
    ]


def _cut(constant: AddConstant, rows: str, width: int, output: str) -> onnx.NodeProto:
    """Cut off what fills the last block of rows: the op returns whole blocks."""
    ends = [("no_width", 0), (f"width/{width}", width), ("last_axis", -1)]
    return helper.make_node("Slice", [rows, *(constant(name, np.array([number])) for name, number in ends)], [output])
