"""From a reference model to its two ONNX graphs, through torch's dynamo exporter and one of the two dialects."""

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
from fatdeploy.export.tracing.dialects import OPSET, OrtSeams, StandardSeams
from fatdeploy.export.tracing.modules import DecoderGraph, EncoderGraph
from fatdeploy.spec import ModelSpec, TensorSpec
from fatdeploy.targets import Dialect

DIALECTS: dict[Dialect, type[Seams]] = {"ort": OrtSeams, "standard": StandardSeams}
SCOPES = "pkg.torch.onnx.name_scopes"
# Where the graphs' modules hold the model.
INNER = "model.inner."
# Sizes of the example that is traced. All differ, so that torch never takes two axes for one; none is 1, which it would
# take for a constant; rows are a multiple of the batch.
EXAMPLE = {"batch": 2, "rows": 6, "source": 5, "step": 4, "capacity": 7}


def traced_encoder(model: Exportable, dialect: Dialect, path: Path) -> Path:
    """Write the encoder graph: source in, what the decoder needs of it out."""
    spec = model.spec
    return _traced(EncoderGraph(model), spec.encoder_inputs(), spec.encoder_outputs(), dialect, path)


def traced_decoder(model: Exportable, dialect: Dialect, path: Path, seams: Seams | None = None) -> Path:
    """Write the decoder graph of one call; with the ``ort`` dialect it computes only what is wanted.

    ``seams`` are the dialect's unless a target speaks it in its own way.
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
        {i: Dim.AUTO for i, axis in enumerate(one.shape) if axis in EXAMPLE and axis not in fixed} for one in inputs
    ]
    with torch.no_grad(), speaking(seams or DIALECTS[dialect]()), _quiet(), _explained(), _uncollected():
        program = torch.onnx.export(
            graph,
            ([_example(one, sizes) for one in inputs],),
            dynamo=True,
            opset_version=OPSET,
            input_names=[one.name for one in inputs],
            output_names=[one.name for one in outputs],
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


def _example(one: TensorSpec, sizes: dict[str, int]) -> Tensor:
    return torch.ones(one.sized(sizes), dtype=getattr(torch, one.dtype))


@contextmanager
def _explained() -> Iterator[None]:
    """Turn torch's pages about a graph it could not trace into our error; the pages are its cause."""
    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ExportFailed(f"torch could not trace the model ({reason}); run with -vv for its report") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's advice to authors of exporters from users of this one; its errors still come."""
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
    """Keep Python's garbage collector away: torch makes millions of objects, nearly all of which are freed without it.

    It takes a sixth of the time of a trace.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _name_nodes(graph: onnx.GraphProto, around: str = "") -> None:
    """Call every node ``module/value``: a profile, a message and a table of weights then speak of the model's parts."""
    for node in graph.node:
        # torch forgets the modules of what stands in a branch.
        module = _module_of(node) or around
        node.name = f"{module}/{node.output[0]}"
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _name_nodes(attribute.g, module)


def _module_of(node: onnx.NodeProto) -> str:
    """Return the path of the module that a node comes from; torch tells it for all but sizes."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    modules = [scope for scope in ast.literal_eval(scopes)[:-1] if scope.startswith(INNER)]
    return str(modules[-1]).removeprefix(INNER) if modules else ""


def _name_axes(
    proto: onnx.ModelProto, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], fixed: dict[str, int]
) -> None:
    """Give axes the names of the contract; one that torch made a constant is an error."""
    reasons: list[str] = []
    for found, expected in zip((*proto.graph.input, *proto.graph.output), (*inputs, *outputs), strict=True):
        reasons += _named(found, expected, fixed, is_input=found in proto.graph.input)
    if reasons:
        raise ExportFailed(in_one_line("the traced graph is not what the contract says", reasons))


def _named(found: Any, expected: TensorSpec, fixed: dict[str, int], *, is_input: bool) -> list[str]:
    dims = found.type.tensor_type.shape.dim
    if found.name != expected.name or len(dims) != len(expected.shape):
        return [f"{expected.name} has {len(expected.shape)} axes, the graph has {found.name} with {len(dims)}"]
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
