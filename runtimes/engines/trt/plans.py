"""The plans of a bundle: those that were built for this GPU and TensorRT, opened and compared with the contract."""

from contextlib import ExitStack
from dataclasses import dataclass

from fatdeploy.bundle import Bundle, graph_hash
from fatdeploy.errors import BackendUnavailable, BundleError, in_one_line
from fatdeploy.manifest import GRAPHS
from fatdeploy.plans import Part, PlanRecord, inputs_of, outputs_of, shapes_of
from fatdeploy.runtimes.engines.trt.device import Device, DevicePlan, GpuIdentity, PlanTensor
from fatdeploy.spec import ModelSpec, TensorSpec


@dataclass(frozen=True)
class Opened:
    """A plan that was loaded, and what it was built for."""

    plan: DevicePlan
    record: PlanRecord
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def opened_plans(device: Device, bundle: Bundle) -> dict[Part, Opened]:
    """Return both parts of a model on a device; what was built for another is refused with both named."""
    records = chosen_records(bundle, device.here)
    found: dict[Part, Opened] = {}
    with ExitStack() as closing:
        for part, record in records.items():
            plan = device.load(bundle.file(record.file), record)
            closing.callback(plan.close)
            found[part] = Opened(plan, record, inputs_of(bundle.spec, part), outputs_of(bundle.spec, part))
            check_plan(found[part], bundle.spec)
        closing.pop_all()
    return found


def chosen_records(bundle: Bundle, here: GpuIdentity) -> dict[Part, PlanRecord]:
    """Return the record of each part's plan that runs here."""
    chosen: dict[Part, PlanRecord] = {}
    reasons = []
    parts: tuple[Part, Part] = ("encoder", "decoder")
    for part in parts:
        records = [record for record in bundle.manifest.plans if record.part == part]
        fitting = [record for record in records if not _misfit(bundle, record, here)]
        if fitting:
            chosen[part] = fitting[-1]
            continue
        others = [f"{record.file} is for {_misfit(bundle, record, here)}" for record in records]
        reasons += others or [f"there is no plan of the {part}"]
    if reasons:
        raise BackendUnavailable(
            in_one_line(f"{bundle.path} has no plans for {_described(here)}", reasons)
            + f". Build them on this machine: fatdeploy build {bundle.path}"
        )
    return chosen


def _misfit(bundle: Bundle, record: PlanRecord, here: GpuIdentity) -> str:
    """Return what a plan was built for, as far as it is not what is here."""
    wrong = []
    # Engines alone, without the graphs, were built from what nobody can look at any more.
    has_graph = GRAPHS[record.part] in bundle.manifest.files
    if has_graph and record.graph_sha256 != graph_hash(bundle.manifest, record.part):
        wrong.append("another graph")
    if (record.flavour, record.version) != (here.flavour, here.version):
        wrong.append(f"{record.flavour} {record.version}")
    if here.compute_capability not in record.compute_capabilities:
        wrong.append(f"compute capability {' or '.join(record.compute_capabilities)}")
    return " and ".join(wrong)


def _described(here: GpuIdentity) -> str:
    return f"{here.flavour} {here.version} on {here.name} (compute capability {here.compute_capability})"


def check_plan(opened: Opened, spec: ModelSpec) -> None:
    """Raise, with every reason, unless a plan's tensors and profiles are those of the contract and of its record."""
    fixed = spec.fixed_axes(branches=False)
    expected = {one.name: ("input", one.fixed(fixed)) for one in opened.inputs}
    expected |= {one.name: ("output", one.fixed(fixed)) for one in opened.outputs}
    found = {one.name: one for one in opened.plan.tensors}
    reasons = [f"{name} is missing" for name in expected if name not in found]
    reasons += [f"{name} is not of the contract" for name in found if name not in expected]
    for name, (kind, tensor) in expected.items():
        if name in found:
            reasons += _differences(found[name], kind, tensor)
    reasons = reasons or [*_wrong_profiles(opened, fixed), *_wrong_aliases(opened, spec)]
    if reasons:
        raise BundleError(in_one_line(f"{opened.record.file} does not fit the bundle's contract", reasons))


def _differences(found: PlanTensor, kind: str, tensor: TensorSpec) -> list[str]:
    shape = tuple(axis if isinstance(axis, int) else -1 for axis in tensor.shape)
    if (found.kind, found.dtype, found.shape) == (kind, tensor.dtype, shape):
        return []
    return [
        f"{tensor.name} must be an {kind}, {tensor.dtype} {list(shape)}, found an {found.kind}, {found.dtype} "
        f"{list(found.shape)}"
    ]


def _wrong_profiles(opened: Opened, fixed: dict[str, int]) -> list[str]:
    profiles = opened.record.profiles
    if opened.plan.n_profiles != len(profiles):
        return [f"the manifest says {len(profiles)} profiles, found {opened.plan.n_profiles}"]
    reasons = []
    for index, profile in enumerate(profiles):
        for one in opened.inputs:
            expected, found = shapes_of(one, profile, fixed), opened.plan.profile_shapes(one.name, index)
            if expected != found:
                reasons.append(f"profile {index} of {one.name} must be {expected}, found {found}")
    return reasons


def _wrong_aliases(opened: Opened, spec: ModelSpec) -> list[str]:
    """Say which outputs a plan writes over an input that the engine keeps elsewhere."""
    if opened.record.part == "encoder":
        return []
    own = {
        present.name: past.name
        for one, past, present in zip(spec.state, spec.past, spec.present, strict=True)
        if one.kind == "cache"
    }
    aliases = {one.name: opened.plan.aliased(one.name) for one in opened.outputs}
    return [
        f"{name} must be written over {own.get(name, 'no input')}, found {alias}"
        for name, alias in aliases.items()
        if alias is not None and alias != own.get(name)
    ]
