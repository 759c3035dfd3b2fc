"""Engines from the graphs of a bundle: what is asked is checked first, then each part is parsed, compared and built.

It needs numpy and TensorRT alone: engines of TensorRT are built on the device itself.
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
    """What was asked of a build; ``capabilities`` such as 8.6, of this machine's GPU unless said."""

    flavour: Flavour
    capabilities: tuple[str, ...] = ()
    profiles: tuple[Ranges, ...] = ()
    timing_cache: Path | None = None


@dataclass(frozen=True)
class BuildPlan:
    """A build that can be begun: the module is here, the compute capabilities are known to it."""

    asked: BuildRequest
    module: Any
    capabilities: tuple[str, ...]
    profiles: tuple[Profile, ...]
    runs_here: bool

    @property
    def version(self) -> str:
        """The version of TensorRT."""
        return str(self.module.__version__)

    def file(self, part: Part) -> str:
        """Return the name of a part's engine in a bundle."""
        return plan_file(part, self.asked.flavour, self.version, self.capabilities)


def planned(asked: BuildRequest, spec: ModelSpec) -> BuildPlan:
    """Return the build that was asked for, or raise before any object of TensorRT is made."""
    profiles = profiles_of(spec, asked.profiles)
    if not TARGETS[asked.flavour].builds_ahead:
        # First of all: without a GPU its objects can be made and then end the process.
        (capability,) = _capability_here() or _no_gpu(
            "engines of TensorRT are built on the GPU that runs them; build there with: fatdeploy build BUNDLE "
            "--flavour tensorrt, or ahead of time with --flavour (--target) tensorrt-rtx and --compute-capability"
        )
        if asked.capabilities not in ((), (capability,)):
            raise ConfigError(
                f"TensorRT builds for the GPU that is here, of compute capability {capability}, not for "
                f"{', '.join(asked.capabilities)}; tensorrt-rtx builds for others"
            )
        return BuildPlan(asked, tensorrt_module(asked.flavour), (capability,), profiles, runs_here=True)
    if asked.timing_cache is not None:
        raise ConfigError("--timing-cache is for tensorrt: TensorRT-RTX measures nothing when it builds")
    module = tensorrt_module(asked.flavour)
    here = _capability_here()
    capabilities = asked.capabilities or here or _no_gpu("say --compute-capability, such as 8.6,8.9,12.0")
    _check_capabilities(module, capabilities)
    return BuildPlan(asked, module, capabilities, profiles, runs_here=bool(here) and here[0] in capabilities)


def _capability_here() -> tuple[str, ...]:
    """Return the compute capability of the first GPU of this machine, nothing if there is none."""
    return tuple("{}.{}".format(*one.compute_capability) for one in cuda_here().devices[:1])


def _no_gpu(advice: str) -> NoReturn:
    raise BackendUnavailable(f"there is no GPU here ({cuda_here().reason}): {advice}")


def _check_capabilities(module: Any, capabilities: Sequence[str]) -> None:
    offered = {name for name in dir(module.ComputeCapability) if name.startswith("SM")}
    reasons = [f"{one} is not offered" for one in capabilities if _symbol(one) not in offered]
    reasons += [
        f"{one} stands there twice" for one in sorted({one for one in capabilities if capabilities.count(one) > 1})
    ]
    if reasons:
        said = ", ".join(sorted((f"{name[2:-1]}.{name[-1]}" for name in offered), key=float))
        raise ConfigError(
            f"{in_one_line('--compute-capability refused', reasons)}. {module.__name__} "
            f"{module.__version__} builds for {said}"
        )


def _symbol(capability: str) -> str:
    major, _, minor = capability.partition(".")
    return f"SM{major}{minor}"


def chosen_flavour(path: Path, said: Flavour | None) -> Flavour:
    """Return which TensorRT a bundle is for, if nobody says it."""
    target = read_bundle(path, check_hashes=False).manifest.target
    if said is not None:
        return said
    flavour = TARGETS[target].flavour
    if flavour is None:
        raise ConfigError(f"{path} was exported for {target}: say --flavour {either(engine_targets())}")
    return flavour


def build_engines(path: Path, asked: BuildRequest, *, stage: Stage, keep_onnx: bool = True) -> Bundle:
    """Build the engines of a bundle and put them into it; if anything fails, the bundle stays as it was."""
    bundle = read_bundle(path)
    plan = planned(asked, bundle.spec)
    with replaced_folder(bundle.path, force=True) as new:
        copy_files(bundle, new)
        add_engines(new, bundle, plan, stage=stage)
        if not keep_onnx:
            drop_graphs(new)
    return read_bundle(path)


def add_engines(folder: Path, bundle: Bundle, plan: BuildPlan, *, stage: Stage) -> None:
    """Write the engines of a bundle, and the manifest that lists them, into a folder that holds its other files."""
    _check_buildable(bundle)
    (folder / ENGINES).mkdir(exist_ok=True)
    records = [_built(folder, bundle, part, plan, stage) for part in PARTS]
    # Those of other versions and GPUs stay: the graphs are the same.
    others = [one for one in bundle.manifest.plans if one.file not in {record.file for record in records}]
    versions = {**bundle.manifest.versions, plan.asked.flavour: plan.version}
    write_manifest(folder, replace(bundle.manifest, plans=(*others, *records), versions=versions))


