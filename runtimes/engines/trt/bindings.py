"""Contexts of a model's plans with every tensor bound: one for the encoder, one for a step per role of the state."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from fatdeploy.runtimes.engines.protocol import Want
from fatdeploy.runtimes.engines.results import wanted_results
from fatdeploy.runtimes.engines.trt.calls import PlanCall, Results
from fatdeploy.runtimes.engines.trt.device import Context
from fatdeploy.runtimes.engines.trt.layout import HostArrays, Slab, n_bytes
from fatdeploy.runtimes.engines.trt.memory import DecodeMemory
from fatdeploy.runtimes.engines.trt.plans import OpenedPlan
from fatdeploy.spec import ModelSpec, TensorSpec


def bound_encoder(memory: DecodeMemory, opened: OpenedPlan, profile: int, capture: bool) -> PlanCall:
    """Return the encoder's call into the memory of a decode."""
    sizes = memory.shape.sizes(memory.spec)
    host = HostArrays(memory.device, opened.inputs, sizes)
    context = _context(opened, profile, {**memory.sources, **memory.starts}, sizes)
    return PlanCall(memory.device, [context], host, memory.sources[opened.inputs[0].name], capture=capture)


def bound_step(
    memory: DecodeMemory, opened: OpenedPlan, profile: int, sizes: Mapping[str, int], *, capture: bool
) -> PlanCall:
    """Return the decoder's call for these sizes, on the state of a decode; it has its own memory for results."""
    spec = memory.spec
    step_inputs = fed_inputs(spec)
    host = HostArrays(memory.device, step_inputs, sizes)
    with ExitStack() as closing:
        # Step inputs come first, in the same layout as on the host: one copy moves all of them.
        slab = Slab(memory.device, {tensor.name: n_bytes(tensor, sizes) for tensor in (*step_inputs, *spec.results)})
        closing.callback(slab.close)
        own_places = {name: slab.place(name) for name in slab.offsets}
        contexts: list[Context] = []
        for role in range(memory.n_sets):
            past, present = memory.places(role)
            state = {tensor.name: place for tensor, place in zip(spec.past, past, strict=True)}
            state |= {tensor.name: place for tensor, place in zip(spec.present, present, strict=True)}
            contexts.append(_context(opened, profile, {**memory.sources, **own_places, **state}, sizes))
            closing.callback(contexts[-1].close)
        closing.pop_all()
    call = PlanCall(memory.device, contexts, host, slab.address, capture=capture)
    call.closing.append(slab)
    call.n_bytes = slab.n_bytes
    call.places = own_places
    return call


def fed_inputs(spec: ModelSpec) -> Sequence[TensorSpec]:
    """Return the decoder inputs that change at every step."""
    inputs = spec.decoder_inputs(branches=False)
    return [tensor for tensor in (spec.position, spec.tokens) if tensor in inputs]


def results_of(call: PlanCall, spec: ModelSpec, want: Want, sizes: Mapping[str, int]) -> Results:
    """Return host arrays for the wanted results of a step."""
    wanted = [(tensor, call.places[tensor.name]) for tensor in wanted_results(spec, want)]
    return call.results(want, wanted, sizes)


def _context(opened: OpenedPlan, profile: int, places: Mapping[str, int], sizes: Mapping[str, int]) -> Context:
    """Return a context with all inputs and outputs bound."""
    context = opened.plan.context(profile)
    try:
        for tensor in (*opened.inputs, *opened.outputs):
            context.bind(tensor.name, tensor.sized(sizes), places[tensor.name])
    except BaseException:
        context.close()
        raise
    return context
