"""Simplify a graph with onnxsim; the result must be valid and compute the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxsim
from numpy.typing import NDArray

from fatdeploy.errors import ExportFailed
from fatdeploy.export.graph_files import move_weights_out, read_structure, strip, write_structure
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module, opened_session

# MatMul + Add over three axes would become Reshape, Gemm, Reshape: slower in onnxruntime, and weights no longer equal.
SKIPPED = ["fuse_matmul_add_bias_into_gemm_batched"]

Arrays = dict[str, NDArray[Any]]


def simplified(graph: Path, result: Path, samples: list[Arrays]) -> Path:
    """Write a simpler graph with the same inputs and outputs, and equal results on every sample; return its path."""
    _, checked = onnxsim.simplify(
        str(graph),
        output_path=str(result),
        external_data_threshold="1KB",
        skipped_optimizers=SKIPPED,
        include_subgraph=True,
        certify=False,
    )
    if not checked:
        raise ExportFailed("onnxsim could not check its own result")
    _keep_contract(graph, result)
    onnx.checker.check_model(result, full_check=True)
    _compare(graph, result, samples)
    return result


def _keep_contract(graph: Path, result: Path) -> None:
    """Give the result the graph's inputs and outputs: onnxsim's own shapes must not replace the contract's axes."""
    old, new = read_structure(graph), read_structure(result)
    for kind in ("input", "output"):
        before, after = ([value.name for value in getattr(model.graph, kind)] for model in (old, new))
        if before != after:
            raise ExportFailed(f"simplification changed the {kind}s from {before} to {after}")
        del getattr(new.graph, kind)[:]
        getattr(new.graph, kind).extend(getattr(old.graph, kind))
    strip(new)
    # onnxsim writes the weights of a small graph into it.
    move_weights_out(new, result)
    write_structure(new, result)


def _compare(graph: Path, result: Path, samples: list[Arrays]) -> None:
    names = [output.name for output in read_structure(graph).graph.output]
    original, simpler = _session(graph), _session(result)
    for sample in samples:
        outputs = zip(names, original.run(None, sample), simpler.run(None, sample), strict=True)
        for name, expected, actual in outputs:
            bound = 1e-5 * max(1.0, float(np.abs(expected).max(initial=0)))
            if expected.shape != actual.shape or not np.allclose(actual, expected, rtol=0, atol=bound):
                shapes = {key: value.shape for key, value in sample.items()}
                raise ExportFailed(f"simplification changed the output {name} on inputs of shapes {shapes}")


def _session(graph: Path) -> Any:
    return opened_session(onnxruntime_module(), graph)