def finish_bundle(folder: Path, target: Flavour, plan: BuildPlan | None, stage: Stage) -> None:
    """Make a bundle of standard graphs one of TensorRT: with engines, or without, to be built on the device."""
    bundle = read_bundle(folder, check_hashes=False)
    bundle = replace(bundle, manifest=replace(bundle.manifest, target=target))
    if plan is None:
        write_manifest(folder, bundle.manifest)
    else:
        add_engines(folder, bundle, plan, stage=stage)


def _check_buildable(bundle: Bundle) -> None:
    if bundle.manifest.dialect != "standard":
        raise BundleError(
            f"{bundle.path} has graphs of onnxruntime's own ops ({bundle.manifest.target}), which TensorRT does not "
            "have: export the model with --target tensorrt, tensorrt-rtx or onnx"
        )
    missing = [name for name in GRAPHS.values() if name not in bundle.manifest.files]
    if missing:
        raise BundleError(f"{bundle.path} was kept without {' and '.join(missing)}, which engines are built from")


def _built(folder: Path, bundle: Bundle, part: Part, plan: BuildPlan, stage: Stage) -> PlanRecord:
    """Write one engine and its log, and return what was built."""
    file = plan.file(part)
    where = f"compute capability {', '.join(plan.capabilities)}"
    stage(f"building the {part} with {plan.asked.flavour} {plan.version} for {where}")
    with (folder / file).with_suffix(".log").open("w", encoding="utf-8") as text:
        heard = BuildLog(text, plan.asked.flavour, bundle.path)
        with listening(heard.hear):
            engine = _engine(bundle, part, plan)
        if engine is None:
            reasons = heard.errors or ["it gave no reason"]
            said = in_one_line(f"{plan.asked.flavour} could not build the {part}", reasons)
            raise ExportFailed(f"{said}{_advice(plan.profiles)}")
    (folder / file).write_bytes(engine)
    if plan.runs_here:
        (folder / file).with_suffix(".layers.json").write_text(_layers(plan, engine))
    return PlanRecord(
        part=part,
        file=file,
        flavour=plan.asked.flavour,
        version=plan.version,
        compute_capabilities=plan.capabilities,
        profiles=plan.profiles,
        graph_sha256=graph_hash(bundle.manifest, part),
    )


def _advice(profiles: Sequence[Profile]) -> str:
    """Say what to try where an axis has one size: TensorRT-RTX 1.7 fails on fp16 encoders of short sources then."""
    single = {axis: one.most for profile in profiles for axis, one in profile.sizes.items() if one.least == one.most}
    tried = ",".join(f"{axis}={most}:{most}:{2 * most}" for axis, most in single.items() if axis in ("batch", "rows"))
    return (
        f". Give axes of one size a range, which is another way through the compiler: --profile {tried}"
        if tried
        else ""
    )


def _engine(bundle: Bundle, part: Part, plan: BuildPlan) -> Any:
    """Return an engine as TensorRT writes it, None if it could not build it."""
    module, logger = plan.module, logger_of(plan.asked.flavour)
    builder = module.Builder(logger)
    network = parsed(module, builder, logger, bundle.file(GRAPHS[part]))
    check_network(network, bundle.spec, part)
    config = builder.create_builder_config()
    config.clear_flag(module.BuilderFlag.TF32)  # fp32 means fp32: rounded products choose other tokens
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # for the report of layers
    for profile in plan.profiles:
        shapes = shapes_by_input(bundle.spec, part, profile)
        check_shapes(bundle.spec, part, shapes)
        ranges = builder.create_optimization_profile()
        for name, triple in shapes.items():
            ranges.set_shape(name, *triple)
        if config.add_optimization_profile(ranges) < 0:
            raise ExportFailed(f"{plan.asked.flavour} refuses the profile {profile.sizes} of the {part}")
    if TARGETS[plan.asked.flavour].builds_ahead:
        aim(module, config, plan.capabilities)
    if plan.asked.timing_cache is None:
        return builder.build_serialized_network(network, config)
    cached = TimingCache(config, plan.asked.timing_cache)
    engine = builder.build_serialized_network(network, config)
    cached.write()
    return engine


def aim(module: Any, config: Any, capabilities: Sequence[str]) -> None:
    """Choose the GPUs that an engine is for; TensorRT-RTX alone can."""
    config.num_compute_capabilities = len(capabilities)
    for place, one in enumerate(capabilities):
        if not config.set_compute_capability(getattr(module.ComputeCapability, _symbol(one)), place):
            raise ExportFailed(f"{module.__name__} {module.__version__} refuses compute capability {one}")


class TimingCache:
    """A file of measured kernels, which makes the next build of the same shapes short."""

    def __init__(self, config: Any, path: Path) -> None:
        self._config, self._path = config, path
        cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        # False: one of another GPU or version is refused, for its times mean nothing here.
        if not config.set_timing_cache(cache, False):  # noqa: FBT003 - its parameter has no name in all versions
            raise ConfigError(f"{path} is no timing cache of this GPU and version of TensorRT: name another file")

    def write(self) -> None:
        """Write what was measured until now."""
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(self._config.get_timing_cache().serialize())
        new.replace(self._path)


def _layers(plan: BuildPlan, engine: Any) -> str:
    """Return what TensorRT tells of the layers of an engine that this machine's GPU can load."""
    runtime = plan.module.Runtime(logger_of(plan.asked.flavour))
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        raise ExportFailed(f"{plan.asked.flavour} {plan.version} cannot load the engine that it has just built")
    report = loaded.create_engine_inspector().get_engine_information(plan.module.LayerInformationFormat.JSON)
    return f"{report}\n"
