"""Engines from the graphs of a bundle: the request is checked first, then each part is parsed, compared and built.

This needs only numpy and TensorRT, because TensorRT builds engines on the device itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from fatdeploy.bundle import Bundle, copy_files, graph_hash, read_bundle, write_manifest
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError, ExportFailed, in_one_line
from fatdeploy.folders import replaced_folder
from fatdeploy.manifest import GRAPHS
from fatdeploy.plans import ENGINES, Part, PlanRecord, Profile, plan_file
from fatdeploy.runtimes.doctor.cuda_driver import cuda_here
from fatdeploy.runtimes.engines.trt.build.drop import drop_graphs
from fatdeploy.runtimes.engines.trt.build.log import BuildLog
from fatdeploy.runtimes.engines.trt.build.network import check_network, parsed
from fatdeploy.runtimes.engines.trt.build.profiles import PARTS, Ranges, check_shapes, profiles_of, shapes_by_input
from fatdeploy.runtimes.engines.trt.modules import listening, logger_of, tensorrt_module
from fatdeploy.spec import ModelSpec
from fatdeploy.targets import TARGETS, Flavour, either, engine_targets

Stage = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What to build; ``capabilities`` such as 8.6 (default: that of this machine's GPU)."""

    flavour: Flavour
    capabilities: tuple[str, ...] = ()
    profiles: tuple[Ranges, ...] = ()
    timing_cache: Path | None = None


@dataclass(frozen=True)
class BuildPlan:
    """A build that can start: the module is here, and it knows the compute capabilities."""

    request: BuildRequest
    module: Any
    capabilities: tuple[str, ...]
    profiles: tuple[Profile, ...]
    runs_here: bool

    @property
    def version(self) -> str:
        """The version of TensorRT."""
        return str(self.module.__version__)

    def file(self, part: Part) -> str:
        """Return the file name of a part's engine in a bundle."""
        return plan_file(part, self.request.flavour, self.version, self.capabilities)


def planned(request: BuildRequest, spec: ModelSpec) -> BuildPlan:
    """Return the requested build, or raise before any TensorRT object is made."""
    profiles = profiles_of(spec, request.profiles)
    if TARGETS[request.flavour].builds_ahead:
        return _planned_ahead(request, profiles)
    # The GPU is checked first: without one, TensorRT's objects can be made and then end the process.
    (capability,) = _capability_here() or _no_gpu(
        "engines of TensorRT are built on the GPU that runs them; build there with: fatdeploy build BUNDLE "
        "--flavour tensorrt, or ahead of time with --flavour (--target) tensorrt-rtx and --compute-capability"
    )
    if request.capabilities not in ((), (capability,)):
        raise ConfigError(
            f"TensorRT builds for the GPU that is here, of compute capability {capability}, not for "
            f"{', '.join(request.capabilities)}; tensorrt-rtx builds for others"
        )
    return BuildPlan(request, tensorrt_module(request.flavour), (capability,), profiles, runs_here=True)


def _planned_ahead(request: BuildRequest, profiles: tuple[Profile, ...]) -> BuildPlan:
    """Return a build for named compute capabilities, which needs no GPU."""
    if request.timing_cache is not None:
        raise ConfigError("--timing-cache is for tensorrt: TensorRT-RTX measures nothing when it builds")
    module = tensorrt_module(request.flavour)
    here = _capability_here()
    capabilities = request.capabilities or here or _no_gpu("pass --compute-capability, such as 8.6,8.9,12.0")
    _check_capabilities(module, capabilities)
    return BuildPlan(request, module, capabilities, profiles, runs_here=bool(here) and here[0] in capabilities)


def _capability_here() -> tuple[str, ...]:
    """Return the compute capability of this machine's first GPU; empty if there is none."""
    return tuple("{}.{}".format(*device.compute_capability) for device in cuda_here().devices[:1])


def _no_gpu(advice: str) -> NoReturn:
    raise BackendUnavailable(f"there is no GPU here ({cuda_here().reason}): {advice}")


