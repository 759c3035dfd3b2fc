"""Contexts of a model's plans with every tensor in its place: the encoder's, and a step's for each role of state."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from fatdeploy.runtimes.engines.protocol import Want
from fatdeploy.runtimes.engines.trt.calls import PlanCall, Results
from fatdeploy.runtimes.engines.trt.device import Context
from fatdeploy.runtimes.engines.trt.layout import HostArrays, Slab, n_bytes
from fatdeploy.runtimes.engines.trt.memory import DecodeMemory
from fatdeploy.runtimes.engines.trt.plans import Opened
from fatdeploy.spec import ModelSpec, TensorSpec


def bound_encoder(held: DecodeMemory, opened: Opened, profile: int, capture: bool) -> PlanCall:
    """Return the encoder's call into the memory of a decode."""
    sizes = held.shape.sizes(held.spec)
    host = HostArrays(held.device, opened.inputs, sizes)
    context = _context(opened, profile, held.sources, sizes)
    return PlanCall(held.device, [context], host, held.sources[opened.inputs[0].name], capture=capture)


def bound_step(
    held: DecodeMemory, opened: Opened, profile: int, sizes: Mapping[str, int], *, capture: bool
) -> PlanCall:
    """Return the decoder's call for some sizes, on the state of a decode and results of its own."""
    spec = held.spec
    fed = fed_inputs(spec)
    host = HostArrays(held.device, fed, sizes)
    with ExitStack() as closing:
        # What is fed stands first, as on the host: one copy brings it.
        slab = Slab(held.device, {one.name: n_bytes(one, sizes) for one in (*fed, *spec.results)})
        closing.callback(slab.close)
        own = {name: slab.place(name) for name in slab.offsets}
        contexts: list[Context] = []
        for role in range(held.n_sets):
            past, present = held.places(role)
            state = {one.name: place for one, place in zip(spec.past, past, strict=True)}
            state |= {one.name: place for one, place in zip(spec.present, present, strict=True)}
            contexts.append(_context(opened, profile, {**held.sources, **own, **state}, sizes))
            closing.callback(contexts[-1].close)
        closing.pop_all()
    call = PlanCall(held.device, contexts, host, slab.address, capture=capture)
    call.closing.append(slab)
    call.n_bytes = slab.n_bytes
    call.places = own
    return call


def fed_inputs(spec: ModelSpec) -> Sequence[TensorSpec]:
    """Return what the decoder is told anew at every step."""
    inputs = spec.decoder_inputs(branches=False)
    return [one for one in (spec.position, spec.tokens) if one in inputs]


def results_of(call: PlanCall, spec: ModelSpec, want: Want, sizes: Mapping[str, int]) -> Results:
    """Return the host arrays of what is wanted of a step."""
    asked: dict[Want, Sequence[TensorSpec]] = {Want.HIDDEN: (), Want.LOGITS: (spec.logits,), Want.TOPK: spec.best}
    wanted = (*spec.hidden, *asked[want], *spec.attention)
    return call.results(want, [(one, call.places[one.name]) for one in wanted], sizes)


def _context(opened: Opened, profile: int, places: Mapping[str, int], sizes: Mapping[str, int]) -> Context:
    """Return a context whose inputs and outputs all have their place."""
    context = opened.plan.context(profile)
    try:
        for one in (*opened.inputs, *opened.outputs):
            context.bind(one.name, one.sized(sizes), places[one.name])
    except BaseException:
        context.close()
        raise
    return context
