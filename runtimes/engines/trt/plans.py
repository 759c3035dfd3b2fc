"""The plans of a bundle that were built for this GPU and TensorRT, opened and compared with the contract."""

from contextlib import ExitStack
from dataclasses import dataclass

from fatdeploy.bundle import Bundle, graph_hash
from fatdeploy.errors import BackendUnavailable, BundleError, in_one_line
from fatdeploy.manifest import GRAPHS
from fatdeploy.plans import Part, PlanRecord, inputs_of, outputs_of, shapes_of
from fatdeploy.runtimes.engines.contract import contract_differences
from fatdeploy.runtimes.engines.trt.device import Device, DevicePlan, GpuIdentity
from fatdeploy.spec import ModelSpec, TensorSpec


@dataclass(frozen=True)
class OpenedPlan:
    """A loaded plan, and what it was built for."""

    plan: DevicePlan
    record: PlanRecord
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def opened_plans(device: Device, bundle: Bundle) -> dict[Part, OpenedPlan]:
    """Return both parts of a model on a device; refuse plans for another device and name both devices."""
    records = chosen_records(bundle, device.here)
    opened: dict[Part, OpenedPlan] = {}
    with ExitStack() as closing:
        for part, record in records.items():
            plan = device.load(bundle.file(record.file), record)
            closing.callback(plan.close)
            opened[part] = OpenedPlan(plan, record, inputs_of(bundle.spec, part), outputs_of(bundle.spec, part))
            check_plan(opened[part], bundle.spec)
        closing.pop_all()
    return opened


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
    """Return what a plan was built for where that differs from what is here; empty if it fits."""
    wrong = []
    # If the graphs were dropped, there is nothing to compare with.
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


def check_plan(opened: OpenedPlan, spec: ModelSpec) -> None:
    """Raise, with every reason, unless a plan's tensors and profiles are those of the contract and of its record."""
    fixed = spec.fixed_axes(branches=False)
    inputs, outputs = ([tensor.fixed(fixed) for tensor in part] for part in (opened.inputs, opened.outputs))
    reasons = contract_differences(opened.plan.tensors, inputs, outputs)
    reasons = reasons or [*_wrong_profiles(opened, fixed), *_wrong_aliases(opened, spec)]
    if reasons:
        raise BundleError(in_one_line(f"{opened.record.file} does not fit the bundle's contract", reasons))


def _wrong_profiles(opened: OpenedPlan, fixed: dict[str, int]) -> list[str]:
    profiles = opened.record.profiles
    if opened.plan.n_profiles != len(profiles):
        return [f"the manifest says {len(profiles)} profiles, found {opened.plan.n_profiles}"]
    reasons = []
    for index, profile in enumerate(profiles):
        for tensor in opened.inputs:
            expected, actual = shapes_of(tensor, profile, fixed), opened.plan.profile_shapes(tensor.name, index)
            if expected != actual:
                reasons.append(f"profile {index} of {tensor.name} must be {expected}, found {actual}")
    return reasons


def _wrong_aliases(opened: OpenedPlan, spec: ModelSpec) -> list[str]:
    """Return which outputs a plan writes over an input that the engine keeps elsewhere."""
    if opened.record.part == "encoder":
        return []
    shared = {
        present.name: past.name
        for tensor, past, present in zip(spec.state, spec.past, spec.present, strict=True)
        if tensor.kind == "cache"
    }
    aliases = {tensor.name: opened.plan.aliased(tensor.name) for tensor in opened.outputs}
    return [
        f"{name} must be written over {shared.get(name, 'no input')}, found {alias}"
        for name, alias in aliases.items()
        if alias is not None and alias != shared.get(name)
    ]
