"""What activations look like: the fp32 graphs read calibration sources, and the inputs of each matrix are kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from fatdeploy.export.graph_files import read_structure, write_structure
from fatdeploy.export.quantize.integers import Floats
from fatdeploy.export.quantize.matrices import products_of, tensor_from_array
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.decoding.sources import padded
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module, opened_session
from fatdeploy.runtimes.engines.protocol import Want
from fatdeploy.spec import ModelSpec, TensorSpec, Tokens

Arrays = dict[str, NDArray[Any]]
BATCH = 8
# Rows kept per activation, drawn evenly from all calls.
MOST_ROWS = 4096


@dataclass(frozen=True)
class CalibrationRow:
    """A source and the tokens that a model answered it with."""

    source: Tokens
    target: Tokens


@dataclass
class Activation:
    """Rows [n, K] of one activation, and the smallest and largest value of all calls."""

    rows: list[Floats] = field(default_factory=list)
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: Floats, most: int, draw: np.random.Generator) -> None:
        """Add the values [..., K] of another call."""
        rows = values.reshape(-1, values.shape[-1])
        if not rows.size:  # a branch that was not taken
            return
        self.low, self.high = min(self.low, float(rows.min())), max(self.high, float(rows.max()))
        kept = rows if len(rows) <= most else rows[draw.choice(len(rows), most, replace=False)]
        # The extreme rows are always kept: a range chosen without them may clip what matters.
        extremes = rows[[int(rows.max(-1).argmax()), int(rows.min(-1).argmin())]]
        self.rows.append(np.concatenate([kept, extremes]))

    @property
    def values(self) -> Floats:
        """All rows kept."""
        return np.concatenate(self.rows) if self.rows else np.zeros((0, 1), np.float32)


def activations_of(
    graphs: dict[str, Path], spec: ModelSpec, rows: Sequence[CalibrationRow], *, branches: bool = True
) -> dict[str, dict[str, Activation]]:
    """Return the activations of each graph's products while the model reads sources and their targets."""
    draw = np.random.default_rng(0)
    activations: dict[str, dict[str, Activation]] = {}
    sessions = {}
    for part, path in graphs.items():
        names = sorted({product.activation for product in products_of(read_structure(path).graph)})
        sessions[part] = _ExposedGraph(path, names)
        activations[part] = {name: Activation() for name in names}
    for feeds in _calls(sessions[ENCODER], spec, rows, branches=branches):
        # A call's share of the kept rows is its share of the sources.
        most = max(1, MOST_ROWS * len(feeds[ENCODER][spec.encoder_inputs()[0].name]) // len(rows))
        for part, inputs in feeds.items():
            for name, values in sessions[part].values(inputs).items():
                activations[part][name].add(values, most, draw)
    return activations


def unpadded_batches(rows: Sequence[CalibrationRow]) -> Iterator[list[CalibrationRow]]:
    """Yield sources of one length with targets of one length, so that none is padded.

    Padding changes no result, but its activations would count towards the ranges.
    """
    for _, group in groupby(sorted(rows, key=_lengths), key=_lengths):
        same_lengths = list(group)
        for start in range(0, len(same_lengths), BATCH):
            yield same_lengths[start : start + BATCH]


def _lengths(row: CalibrationRow) -> tuple[int, int]:
    return len(row.source), len(row.target)


def _calls(
    encoder: "_ExposedGraph", spec: ModelSpec, rows: Sequence[CalibrationRow], *, branches: bool
) -> Iterator[dict[str, Arrays]]:
    """Yield the inputs of both graphs for one batch at a time; a whole target is read in one call."""
    for batch in unpadded_batches(rows):
        source, mask = padded([row.source for row in batch], spec)
        inputs = _named(spec.encoder_inputs(), [source, mask])
        memory = encoder.outputs(inputs, [tensor.name for tensor in spec.encoder_outputs()])
        tokens = decoder_tokens(batch, spec)
        sizes = {"rows": len(batch), "source": source.shape[1], "capacity": tokens.shape[1]}
        sizes |= spec.fixed_axes(branches=branches)
        position = np.zeros(spec.position.sized(sizes), np.int64)
        feeds = {**inputs, **memory, **_named((spec.tokens, spec.position), [tokens, position])}
        feeds[spec.want.name] = np.array(int(Want.LOGITS))
        feeds |= {
            past.name: np.zeros(past.sized(sizes), past.dtype) if start is None else start
            for past, start in zip(spec.past, spec.started_by(memory), strict=True)
        }
        yield {
            ENCODER: inputs,
            DECODER: {tensor.name: feeds[tensor.name] for tensor in spec.decoder_inputs(branches=branches)},
        }


def decoder_tokens(batch: Sequence[CalibrationRow], spec: ModelSpec) -> Tokens:
    """Return what the decoder reads, for targets of one length: BOS and the target, or BOS at every position."""
    targets = np.stack([row.target for row in batch])
    if spec.decoding == "parallel":
        return np.full((len(batch), max(1, targets.shape[1])), spec.bos_id)
    return np.pad(targets, ((0, 0), (1, 0)), constant_values=spec.bos_id)[:, : spec.max_target]


def _named(specs: Sequence[TensorSpec], arrays: Sequence[NDArray[Any]]) -> Arrays:
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


class _ExposedGraph:
    """A graph with some inner values, also those of branches, as extra outputs."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        model = read_structure(path)
        inputs = {tensor.name for tensor in model.graph.input}
        self._inputs = [name for name in names if name in inputs]
        self._outputs = exposed(model.graph, [name for name in names if name not in inputs])
        ort = onnxruntime_module()
        # Beside the weights file that the graph refers to.
        with NamedTemporaryFile(dir=path.parent, suffix=path.suffix) as file:
            write_structure(model, Path(file.name))
            self._session = opened_session(ort, Path(file.name))

    def values(self, feeds: Arrays) -> Arrays:
        """Return the exposed values; those of branches that did not run are empty."""
        results = self._session.run(list(self._outputs.values()), feeds) if self._outputs else []
        inputs = {name: feeds[name] for name in self._inputs}
        return {**inputs, **dict(zip(self._outputs, results, strict=True))}

    def outputs(self, feeds: Arrays, names: Sequence[str]) -> Arrays:
        """Return outputs that the graph has of its own."""
        return dict(zip(names, self._session.run(list(names), feeds), strict=True))


def exposed(graph: onnx.GraphProto, names: Sequence[str]) -> dict[str, str]:
    """Make values of a graph and its branches outputs; return the name of each value's output."""
    shown, present = _brought_out(graph, set(names)), {output.name for output in graph.output}
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown.values() if name not in present)
    return shown


def _brought_out(graph: onnx.GraphProto, names: set[str]) -> dict[str, str]:
    """Return the name under which a graph can read each value of its own or of its branches."""
    shown: dict[str, str] = {}
    for node in graph.node:
        shown |= {name: name for name in names.intersection(node.output)}
        branches = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
        inner = [_brought_out(branch, names) for branch in branches]
        for name in sorted({name for values in inner for name in values}):
            shown[name] = f"{node.output[0]}/{name}"
            for branch, values in zip(branches, inner, strict=True):
                _add_output(branch, values.get(name), shown[name])
            node.output.append(shown[name])
    return shown


def _add_output(branch: onnx.GraphProto, value: str | None, name: str) -> None:
    """Make a branch return one more value, or an empty one if the value belongs to another branch."""
    if value is None:
        value = f"{name}/nothing"
        branch.initializer.append(tensor_from_array(value, np.zeros((0, 1), np.float32)))
    # A branch must not return a constant, nor one name for two outputs.
    output = f"{name}/{len(branch.output)}"
    branch.node.append(onnx.helper.make_node("Identity", [value], [output]))
    branch.output.append(onnx.ValueInfoProto(name=output))
