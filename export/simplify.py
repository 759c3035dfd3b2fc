"""Simplify a graph with onnxsim, and refuse the result unless it is valid and computes the same numbers."""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxsim
from numpy.typing import NDArray

from fatdeploy.errors import ExportFailed
from fatdeploy.export.trace import graphs_of, stripped
from fatdeploy.runtimes.ort_sessions import onnxruntime_module

# MatMul + Add over three axes would become Reshape, Gemm, Reshape: slower in onnxruntime, and weights no longer alike.
SKIPPED = ["fuse_matmul_add_bias_into_gemm_batched"]

Arrays = dict[str, NDArray[Any]]


def op_histogram(graph: onnx.ModelProto) -> dict[str, int]:
    """Return how often each op stands in a graph and its branches, by name."""
    counts = Counter(node.op_type for part in graphs_of(graph.graph) for node in part.node)
    return dict(sorted(counts.items()))


def simplified(graph: onnx.ModelProto, samples: list[Arrays]) -> onnx.ModelProto:
    """Return a simpler graph with the same inputs, outputs and, on every sample, numbers."""
    simpler, sure = onnxsim.simplify(graph, skipped_optimizers=SKIPPED, include_subgraph=True, certify=False)
    if not sure:
        raise ExportFailed("onnxsim could not check its own result")
    for kind in ("input", "output"):
        before, after = ([one.name for one in getattr(model.graph, kind)] for model in (graph, simpler))
        if before != after:
            raise ExportFailed(f"simplification changed the {kind}s from {before} to {after}")
        # onnxsim's own shape inference must not replace the contract's axes.
        del getattr(simpler.graph, kind)[:]
        getattr(simpler.graph, kind).extend(getattr(graph.graph, kind))
    simpler = stripped(simpler)
    onnx.checker.check_model(simpler, full_check=True)
    _compare(graph, simpler, samples)
    return simpler


def _compare(graph: onnx.ModelProto, simpler: onnx.ModelProto, samples: list[Arrays]) -> None:
    names = [one.name for one in graph.graph.output]
    before, after = _session(graph), _session(simpler)
    for sample in samples:
        pairs = zip(names, before.run(None, sample), after.run(None, sample), strict=True)
        for name, expected, found in pairs:
            bound = 1e-5 * max(1.0, float(np.abs(expected).max(initial=0)))
            if expected.shape != found.shape or not np.allclose(found, expected, rtol=0, atol=bound):
                sizes = {key: value.shape for key, value in sample.items()}
                raise ExportFailed(f"simplification changed the output {name} on inputs of shapes {sizes}")


def _session(graph: onnx.ModelProto) -> Any:
    onnxruntime = onnxruntime_module()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
