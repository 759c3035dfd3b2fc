"""Simplify a graph with onnxsim, and refuse the result unless it is valid and computes the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxsim
from numpy.typing import NDArray

from fatdeploy.errors import ExportFailed
from fatdeploy.export.graph_files import move_weights_out, read_structure, strip, write_structure
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module, opened_session

# MatMul + Add over three axes would become Reshape, Gemm, Reshape: slower in onnxruntime, and weights no longer alike.
SKIPPED = ["fuse_matmul_add_bias_into_gemm_batched"]

Arrays = dict[str, NDArray[Any]]


def simplified(graph: Path, result: Path, samples: list[Arrays]) -> Path:
    """Write a simpler graph with the same inputs, outputs and, on every sample, numbers; return its path."""
    _, sure = onnxsim.simplify(
        str(graph),
        output_path=str(result),
        external_data_threshold="1KB",
        skipped_optimizers=SKIPPED,
        include_subgraph=True,
        certify=False,
    )
    if not sure:
        raise ExportFailed("onnxsim could not check its own result")
    _keep_contract(graph, result)
    onnx.checker.check_model(result, full_check=True)
    _compare(graph, result, samples)
    return result


def _keep_contract(graph: Path, result: Path) -> None:
    """Give the result the graph's inputs and outputs: onnxsim's own shapes must not replace the contract's axes."""
    old, new = read_structure(graph), read_structure(result)
    for kind in ("input", "output"):
        before, after = ([one.name for one in getattr(model.graph, kind)] for model in (old, new))
        if before != after:
            raise ExportFailed(f"simplification changed the {kind}s from {before} to {after}")
        del getattr(new.graph, kind)[:]
        getattr(new.graph, kind).extend(getattr(old.graph, kind))
    strip(new)
    # onnxsim writes the weights of a small graph into it.
    move_weights_out(new, result)
    write_structure(new, result)


def _compare(graph: Path, result: Path, samples: list[Arrays]) -> None:
    names = [one.name for one in read_structure(graph).graph.output]
    before, after = _session(graph), _session(result)
    for sample in samples:
        pairs = zip(names, before.run(None, sample), after.run(None, sample), strict=True)
        for name, expected, found in pairs:
            bound = 1e-5 * max(1.0, float(np.abs(expected).max(initial=0)))
            if expected.shape != found.shape or not np.allclose(found, expected, rtol=0, atol=bound):
                sizes = {key: value.shape for key, value in sample.items()}
                raise ExportFailed(f"simplification changed the output {name} on inputs of shapes {sizes}")


def _session(graph: Path) -> Any:
    return opened_session(onnxruntime_module(), graph)
