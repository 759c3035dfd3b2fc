"""A graph of one product that shows whether a CPU sums a bundle's integer products without overflow."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from fatdeploy.errors import BackendUnavailable
from fatdeploy.export.graph_files import write_structure
from fatdeploy.export.quantize.integers import WeightBits
from fatdeploy.export.quantize.matrices import tensor_from_array
from fatdeploy.machine import this_machine
from fatdeploy.manifest import SATURATION
from fatdeploy.runtimes.engines.ort.saturation import exact_sum, sums_of
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module
from fatdeploy.runtimes.proof.cpu_checks import cpu_class
from fatdeploy.spec import SATURATION_INPUT, SATURATION_OUTPUT
from fatdeploy.targets import CpuClass

# Usable bits of a signed 8-bit weight: where two products are added in 16 bits, all eight overflow.
WEIGHT_BITS: dict[CpuClass, WeightBits] = {"any": 7, "x86-avx2": 7, "x86-vnni": 8, "arm64": 8}
# Rows and columns of the matrix: enough for the blocks of the widest kernel, and part of another block.
SHAPE = (72, 36)


def write_saturation_probe(path: Path, bits: WeightBits) -> None:
    """Write a product with weights at both ends of their range: no others overflow sooner."""
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
    # The default version of the file format is often newer than what onnxruntime reads.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model.ClearField("producer_name")
    write_structure(model, path)


def check_cpu(wanted: CpuClass) -> None:
    """Raise if this CPU, which runs the gate, overflows with the weights of a class of CPUs."""
    bits = WEIGHT_BITS[wanted]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / SATURATION
        write_saturation_probe(path, bits)
        sums = sums_of(onnxruntime_module(), path)
    if all((np.abs(results) == exact_sum(width, bits)).all() for width, results in sums):
        return
    here = cpu_class(this_machine()) or "of unknown class"
    raise BackendUnavailable(
        f"--cpu {wanted} needs {bits}-bit weights, and this CPU ({here}) overflows when it adds their products, so the "
        f"gate cannot judge them here: export on a CPU of the class {wanted}, or use --cpu any, "
        "which is right everywhere"
    )