def _check_capabilities(module: Any, capabilities: Sequence[str]) -> None:
    offered = {name for name in dir(module.ComputeCapability) if name.startswith("SM")}
    reasons = [f"{name} is not available" for name in capabilities if _symbol(name) not in offered]
    reasons += [f"{name} is listed twice" for name in dict.fromkeys(capabilities) if capabilities.count(name) > 1]
    if reasons:
        available = ", ".join(sorted((f"{name[2:-1]}.{name[-1]}" for name in offered), key=float))
        raise ConfigError(
            f"{in_one_line('--compute-capability refused', reasons)}. {module.__name__} "
            f"{module.__version__} builds for {available}"
        )


def _symbol(capability: str) -> str:
    major, _, minor = capability.partition(".")
    return f"SM{major}{minor}"


def chosen_flavour(path: Path, requested: Flavour | None) -> Flavour:
    """Return the requested flavour of TensorRT, by default the one that a bundle was exported for."""
    target = read_bundle(path, check_hashes=False).manifest.target
    if requested is not None:
        return requested
    flavour = TARGETS[target].flavour
    if flavour is None:
        raise ConfigError(f"{path} was exported for {target}: pass --flavour {either(engine_targets())}")
    return flavour


def build_engines(path: Path, request: BuildRequest, *, stage: Stage, keep_onnx: bool = True) -> Bundle:
    """Build the engines of a bundle and put them into it; if anything fails, the bundle stays as it was."""
    bundle = read_bundle(path)
    plan = planned(request, bundle.spec)
    with replaced_folder(bundle.path, force=True) as new:
        copy_files(bundle, new)
        add_engines(new, bundle, plan, stage=stage)
        if not keep_onnx:
            drop_graphs(new)
    return read_bundle(path)


def add_engines(folder: Path, bundle: Bundle, plan: BuildPlan, *, stage: Stage) -> None:
    """Write the engines of a bundle, and the manifest that lists them, into a folder with its other files."""
    _check_buildable(bundle)
    (folder / ENGINES).mkdir(exist_ok=True)
    records = [_built(folder, bundle, part, plan, stage) for part in PARTS]
    # Engines for other versions and GPUs stay: the graphs are the same.
    new_files = {record.file for record in records}
    others = [record for record in bundle.manifest.plans if record.file not in new_files]
    versions = {**bundle.manifest.versions, plan.request.flavour: plan.version}
    write_manifest(folder, replace(bundle.manifest, plans=(*others, *records), versions=versions))


def finish_bundle(folder: Path, target: Flavour, plan: BuildPlan | None, stage: Stage) -> None:
    """Turn a bundle of standard graphs into one for TensorRT, with engines or, without a plan, to be built later."""
    bundle = read_bundle(folder, check_hashes=False)
    bundle = replace(bundle, manifest=replace(bundle.manifest, target=target))
    if plan is None:
        write_manifest(folder, bundle.manifest)
    else:
        add_engines(folder, bundle, plan, stage=stage)


def _check_buildable(bundle: Bundle) -> None:
    if bundle.manifest.dialect != "standard":
        raise BundleError(
            f"{bundle.path} has graphs with onnxruntime's own ops ({bundle.manifest.target}), which TensorRT does not "
            "have: export the model with --target tensorrt, tensorrt-rtx or onnx"
        )
    missing = [name for name in GRAPHS.values() if name not in bundle.manifest.files]
    if missing:
        raise BundleError(f"{bundle.path} was stored without {' and '.join(missing)}, which engines are built from")


def _built(folder: Path, bundle: Bundle, part: Part, plan: BuildPlan, stage: Stage) -> PlanRecord:
    """Write the engine of a part and its log, and return the record of it."""
    file = plan.file(part)
    where = f"compute capability {', '.join(plan.capabilities)}"
    stage(f"building the {part} with {plan.request.flavour} {plan.version} for {where}")
    with (folder / file).with_suffix(".log").open("w", encoding="utf-8") as text:
        log = BuildLog(text, plan.request.flavour, bundle.path)
        with listening(log.hear):
            engine = _engine(bundle, part, plan)
        if engine is None:
            reasons = log.errors or ["it gave no reason"]
            message = in_one_line(f"{plan.request.flavour} could not build the {part}", reasons)
            raise ExportFailed(f"{message}{_advice(plan.profiles)}")
    (folder / file).write_bytes(engine)
    if plan.runs_here:
        (folder / file).with_suffix(".layers.json").write_text(_layers(plan, engine))
    return PlanRecord(
        part=part,
        file=file,
        flavour=plan.request.flavour,
        version=plan.version,
        compute_capabilities=plan.capabilities,
        profiles=plan.profiles,
        graph_sha256=graph_hash(bundle.manifest, part),
    )


