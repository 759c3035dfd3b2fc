"""Sessions of ONNX Runtime: on the requested providers and no others, with graphs that fit the contract."""

import importlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BackendUnavailable, BundleError, in_one_line
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.doctor.packages import (
    CONFLICT,
    CONFLICT_FIX,
    GPU_RUNTIME,
    alternatives_overwritten,
    install_command,
    installed_versions,
)
from fatdeploy.runtimes.engines.contract import DYNAMIC, GraphTensor, TensorKind, contract_differences
from fatdeploy.runtimes.engines.element_types import dtype_from_onnxruntime
from fatdeploy.runtimes.engines.ort.options import PROVIDERS, OrtOptions
from fatdeploy.spec import TensorSpec
from fatdeploy.targets import Provider

# Longer than what happens between two steps; an encode that begins when a decode ends waits no longer than that.
SPIN_MICROSECONDS = 1000

log = logging.getLogger("fatdeploy")


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
    """Open both graphs; refuse a provider that is not available and a graph that does not fit the contract."""
    _check_available(ort, options)
    _check_version(ort, bundle)
    _check_bfloat16(bundle, options)
    _check_row_positions(bundle, options)
    encoder, decoder = (_bundle_session(ort, bundle, name, options) for name in (ENCODER, DECODER))
    spec, branches = bundle.spec, bundle.manifest.branches
    fixed = spec.fixed_axes(branches=branches)
    inputs, outputs = spec.decoder_inputs(branches=branches), spec.decoder_outputs()
    _check_contract(encoder, ENCODER, spec.encoder_inputs(), spec.encoder_outputs())
    _check_contract(decoder, DECODER, *([tensor.fixed(fixed) for tensor in part] for part in (inputs, outputs)))
    return Sessions(encoder, decoder)


def opened_session(
    ort: Any,
    graph: Path | bytes,
    *,
    provider: str = PROVIDERS["cpu"],
    threads: int | None = None,
    optimised: bool = True,
) -> Any:
    """Open a graph that is not one of a bundle's two, on this provider or not at all."""
    settings = _session_options(ort, threads=threads, optimised=optimised)
    content = graph if isinstance(graph, bytes) else str(graph)
    session = ort.InferenceSession(content, settings, providers=[provider], enable_fallback=False)
    if session.get_providers()[0] != provider:
        raise BackendUnavailable(
            f"onnxruntime does not run a graph on {provider}, it chose {session.get_providers()}: fatdeploy doctor"
        )
    return session


def _check_available(ort: Any, options: OrtOptions) -> None:
    available = ort.get_available_providers()
    missing = [name for name in options.provider_names if name not in available]
    if missing:
        versions = installed_versions()
        advice = "fatdeploy doctor" if GPU_RUNTIME.name in versions else install_command(GPU_RUNTIME, versions)
        raise BackendUnavailable(f"onnxruntime here has no {missing}, only {available}: {advice}")


def _check_version(ort: Any, bundle: Bundle) -> None:
    """Raise for an onnxruntime older than the bundle was verified with: before 1.31 caches in place corrupt memory."""
    if bundle.manifest.onnxruntime is None or not any(tensor.kind == "cache" for tensor in bundle.spec.state):
        return
    oldest, _ = bundle.manifest.onnxruntime
    if release(ort.__version__) < release(oldest):
        raise BackendUnavailable(
            f"{bundle.path} needs onnxruntime {oldest} or newer, this is {ort.__version__}: older versions may write "
            f"outside of its caches. Install it: pip install 'onnxruntime>={oldest}'"
        )


