"""Where a miss begins: the stage of the export, then the first tensor that leaves the tolerance."""

import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from torch import Tensor, nn

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.export.graph_files import read_structure, write_structure
from fatdeploy.export.models.eager import EagerEngine, EagerState
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.package import write_graphs
from fatdeploy.export.tracing.scaled_queries import scaled_queries
from fatdeploy.manifest import DECODER, ENCODER, WEIGHTS
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module, opened_session
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.proof.forced import call_count, first_tokens, step_logits
from fatdeploy.runtimes.proof.lockstep import NOISE, Comparison, compared
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import TensorSpec

Arrays = dict[str, NDArray[Any]]
Graphs = dict[str, Path]


@dataclass(frozen=True)
class Stage:
    """A form that the graphs took on their way; only the last is rewritten by onnxruntime as it likes."""

    name: str
    bundle: Bundle
    optimised: bool


def where_it_begins(model: Exportable, bundle: Bundle, traced: Graphs, graphs: Graphs, probe: Probe) -> str:
    """Return in which stage, step, row and tensor a bundle begins to differ from its model on a probe."""
    with tempfile.TemporaryDirectory(dir=bundle.path.parent) as folder:
        stages = [
            _stage("traced", Path(folder) / "traced", bundle, traced),
            _stage("simplified", Path(folder) / "simplified", bundle, graphs),
            _engine_stage(Path(folder) / "engine", bundle),
        ]
        before: Stage | None = None
        for stage in stages:
            comparison = _compared(stage, model, probe)
            place = comparison.first_miss
            if place is not None:
                route = f"{before.name if before else 'torch'} → {stage.name}"
                tensor = _tensor(model, before, stage, probe, place[1])
                return f"it begins at {route}, {comparison.described(*place)}; {tensor}"
            before = stage
    return (
        "no stage shows it when the model reads the same batch step by step: either two runs of the same graph differ, "
        "or the model itself depends on what else it reads"
    )


def _stage(name: str, folder: Path, bundle: Bundle, graphs: Graphs) -> Stage:
    folder.mkdir()
    write_graphs(graphs, folder)
    return Stage(name, write_manifest(folder, bundle.manifest), optimised=False)


def _engine_stage(folder: Path, bundle: Bundle) -> Stage:
    folder.mkdir()
    for name in (ENCODER, DECODER, WEIGHTS):
        shutil.copyfile(bundle.path / name, folder / name)
    return Stage("engine", write_manifest(folder, bundle.manifest), optimised=True)


def _compared(stage: Stage, model: Exportable, probe: Probe) -> Comparison:
    with closing(OrtEngine(stage.bundle, OrtOptions(optimised=stage.optimised))) as engine:
        return compared(engine, EagerEngine(model), probe.source, probe.mask, probe.tokens.shape[1])


def _tensor(model: Exportable, before: Stage | None, stage: Stage, probe: Probe, last_step: int) -> str:
    """Return which tensor is the first to differ when each step gets the reference's state."""
    with scaled_queries(model.inner):  # as it was traced
        for index, (part, feeds, outputs) in enumerate(_calls(model, stage.bundle, probe, last_step)):
            expected = _by_value(stage, part, outputs) if before is None else _values(before, part, feeds)
            tensor = _first_difference(stage, part, feeds, expected)
            if tensor is not None:
                when = "the encoder" if part == ENCODER else f"step {index - 1}"
                return f"the first tensor to differ is {tensor}, in {when}"
    return "no tensor differs when every step gets the reference's state: it is lost between the steps"


def _first_difference(stage: Stage, part: str, feeds: Arrays, expected: Arrays) -> str | None:
    """Return the first value of a graph that differs from the expected one, and by how much."""
    modules = _modules_of_values(stage, part)
    names = [name for name in modules if name in expected]
    values = _values(stage, part, feeds, names)
    distances = {name: _distance(expected[name], values[name]) for name in names}
    first = next((name for name in names if not distances[name] <= NOISE), None)
    if first is None and stage.optimised:
        # To look at a value keeps onnxruntime from fusing it away: what looking at all of them hides, looking at one
        # at a time may show. Halving finds where a difference begins that does not go away again.
        def alone(name: str) -> float:
            distances[name] = _distance(expected[name], _values(stage, part, feeds, [name])[name])
            return distances[name]

        place = bisect_left(names, NOISE, key=alone)
        first = names[place] if place < len(names) else None
    if first is None:
        return None
    return f"{first} of {modules[first] or 'the graph'} (by {distances[first]:.1e} of its largest value)"


