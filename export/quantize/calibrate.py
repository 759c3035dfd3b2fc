"""What activations look like: the fp32 graphs read calibration sources, and what each matrix multiplies is kept."""

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
# Rows of each activation that are kept; drawn from all calls alike.
MOST_ROWS = 4096


@dataclass(frozen=True)
class CalibrationRow:
    """A source and the target that a model gave it, EOS left out."""

    source: Tokens
    target: Tokens


@dataclass
class Seen:
    """Rows [n, K] of one activation, and the ends of all that there were."""

    rows: list[Floats] = field(default_factory=list)
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: Floats, most: int, draw: np.random.Generator) -> None:
        """Take in the values [..., K] of another call."""
        rows = values.reshape(-1, values.shape[-1])
        if not rows.size:  # a branch that was not taken
            return
        self.low, self.high = min(self.low, float(rows.min())), max(self.high, float(rows.max()))
        kept = rows if len(rows) <= most else rows[draw.choice(len(rows), most, replace=False)]
        # The extreme rows are kept whatever is drawn: a range that is chosen without them may cut what matters.
        extremes = rows[[int(rows.max(-1).argmax()), int(rows.min(-1).argmin())]]
        self.rows.append(np.concatenate([kept, extremes]))

    @property
    def values(self) -> Floats:
        """All rows that were kept."""
        return np.concatenate(self.rows) if self.rows else np.zeros((0, 1), np.float32)


def activations_of(
    graphs: dict[str, Path], spec: ModelSpec, said: Sequence[CalibrationRow], *, branches: bool = True
) -> dict[str, dict[str, Seen]]:
    """Return what the products of each graph multiply while the model reads sources and their targets."""
    draw = np.random.default_rng(0)
    seen: dict[str, dict[str, Seen]] = {}
    sessions = {}
    for part, path in graphs.items():
        names = sorted({one.activation for one in products_of(read_structure(path).graph)})
        sessions[part] = _Exposed(path, names)
        seen[part] = {name: Seen() for name in names}
    for feeds in _calls(sessions[ENCODER], spec, said, branches=branches):
        # A call's share of the rows is that of its sources.
        most = max(1, MOST_ROWS * len(feeds[ENCODER][spec.encoder_inputs()[0].name]) // len(said))
        for part, inputs in feeds.items():
            for name, values in sessions[part].values(inputs).items():
                seen[part][name].add(values, most, draw)
    return seen


def unpadded_batches(said: Sequence[CalibrationRow]) -> Iterator[list[CalibrationRow]]:
    """Yield sources of one length with targets of one length, so that none is padded.

    What stands in padding changes no answer, but its activations would be ranges like all others.
    """
    for _, alike in groupby(sorted(said, key=_lengths), key=_lengths):
        same = list(alike)
        for start in range(0, len(same), BATCH):
            yield same[start : start + BATCH]


def _lengths(one: CalibrationRow) -> tuple[int, int]:
    return len(one.source), len(one.target)


def _calls(
    encoder: "_Exposed", spec: ModelSpec, said: Sequence[CalibrationRow], *, branches: bool
) -> Iterator[dict[str, Arrays]]:
    """Yield the inputs of both graphs for some sources at a time; a whole target is read in one call."""
    for part in unpadded_batches(said):
        source, mask = padded([one.source for one in part], spec)
        inputs = _named(spec.encoder_inputs(), [source, mask])
        memory = encoder.outputs(inputs, [one.name for one in spec.encoder_outputs()])
        tokens = _read(part, spec)
        given = {**inputs, **memory, **_named((spec.tokens, spec.position), [tokens, np.array(0)])}
        given[spec.want.name] = np.array(int(Want.LOGITS))
        sizes = {"rows": len(part), "capacity": tokens.shape[1], **spec.fixed_axes(branches=branches)}
        given |= {past.name: np.zeros(past.sized(sizes), past.dtype) for past in spec.past}
        yield {
            ENCODER: inputs,
            DECODER: {one.name: given[one.name] for one in spec.decoder_inputs(branches=branches)},
        }


def _read(said: Sequence[CalibrationRow], spec: ModelSpec) -> Tokens:
    """Return what the decoder reads: BOS and the target, or as many BOS as the longest target has."""
    longest = max(len(one.target) for one in said)
    if spec.decoding == "parallel":
        return np.full((len(said), max(1, longest)), spec.bos_id)
    tokens = np.full((len(said), min(longest + 1, spec.max_target)), spec.pad_id)
    tokens[:, 0] = spec.bos_id
    for row, one in zip(tokens, said, strict=True):
        row[1 : 1 + len(one.target)] = one.target[: len(row) - 1]
    return tokens


def _named(specs: Sequence[TensorSpec], arrays: Sequence[NDArray[Any]]) -> Arrays:
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


class _Exposed:
    """A graph some of whose values, those of branches too, are outputs."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        model = read_structure(path)
        inputs = {one.name for one in model.graph.input}
        self._given = [name for name in names if name in inputs]
        self._outputs = exposed(model.graph, [name for name in names if name not in inputs])
        ort = onnxruntime_module()
        # Beside the weights, which it refers to.
        with NamedTemporaryFile(dir=path.parent, suffix=path.suffix) as looked_at:
            write_structure(model, Path(looked_at.name))
            self._session = opened_session(ort, Path(looked_at.name))

    def values(self, feeds: Arrays) -> Arrays:
        """Return the values that were asked for; empty ones of branches that were not taken."""
        found = self._session.run(list(self._outputs.values()), feeds) if self._outputs else []
        given = {name: feeds[name] for name in self._given}
        return {**given, **dict(zip(self._outputs, found, strict=True))}

    def outputs(self, feeds: Arrays, names: Sequence[str]) -> Arrays:
        """Return outputs that the graph has anyway."""
        return dict(zip(names, self._session.run(list(names), feeds), strict=True))


def exposed(graph: onnx.GraphProto, names: Sequence[str]) -> dict[str, str]:
    """Make values of a graph and its branches outputs; return the name of the output that shows each."""
    shown, there = _brought_out(graph, set(names)), {one.name for one in graph.output}
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown.values() if name not in there)
    return shown


def _brought_out(graph: onnx.GraphProto, names: set[str]) -> dict[str, str]:
    """Return under which name of a graph each value of it, or of its branches, can be read."""
    shown: dict[str, str] = {}
    for node in graph.node:
        shown |= {name: name for name in names.intersection(node.output)}
        branches = [one.g for one in node.attribute if one.type == onnx.AttributeProto.GRAPH]
        found = [_brought_out(branch, names) for branch in branches]
        for name in sorted({name for one in found for name in one}):
            shown[name] = f"{node.output[0]}/{name}"
            for branch, one in zip(branches, found, strict=True):
                _add_output(branch, one.get(name), shown[name])
            node.output.append(shown[name])
    return shown


def _add_output(branch: onnx.GraphProto, value: str | None, name: str) -> None:
    """Let a branch return one more value, or nothing in its place if the value is another branch's."""
    if value is None:
        value = f"{name}/nothing"
        branch.initializer.append(tensor_from_array(value, np.zeros((0, 1), np.float32)))
    # Branches may not have an output that is a constant, or one name for two outputs.
    output = f"{name}/{len(branch.output)}"
    branch.node.append(onnx.helper.make_node("Identity", [value], [output]))
    branch.output.append(onnx.ValueInfoProto(name=output))
