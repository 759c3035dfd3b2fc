"""Sessions of ONNX Runtime: on the providers that were asked for and no others, with graphs that fit the contract."""

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, get_args

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError, in_one_line
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.doctor.packages import (
    CONFLICT,
    CONFLICT_FIX,
    GPU_RUNTIME,
    alternatives_overwritten,
    install_command,
    installed_versions,
)
from fatdeploy.spec import TensorSpec
from fatdeploy.targets import Provider

PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# Longer than what happens between two steps; an encode that begins when a decode ends waits no longer than that.
SPIN_MICROSECONDS = 1000
ON_DEVICE: frozenset[Provider] = frozenset({"cuda", "tensorrt"})

log = logging.getLogger("fatdeploy")


@dataclass(frozen=True, kw_only=True)
class OrtOptions:
    """How onnxruntime runs: threads, one a core unless said; whether they spin while they wait; on which providers.

    Without ``optimised`` it runs a graph as it is written, which is slow and shows what the graph itself computes. In
    the folder ``profile`` it leaves, once the engine is closed, a record of each graph: how long every op took. With
    ``cuda_graphs`` a step is captured and replayed, or refused.
    """

    threads: int | None = None
    spinning: bool = True
    providers: Sequence[Provider] = ("cpu",)
    optimised: bool = True
    profile: Path | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        reasons = [*_wrong_threads(self.threads), *_wrong_spinning(self.spinning), *_wrong_providers(self.providers)]
        reasons += _wrong_capture(self.cuda_graphs)
        if reasons:
            raise ConfigError(in_one_line("engine options refused", reasons))

    @property
    def provider_names(self) -> list[str]:
        """What onnxruntime calls the providers."""
        return [PROVIDERS[one] for one in self.providers]

    @property
    def on_device(self) -> bool:
        """Whether the first of them computes on a GPU."""
        return self.providers[0] in ON_DEVICE


class OrtKeywords(TypedDict, total=False):
    """The fields of ``OrtOptions``, as an engine is given them."""

    threads: int | None
    spinning: bool
    providers: Sequence[Provider]
    optimised: bool
    profile: Path | None
    cuda_graphs: bool


def _wrong_threads(threads: object) -> list[str]:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1):
        return []
    return [f"threads must be a whole number from 1 up, found {threads!r}"]


def _wrong_spinning(spinning: object) -> list[str]:
    return [] if isinstance(spinning, bool) else [f"spinning must be True or False, found {spinning!r}"]


def _wrong_capture(cuda_graphs: object) -> list[str]:
    """Say why onnxruntime cannot capture the steps of our graphs: it is true of every one of them."""
    if cuda_graphs is False:
        return []
    return [
        "cuda_graphs cannot be had of onnxruntime: it captures no graph with branches (If), which graphs for it have, "
        "and positions are read on the host when a kernel is launched, so that a replay would repeat the first. "
        "TensorRT engines capture steps: fatdeploy export SOURCE --out DIR --target tensorrt"
    ]


def _wrong_providers(providers: Sequence[object]) -> list[str]:
    known = get_args(Provider)
    if not isinstance(providers, list | tuple) or not providers or any(one not in known for one in providers):
        return [f"providers must be a list of {' or '.join(known)}, found {providers!r}"]
    if len(set(providers)) < len(providers):
        return [f"providers must be different, found {list(providers)}"]
    # onnxruntime gives each op to the first that can run it: behind the CPU no other would get one.
    return [] if "cpu" not in providers[:-1] else [f"cpu must be the last provider, found {list(providers)}"]


def onnxruntime_module() -> Any:
    """Import onnxruntime, or say what to install."""
    if alternatives_overwritten():
        raise BackendUnavailable(f"{CONFLICT}: {CONFLICT_FIX}")
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise BackendUnavailable(f"onnxruntime cannot be imported ({error}): pip install 'fatdeploy[cpu]'") from error


