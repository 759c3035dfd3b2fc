"""A graph of one product that shows whether a CPU adds the products of a bundle's integers without overflow."""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from fatdeploy.export.graph_files import write_structure
from fatdeploy.export.integers import WeightBits
from fatdeploy.export.matrices import tensor_from_array
from fatdeploy.spec import SATURATION_INPUT, SATURATION_OUTPUT

# Rows and columns of the matrix: enough for the widest kernel's blocks, and a part of one.
SHAPE = (72, 36)


def write_saturation_probe(path: Path, bits: WeightBits) -> None:
    """Write a product with weights at both ends of their range: nothing overflows earlier."""
    limit = 2 ** (bits - 1) - 1
    weights = np.full(SHAPE, limit, np.int8)
    weights[:, ::2] = -limit
    node = helper.make_node("MatMulInteger", [SATURATION_INPUT, "weights"], [SATURATION_OUTPUT], name="saturation")
    graph = helper.make_graph(
        [node],
        "saturation",
        [helper.make_tensor_value_info(SATURATION_INPUT, onnx.TensorProto.UINT8, ["rows", SHAPE[0]])],
        [helper.make_tensor_value_info(SATURATION_OUTPUT, onnx.TensorProto.INT32, ["rows", SHAPE[1]])],
        [tensor_from_array("weights", weights)],
    )
    # The newest form of files is often newer than the onnxruntime that is to read it.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model.ClearField("producer_name")
    write_structure(model, path)
