"""From a reference model to its two ONNX graphs, through torch's dynamo exporter and one of the two dialects."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from fatdeploy.bundle import Dialect
from fatdeploy.errors import ExportFailed, in_one_line
from fatdeploy.export.dialects import OPSET, OrtSeams, StandardSeams
from fatdeploy.export.graphs import DecoderGraph, EncoderGraph
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.seams import Seams, speaking
from fatdeploy.spec import TensorSpec

DIALECTS: dict[Dialect, type[Seams]] = {"ort": OrtSeams, "standard": StandardSeams}
# Sizes of the example that is traced. All differ, so that torch never takes two axes for one; none is 1, which it would
# take for a constant; rows are a multiple of the batch.
EXAMPLE = {"batch": 2, "rows": 6, "source": 5, "step": 4, "capacity": 7}


def check_expressible(model: ReferenceModel, dialect: Dialect) -> None:
    """Raise ExportFailed, before anything is traced, for choices that a dialect has no words for."""
    if dialect == "ort" and model.config.hybrid and model.config.copy:
        raise ExportFailed(
            "the ort dialect cannot skip a cross-attention whose weights the copy mechanism reads (hybrid with copy): "
            "pass --target onnx, or use a model without one of the two"
        )


def traced_encoder(model: ReferenceModel, dialect: Dialect) -> onnx.ModelProto:
    """Return the encoder graph: source in, cross keys and values out."""
    spec = model.spec
    return _traced(EncoderGraph(model), spec.encoder_inputs(), spec.encoder_outputs(), dialect, model)


def traced_decoder(model: ReferenceModel, dialect: Dialect) -> onnx.ModelProto:
    """Return the decoder graph of one call; with the ``ort`` dialect it computes only what is wanted."""
    branches = dialect == "ort"
    inputs = model.spec.decoder_inputs(branches=branches)
    return _traced(DecoderGraph(model, branches=branches), inputs, model.spec.decoder_outputs(), dialect, model)


def _traced(
    graph: nn.Module,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    dialect: Dialect,
    model: ReferenceModel,
) -> onnx.ModelProto:
    # In `standard` the capacity is a number: TensorRT updates caches of a fixed length only.
    fixed = {"capacity": model.config.max_target} if dialect == "standard" else {}
    sizes = {**{axis: min(size, _longest(axis, model)) for axis, size in EXAMPLE.items()}, **fixed}
    dynamic = [
        {i: Dim.AUTO for i, axis in enumerate(one.shape) if axis in EXAMPLE and axis not in fixed} for one in inputs
    ]
    with torch.no_grad(), speaking(DIALECTS[dialect]()), _quiet(), _explained():
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
    proto = stripped(program.model_proto)
    _name_axes(proto, inputs, outputs, fixed)
    return proto


def _longest(axis: str, model: ReferenceModel) -> int:
    longest = {"source": model.config.max_source, "step": model.config.max_target, "capacity": model.config.max_target}
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


def stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without what is not its graph: torch writes this machine's paths into every node."""
    clean = onnx.ModelProto()
    clean.CopyFrom(proto)
    del clean.metadata_props[:]
    for graph in graphs_of(clean.graph):
        graph.ClearField("doc_string")
        # Shapes inside the graph are torch's beliefs; some of ours are told to it and not true (an empty branch).
        del graph.value_info[:], graph.metadata_props[:]
        for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
            part.ClearField("doc_string")
            del part.metadata_props[:]
    return clean


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs of its branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_of(attribute.g)


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