def release(version: str) -> list[int]:
    """Return the numbers at the start of a version."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in numbers[0].split(".")] if numbers else []


def _check_bfloat16(bundle: Bundle, options: OrtOptions) -> None:
    """Raise, with what to type, where bfloat16 cannot be computed or its arrays cannot be held."""
    if bundle.manifest.precision != "bf16":
        return
    if list(options.providers) == ["cpu"]:
        raise BackendUnavailable(
            f"{bundle.path} is in bf16, for which onnxruntime's CPU provider has no kernels. For a CPU export it again "
            f"in fp32: fatdeploy export SOURCE --out DIR; to check it here: fatdeploy verify {bundle.path} --emulated"
        )
    if importlib.util.find_spec("ml_dtypes") is None:
        raise BackendUnavailable("arrays of bfloat16 need ml_dtypes, not installed here: pip install ml_dtypes")
    importlib.import_module("ml_dtypes")  # the import registers the name bfloat16 with numpy


def _check_row_positions(bundle: Bundle, options: OrtOptions) -> None:
    """Raise, with what to type, for attention with a position per row where it has no kernel."""
    attends = any(tensor.kind == "cache" for tensor in bundle.spec.state)
    if bundle.spec.row_positions and attends and list(options.providers) != ["cpu"]:
        raise BackendUnavailable(
            f"{bundle.path} was exported for the CPU: its attention with a position per row has kernels for float32 "
            "nowhere else. For a GPU export it again: fatdeploy export SOURCE --out DIR --target ort-cuda"
        )


def _bundle_session(ort: Any, bundle: Bundle, name: str, options: OrtOptions) -> Any:
    path = bundle.file(name)
    try:
        with warnings.catch_warnings():
            # onnxruntime warns of a provider that it leaves out, and goes on; below that is an error.
            warnings.filterwarnings("ignore", "Specified provider")
            session = ort.InferenceSession(
                str(path),
                _bundle_session_options(ort, options, name),
                providers=options.provider_names,
                provider_options=[_provider_options(provider, bundle) for provider in options.providers],
                # The fused kernel is slower than the two ops it replaces.
                disabled_optimizers=["SkipLayerNormFusion"],
                # A fallback would print to standard output and run on the CPU.
                enable_fallback=False,
            )
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise _open_failed(ort, error, bundle, name, options) from error
    chosen = session.get_providers()
    if chosen[: len(options.providers)] != options.provider_names:
        raise _provider_failed(name, options, f"it chose {chosen}")
    return session


def _provider_options(provider: Provider, bundle: Bundle) -> dict[str, str]:
    """Return what differs from a provider's defaults."""
    if provider == "cuda" and bundle.manifest.precision == "fp32":
        # GPUs since Ampere would round fp32 products to ten bits of mantissa, which chooses other tokens than the
        # reference does.
        return {"use_tf32": "0"}
    return {}


def _session_options(ort: Any, *, threads: int | None, optimised: bool) -> Any:
    settings = ort.SessionOptions()
    settings.log_severity_level = _severity()
    if not optimised:
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        settings.intra_op_num_threads = threads
    return settings


def _bundle_session_options(ort: Any, options: OrtOptions, name: str) -> Any:
    settings = _session_options(ort, threads=options.threads, optimised=options.optimised)
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning else "0")
    # By default (1.31) floats that multiply 8-bit weights are rounded to integers too.
    settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile / name)
    # Two sessions have two thread pools: each would spin for tens of milliseconds and steal the other's cores.
    if name == DECODER:
        settings.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    else:
        settings.add_session_config_entry("session.force_spinning_stop", "1")
    return settings


def _severity() -> int:
    """Return the least severity that onnxruntime logs: its warnings at -v, everything at -vv."""
    if log.isEnabledFor(logging.DEBUG):
        return 1
    return 2 if log.isEnabledFor(logging.INFO) else 3


def _open_failed(
    ort: Any, error: Exception, bundle: Bundle, name: str, options: OrtOptions
) -> BackendUnavailable | BundleError:
    reason = _in_one_line(error)
    # Failures of a provider come as these classes; what is wrong with a graph has classes of its own.
    provider_errors = ValueError, RuntimeError, ort.capi.onnxruntime_pybind11_state.EPFail
    if list(options.providers) != ["cpu"] and isinstance(error, provider_errors):
        return _provider_failed(name, options, reason)
    return BundleError(
        f"onnxruntime cannot open {bundle.file(name)}: {reason}. "
        f"Copy the bundle again, or export it again: fatdeploy export SOURCE --out {bundle.path} --force"
    )


def run_failed(bundle: Bundle, name: str, error: Exception) -> BundleError:
    """Return the error for a graph that opens and does not run."""
    return BundleError(
        f"onnxruntime cannot run {bundle.file(name)}: {_in_one_line(error)}. "
        f"Check that the bundle is complete: fatdeploy verify {bundle.path}"
    )


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _provider_failed(name: str, options: OrtOptions, reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"onnxruntime does not run {name} on {list(options.providers)}, as requested: {reason}. "
        "See what is missing: fatdeploy doctor; or request cpu alone"
    )


def _check_contract(session: Any, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise unless a graph's inputs and outputs are those of the contract, in its order."""
    try:
        tensors = [*_tensors("input", session.get_inputs()), *_tensors("output", session.get_outputs())]
    except UnicodeDecodeError as error:
        reasons = [f"it has a name that is not UTF-8: {error}"]
    else:
        reasons = contract_differences(tensors, inputs, outputs) or _wrong_order(tensors, [*inputs, *outputs])
    if reasons:
        raise BundleError(in_one_line(f"{name} does not fit the bundle's contract", reasons))


def _tensors(kind: TensorKind, arguments: Sequence[Any]) -> list[GraphTensor]:
    return [
        GraphTensor(
            argument.name,
            kind,
            dtype_from_onnxruntime(argument.type),
            tuple(axis if isinstance(axis, int) else DYNAMIC for axis in argument.shape),
        )
        for argument in arguments
    ]


def _wrong_order(tensors: Sequence[GraphTensor], expected: Sequence[TensorSpec]) -> list[str]:
    names, contract = [tensor.name for tensor in tensors], [tensor.name for tensor in expected]
    return [] if names == contract else [f"the order must be {contract}, found {names}"]