@dataclass(frozen=True)
class Sessions:
    """The two graphs of a bundle, ready to run from any number of threads."""

    encoder: Any
    decoder: Any


def opened_sessions(ort: Any, bundle: Bundle, options: OrtOptions) -> Sessions:
    """Open both graphs; a provider that is not here and a graph that is not the contract's are refused."""
    _check_available(ort, options)
    _check_bfloat16(bundle, options)
    encoder, decoder = (_session(ort, bundle, name, options) for name in (ENCODER, DECODER))
    spec, branches = bundle.spec, bundle.manifest.branches
    fixed = spec.fixed_axes(branches=branches)
    inputs, outputs = spec.decoder_inputs(branches=branches), spec.decoder_outputs()
    _check_contract(encoder, ENCODER, spec.encoder_inputs(), spec.encoder_outputs())
    _check_contract(decoder, DECODER, *([one.fixed(fixed) for one in kind] for kind in (inputs, outputs)))
    return Sessions(encoder, decoder)


def small_session(ort: Any, graph: bytes, provider: str) -> Any:
    """Open a graph of ours that serves a provider's memory; another provider in its place is refused."""
    chosen = ort.SessionOptions()
    chosen.log_severity_level = _severity()
    chosen.intra_op_num_threads = 1
    session = ort.InferenceSession(graph, chosen, providers=[provider], enable_fallback=False)
    if session.get_providers()[0] != provider:
        raise BackendUnavailable(
            f"onnxruntime moves no rows with {provider}, it chose {session.get_providers()}: fatdeploy doctor"
        )
    return session


def _check_available(ort: Any, options: OrtOptions) -> None:
    available = ort.get_available_providers()
    missing = [name for name in options.provider_names if name not in available]
    if missing:
        versions = installed_versions()
        advice = "fatdeploy doctor" if GPU_RUNTIME.name in versions else install_command(GPU_RUNTIME, versions)
        raise BackendUnavailable(f"onnxruntime here has no {missing}, only {available}: {advice}")


def _check_bfloat16(bundle: Bundle, options: OrtOptions) -> None:
    """Raise, with what to type, where a bundle's bfloat16 cannot be computed, or its arrays not be held."""
    if bundle.manifest.precision != "bf16":
        return
    if list(options.providers) == ["cpu"]:
        raise BackendUnavailable(
            f"{bundle.path} is in bf16, for which onnxruntime's CPU provider has no kernels. For a CPU export it again "
            "in fp32: fatdeploy export SOURCE --out DIR"
        )
    if importlib.util.find_spec("ml_dtypes") is None:
        raise BackendUnavailable("arrays of bfloat16 need ml_dtypes, not installed here: pip install ml_dtypes")
    importlib.import_module("ml_dtypes")  # numpy knows the name bfloat16 from now on


def _session(ort: Any, bundle: Bundle, name: str, options: OrtOptions) -> Any:
    path = bundle.file(name)
    try:
        with warnings.catch_warnings():
            # It warns of a provider that it leaves out, and goes on; below that is an error.
            warnings.filterwarnings("ignore", "Specified provider")
            session = ort.InferenceSession(
                str(path),
                _session_options(ort, options, name),
                providers=options.provider_names,
                provider_options=[_provider_options(one, bundle) for one in options.providers],
                # The fused kernel is slower than the two ops it replaces.
                disabled_optimizers=["SkipLayerNormFusion"],
                # It would print to standard output and run on the CPU.
                enable_fallback=False,
            )
    except Exception as error:  # onnxruntime's have no base of their own
        raise _explained(ort, error, bundle, name, options) from error
    found = session.get_providers()
    if found[: len(options.providers)] != options.provider_names:
        raise _fallen_back(name, options, f"it chose {found}")
    return session


def _provider_options(provider: Provider, bundle: Bundle) -> dict[str, str]:
    """Return what differs from a provider's defaults."""
    if provider == "cuda" and bundle.manifest.precision == "fp32":
        # Products of fp32 would be rounded to ten bits of mantissa on GPUs since Ampere: other tokens than the
        # reference's.
        return {"use_tf32": "0"}
    return {}


