"""Where a miss begins: the stage of the export, then the first tensor that leaves the tolerance."""

import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Say in which stage, step, row and tensor a bundle begins to differ from its model on a probe."""
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
    engine = OrtEngine(stage.bundle, OrtOptions(optimised=stage.optimised))
    try:
        return compared(engine, EagerEngine(model), probe.source, probe.mask, probe.tokens.shape[1])
    finally:
        engine.close()


def _tensor(model: Exportable, before: Stage | None, stage: Stage, probe: Probe, last_step: int) -> str:
    """Say which tensor is the first to differ when each step is given what the reference gives it."""
    with scaled_queries(model.inner):  # as it was traced
        for index, (part, feeds, said) in enumerate(_calls(model, stage.bundle, probe, last_step)):
            expected = _by_value(stage, part, said) if before is None else _values(before, part, feeds)
            found = _first_difference(stage, part, feeds, expected)
            if found is not None:
                when = "the encoder" if part == ENCODER else f"step {index - 1}"
                return f"the first tensor to differ is {found}, in {when}"
    return "no tensor differs when every step is given the reference's state: it is lost between the steps"


def _first_difference(stage: Stage, part: str, feeds: Arrays, expected: Arrays) -> str | None:
    """Return the first value of a graph that differs from what was expected of it, and by how much."""
    modules = _modules_of_values(stage, part)
    names = [name for name in modules if name in expected]
    found = _values(stage, part, feeds, names)
    distances = {name: _distance(expected[name], found[name]) for name in names}
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


def _distance(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Return the largest difference as a part of the largest value, but at least of 1; infinite for another shape."""
    if expected.shape != found.shape:
        return np.inf
    if not expected.size:
        return 0.0
    one, other = expected.astype(np.float64), found.astype(np.float64)
    return float(np.abs(one - other).max() / max(1.0, np.abs(one).max()))


def _modules_of_values(stage: Stage, part: str) -> dict[str, str]:
    """Return the values of a graph in the order they are computed, with the module each comes from."""
    graph = read_structure(stage.bundle.path / part).graph
    return {output: node.name.partition("/")[0] for node in graph.node for output in node.output if output}


def _by_value(stage: Stage, part: str, said: Arrays) -> Arrays:
    """Return what modules said under the names that their last values have in a graph."""
    modules = _modules_of_values(stage, part)
    last = {module: name for name, module in modules.items()}
    return {last.get(place, place): array for place, array in said.items() if place in last or place in modules}


def _values(stage: Stage, part: str, feeds: Arrays, names: list[str] | None = None) -> Arrays:
    """Return values of a graph, all of them unless said, as onnxruntime computes them for one call."""
    model = read_structure(stage.bundle.path / part)
    names = list(_modules_of_values(stage, part)) if names is None else names
    if not names:  # onnxruntime would take an empty list for all outputs
        return {}
    there = {one.name for one in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    # Beside the weights, which it refers to.
    path = stage.bundle.path / f"looked-at-{part}"
    write_structure(model, path)
    session = opened_session(onnxruntime_module(), path, optimised=stage.optimised)
    return dict(zip(names, session.run(names, feeds), strict=True))


def _calls(model: Exportable, bundle: Bundle, probe: Probe, last_step: int) -> Iterator[tuple[str, Arrays, Arrays]]:
    """Yield the graph, its inputs, and what modules and outputs say, for each call of the reference on a probe."""
    engine, spec = EagerEngine(model), model.spec
    parallel, branches = spec.decoding == "parallel", bundle.manifest.branches
    with _listening(model.inner) as heard:
        state = engine.encode(probe.source, probe.mask, Capacity(1, spec.max_target))
        sources = _named(spec.encoder_inputs(), [probe.source, probe.mask])
        memory = _named(spec.encoder_outputs(), [tensor.numpy() for tensor in state.memory.tensors])
        yield ENCODER, sources, {**heard, **memory}
        tokens = np.full((len(probe.source), probe.tokens.shape[1] if parallel else 1), spec.bos_id)
        for _ in range(1 if parallel else last_step + 1):
            asked = _named(
                (spec.tokens, spec.position, spec.want), [tokens, np.array(state.position), np.array(int(Want.LOGITS))]
            )
            given = {**sources, **memory, **asked, **_named(spec.past, _copies(state))}
            heard.clear()
            logits = engine.step(tokens, state, Want.LOGITS).logits
            assert logits is not None  # noqa: S101 - they were wanted
            feeds = {one.name: given[one.name] for one in spec.decoder_inputs(branches=branches)}
            yield DECODER, feeds, {**heard, **_named((spec.logits, *spec.present), [logits, *_copies(state)])}
            tokens = logits.argmax(-1)


def _named(specs: tuple[TensorSpec, ...], arrays: list[NDArray[Any]]) -> Arrays:
    return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}


def _copies(state: EagerState) -> list[NDArray[Any]]:
    # Caches are written in place by the next step.
    return [tensor.numpy().copy() for tensor in state.tensors]


@contextmanager
def _listening(model: nn.Module) -> Iterator[Arrays]:
    """Yield what each module without parts of its own said last, by its path."""
    heard: Arrays = {}

    def listener(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def listen(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                heard[path] = output.numpy().copy()

        return listen

    leaves = [(path, one) for path, one in model.named_modules() if path and not list(one.children())]
    handles = [one.register_forward_hook(listener(path)) for path, one in leaves]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()
