"""From a model to its two ONNX graphs, through torch's dynamo exporter and a dialect."""

import ast
import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor
from torch.export import Dim

from fatdeploy.errors import ExportFailed, in_one_line
from fatdeploy.export.graph_files import read_structure, strip, write_structure
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.reference.seams import Seams, speaking
from fatdeploy.export.tracing.dialect_base import OPSET
from fatdeploy.export.tracing.dialect_ort import OrtSeams
from fatdeploy.export.tracing.dialect_standard import StandardSeams
from fatdeploy.export.tracing.modules import DecoderGraph, EncoderGraph
from fatdeploy.spec import ModelSpec, TensorSpec
from fatdeploy.targets import Dialect

DIALECTS: dict[Dialect, type[Seams]] = {"ort": OrtSeams, "standard": StandardSeams}
SCOPES = "pkg.torch.onnx.name_scopes"
# The path to the model inside ``EncoderGraph`` and ``DecoderGraph``.
INNER = "model.inner."
# Sizes of the example that is traced. All differ, so that torch never treats two axes as one; none is 1, which it would
# treat as a constant; rows are a multiple of the batch.
EXAMPLE = {"batch": 2, "rows": 6, "source": 5, "step": 4, "capacity": 7}


def traced_encoder(model: Exportable, dialect: Dialect, path: Path) -> Path:
    """Write the encoder graph: the source in, what the decoder needs from it out."""
    spec = model.spec
    return _traced(EncoderGraph(model), spec.encoder_inputs(), spec.encoder_outputs(), dialect, path)


def traced_decoder(model: Exportable, dialect: Dialect, path: Path, seams: Seams | None = None) -> Path:
    """Write the decoder graph of one call; in the ``ort`` dialect it computes only what is wanted.

    ``seams`` defaults to those of the dialect; a target may have its own.
    """
    branches = dialect == "ort"
    inputs = model.spec.decoder_inputs(branches=branches)
    graph = DecoderGraph(model, branches=branches)
    return _traced(graph, inputs, model.spec.decoder_outputs(), dialect, path, seams)


def _traced(
    graph: EncoderGraph | DecoderGraph,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    dialect: Dialect,
    path: Path,
    seams: Seams | None = None,
) -> Path:
    spec = graph.model.spec
    fixed = spec.fixed_axes(branches=dialect == "ort")
    sizes = {**{axis: min(size, _longest(axis, spec)) for axis, size in EXAMPLE.items()}, **fixed}
    dynamic = [
        {i: Dim.AUTO for i, axis in enumerate(tensor.shape) if axis in EXAMPLE and axis not in fixed}
        for tensor in inputs
    ]
    with torch.no_grad(), speaking(seams or DIALECTS[dialect]()), _quiet(), _explained(), _uncollected():
        program = torch.onnx.export(
            graph,
            ([_example(tensor, sizes) for tensor in inputs],),
            dynamo=True,
            opset_version=OPSET,
            input_names=[tensor.name for tensor in inputs],
            output_names=[tensor.name for tensor in outputs],
            dynamic_shapes=(dynamic,),
            verbose=False,
        )
    if program is None:
        raise ExportFailed("torch returned no graph")
    program.save(path, external_data=True)
    traced = read_structure(path)
    _name_nodes(traced.graph)
    strip(traced)
    _name_axes(traced, inputs, outputs, fixed)
    write_structure(traced, path)
    return path


def _longest(axis: str, spec: ModelSpec) -> int:
    longest = {"source": spec.max_source, "step": spec.max_target, "capacity": spec.max_target}
    return longest.get(axis, EXAMPLE[axis])


def _example(tensor: TensorSpec, sizes: dict[str, int]) -> Tensor:
    return torch.ones(tensor.sized(sizes), dtype=getattr(torch, tensor.dtype))


@contextmanager
def _explained() -> Iterator[None]:
    """Turn torch's long report about a graph it could not trace into one line; the report is its cause."""
    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ExportFailed(f"torch could not trace the model ({reason}); run with -vv for its report") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's advice to authors of exporters, but not its errors."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn Python's garbage collector off, which takes a sixth of the time of a trace.

    torch creates millions of objects, and nearly all are freed without it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _name_nodes(graph: onnx.GraphProto, outer_module: str = "") -> None:
    """Name every node ``module/value``, so that profiles, messages and tables of weights name parts of the model."""
    for node in graph.node:
        # torch does not record modules inside a branch.
        module = _module_of(node) or outer_module
        node.name = f"{module}/{node.output[0]}"
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _name_nodes(attribute.g, module)


def _module_of(node: onnx.NodeProto) -> str:
    """Return the path of the module that a node comes from; torch records it for all nodes but those of sizes."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    modules = [scope for scope in ast.literal_eval(scopes)[:-1] if scope.startswith(INNER)]
    return str(modules[-1]).removeprefix(INNER) if modules else ""


def _name_axes(
    proto: onnx.ModelProto, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], fixed: dict[str, int]
) -> None:
    """Give axes the names of the contract; an axis that torch made constant is an error."""
    reasons: list[str] = []
    for value, expected in zip((*proto.graph.input, *proto.graph.output), (*inputs, *outputs), strict=True):
        reasons += _name_axes_of(value, expected, fixed, is_input=value in proto.graph.input)
    if reasons:
        raise ExportFailed(in_one_line("the traced graph does not fit the contract", reasons))


def _name_axes_of(value: Any, expected: TensorSpec, fixed: dict[str, int], *, is_input: bool) -> list[str]:
    dims = value.type.tensor_type.shape.dim
    if value.name != expected.name or len(dims) != len(expected.shape):
        return [f"{expected.name} has {len(expected.shape)} axes, the graph has {value.name} with {len(dims)}"]
    reasons = []
    for place, (dim, axis) in enumerate(zip(dims, expected.shape, strict=True)):
        size = fixed.get(axis, axis) if isinstance(axis, str) else axis
        if is_input and isinstance(size, str) == dim.HasField("dim_value"):
            reasons.append(f"axis {place} of {expected.name} is {dim.dim_value or dim.dim_param}, expected {size}")
        dim.Clear()
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size
    return reasons