def _advice(profiles: Sequence[Profile]) -> str:
    """Return what to try if an axis has a single size: TensorRT-RTX 1.7 may fail then on an fp16 encoder."""
    sizes = [(axis, size) for profile in profiles for axis, size in profile.sizes.items()]
    single = {axis: size.most for axis, size in sizes if size.least == size.most and axis in ("batch", "rows")}
    if not single:
        return ""
    ranges = ",".join(f"{axis}={most}:{most}:{2 * most}" for axis, most in single.items())
    return f". Give axes of one size a range, which takes another path through the compiler: --profile {ranges}"


def _engine(bundle: Bundle, part: Part, plan: BuildPlan) -> Any:
    """Return an engine as TensorRT serializes it, None if the build failed."""
    module, logger = plan.module, logger_of(plan.request.flavour)
    builder = module.Builder(logger)
    network = parsed(module, builder, logger, bundle.file(GRAPHS[part]))
    check_network(network, bundle.spec, part)
    config = builder.create_builder_config()
    config.clear_flag(module.BuilderFlag.TF32)  # fp32 means fp32: rounded products choose other tokens
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # for the report of layers
    for profile in plan.profiles:
        _add_profile(builder, config, bundle.spec, part, profile)
    if TARGETS[plan.request.flavour].builds_ahead:
        aim(module, config, plan.capabilities)
    if plan.request.timing_cache is None:
        return builder.build_serialized_network(network, config)
    timing_cache = TimingCache(config, plan.request.timing_cache)
    engine = builder.build_serialized_network(network, config)
    timing_cache.write()
    return engine


def _add_profile(builder: Any, config: Any, spec: ModelSpec, part: Part, profile: Profile) -> None:
    shapes = shapes_by_input(spec, part, profile)
    check_shapes(spec, part, shapes)
    ranges = builder.create_optimization_profile()
    for name, triple in shapes.items():
        ranges.set_shape(name, *triple)
    if config.add_optimization_profile(ranges) < 0:
        raise ExportFailed(f"TensorRT refuses the profile {profile.sizes} of the {part}")


def aim(module: Any, config: Any, capabilities: Sequence[str]) -> None:
    """Choose the GPUs that an engine is for; only TensorRT-RTX can."""
    config.num_compute_capabilities = len(capabilities)
    for place, capability in enumerate(capabilities):
        if not config.set_compute_capability(getattr(module.ComputeCapability, _symbol(capability)), place):
            raise ExportFailed(f"{module.__name__} {module.__version__} refuses compute capability {capability}")


class TimingCache:
    """A file of measured kernels, which makes the next build of the same shapes faster."""

    def __init__(self, config: Any, path: Path) -> None:
        self._config, self._path = config, path
        cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        # False refuses a cache of another GPU or version, whose times mean nothing here.
        if not config.set_timing_cache(cache, False):  # noqa: FBT003 - its parameter has no name in all versions
            raise ConfigError(f"{path} is not a timing cache of this GPU and version of TensorRT: name another file")

    def write(self) -> None:
        """Write all measurements so far."""
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(self._config.get_timing_cache().serialize())
        new.replace(self._path)


def _layers(plan: BuildPlan, engine: Any) -> str:
    """Return TensorRT's report on the layers of an engine that this machine's GPU can load."""
    runtime = plan.module.Runtime(logger_of(plan.request.flavour))
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        raise ExportFailed(f"{plan.request.flavour} {plan.version} cannot load the engine that it has just built")
    report = loaded.create_engine_inspector().get_engine_information(plan.module.LayerInformationFormat.JSON)
    return f"{report}\n"