def _distance(expected: NDArray[Any], actual: NDArray[Any]) -> float:
    """Return the largest difference relative to the largest value (at least 1); infinite for another shape."""
    if expected.shape != actual.shape:
        return np.inf
    if not expected.size:
        return 0.0
    wide = expected.astype(np.float64)
    return float(np.abs(wide - actual.astype(np.float64)).max() / max(1.0, np.abs(wide).max()))


def _modules_of_values(stage: Stage, part: str) -> dict[str, str]:
    """Return the values of a graph in the order they are computed, with the module each comes from."""
    graph = read_structure(stage.bundle.path / part).graph
    return {output: node.name.partition("/")[0] for node in graph.node for output in node.output if output}


def _by_value(stage: Stage, part: str, outputs: Arrays) -> Arrays:
    """Return what modules computed under the names that their last values have in a graph."""
    modules = _modules_of_values(stage, part)
    last = {module: name for name, module in modules.items()}
    return {last.get(place, place): array for place, array in outputs.items() if place in last or place in modules}


def _values(stage: Stage, part: str, feeds: Arrays, names: list[str] | None = None) -> Arrays:
    """Return values of a graph (default: all) as onnxruntime computes them for one call."""
    model = read_structure(stage.bundle.path / part)
    names = list(_modules_of_values(stage, part)) if names is None else names
    if not names:  # onnxruntime would take an empty list for all outputs
        return {}
    there = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    # Beside the weights, which it refers to.
    path = stage.bundle.path / f"looked-at-{part}"
    write_structure(model, path)
    session = opened_session(onnxruntime_module(), path, optimised=stage.optimised)
    return dict(zip(names, session.run(names, feeds), strict=True))


def _calls(model: Exportable, bundle: Bundle, probe: Probe, last_step: int) -> Iterator[tuple[str, Arrays, Arrays]]:
    """Yield the graph, its inputs, and what modules and outputs compute, for each call of the reference on a probe."""
    engine, spec = EagerEngine(model), bundle.spec
    with _recorded(model.inner) as outputs:
        state = engine.encode(probe.source, probe.mask, Capacity(1, spec.max_target))
        sources = _named(spec.encoder_inputs(), [probe.source, probe.mask])
        memory = _named(spec.encoder_outputs(), [tensor.numpy() for tensor in state.memory.tensors])
        yield ENCODER, sources, {**outputs, **memory}
        tokens = first_tokens(spec, *probe.tokens.shape)
        for _ in range(call_count(spec, last_step + 1)):
            position = np.full(spec.position.sized({"rows": len(tokens)}), state.position)
            step = _named((spec.tokens, spec.position, spec.want), [tokens, position, np.array(int(Want.LOGITS))])
            inputs = {**sources, **memory, **step, **_named(spec.past, _copies(state))}
            outputs.clear()
            logits = step_logits(engine, tokens, state)
            tensors = spec.decoder_inputs(branches=bundle.manifest.branches)
            feeds = {tensor.name: inputs[tensor.name] for tensor in tensors}
            yield DECODER, feeds, {**outputs, **_named((spec.logits, *spec.present), [logits, *_copies(state)])}
            tokens = logits.argmax(-1)


def _named(specs: tuple[TensorSpec, ...], arrays: list[NDArray[Any]]) -> Arrays:
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


def _copies(state: EagerState) -> list[NDArray[Any]]:
    # Caches are written in place by the next step.
    return [tensor.numpy().copy() for tensor in state.tensors]


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Arrays]:
    """Yield the last output of each module that has no parts of its own, by its path."""
    outputs: Arrays = {}

    def recorder(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[path] = output.numpy().copy()

        return record

    leaves = [(path, module) for path, module in model.named_modules() if path and not list(module.children())]
    handles = [module.register_forward_hook(recorder(path)) for path, module in leaves]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