def _session_options(ort: Any, options: OrtOptions, name: str) -> Any:
    chosen = ort.SessionOptions()
    chosen.log_severity_level = _severity()
    if not options.optimised:
        chosen.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if options.threads is not None:
        chosen.intra_op_num_threads = options.threads
    chosen.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning else "0")
    # Floats that multiply 8-bit weights would be rounded to integers as well, and nobody asked for that (1.31).
    chosen.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if options.profile is not None:
        chosen.enable_profiling = True
        chosen.profile_file_prefix = str(options.profile / name)
    # Two sessions are two pools: each would spin on, tens of milliseconds, and steal the cores of the other.
    if name == DECODER:
        chosen.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    else:
        chosen.add_session_config_entry("session.force_spinning_stop", "1")
    return chosen


def _severity() -> int:
    """Return from which severity on onnxruntime speaks: its warnings are for who asks, at -v, the rest at -vv."""
    if log.isEnabledFor(logging.DEBUG):
        return 1
    return 2 if log.isEnabledFor(logging.INFO) else 3


def _explained(
    ort: Any, error: Exception, bundle: Bundle, name: str, options: OrtOptions
) -> BackendUnavailable | BundleError:
    reason = _in_one_line(error)
    # What a provider could not do comes as these; what is wrong with a graph has classes of its own.
    of_provider = ValueError, RuntimeError, ort.capi.onnxruntime_pybind11_state.EPFail
    if list(options.providers) != ["cpu"] and isinstance(error, of_provider):
        return _fallen_back(name, options, reason)
    return BundleError(
        f"onnxruntime cannot open {bundle.file(name)}: {reason}. "
        f"Copy the bundle again, or export it again: fatdeploy export SOURCE --out {bundle.path} --force"
    )


def run_failed(bundle: Bundle, name: str, error: Exception) -> BundleError:
    """Return what to say of a graph that could be opened and cannot be run."""
    return BundleError(
        f"onnxruntime cannot run {bundle.file(name)}: {_in_one_line(error)}. "
        f"See whether the bundle is whole: fatdeploy verify {bundle.path}"
    )


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _fallen_back(name: str, options: OrtOptions, reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"onnxruntime does not run {name} on {list(options.providers)} as asked: {reason}. "
        "See what is missing: fatdeploy doctor; or ask for cpu alone"
    )


def _check_contract(session: Any, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise unless a graph's inputs and outputs are those of the contract."""
    try:
        reasons = [
            *_differences("input", session.get_inputs(), inputs),
            *_differences("output", session.get_outputs(), outputs),
        ]
    except UnicodeDecodeError as error:
        reasons = [f"a name in it is no UTF-8: {error}"]
    if reasons:
        raise BundleError(in_one_line(f"{name} does not fit the bundle's contract", reasons))


def _differences(kind: str, found: Sequence[Any], expected: Sequence[TensorSpec]) -> list[str]:
    names = [one.name for one in found], [one.name for one in expected]
    if names[0] != names[1]:
        return [f"{kind}s must be {names[1]}, found {names[0]}"]
    return [
        f"{one.name} must be {spec.dtype} {list(spec.shape)}, found {_dtype(one)} {one.shape}"
        for one, spec in zip(found, expected, strict=True)
        if _dtype(one) != spec.dtype or not _shape_fits(one.shape, spec)
    ]


def _dtype(found: Any) -> str:
    """Return an input's or output's element type as numpy calls it."""
    name = str(found.type).removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


def _shape_fits(found: Sequence[Any], spec: TensorSpec) -> bool:
    """Return whether a graph's axes are the contract's: the same numbers, and none where any size may come."""
    return len(found) == len(spec.shape) and all(
        size == there if isinstance(size, int) else not isinstance(there, int)
        for size, there in zip(spec.shape, found, strict=True)
    )
