"""What a bundle can be exported for: one record per target, which all code consults. Adding a target starts here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Target = Literal["ort-cpu", "ort-cuda", "onnx", "tensorrt", "tensorrt-rtx"]
Dialect = Literal["ort", "standard"]
EngineKind = Literal["onnxruntime", "tensorrt"]
Flavour = Literal["tensorrt", "tensorrt-rtx"]
Provider = Literal["cpu", "cuda", "tensorrt"]

FloatPrecision = Literal["fp32", "fp16", "bf16"]
HalfPrecision = Literal["fp16", "bf16"]
HalfDtype = Literal["float16", "bfloat16"]  # the same, by the names of tensors
IntegerPrecision = Literal["int8", "int4"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]

CpuClass = Literal["any", "x86-avx2", "x86-vnni", "arm64"]
MetricName = Literal["token_error_rate", "sequence_error_rate", "exact_match", "bleu", "chrf"]

DEFAULT_TARGET: Target = "ort-cpu"


@dataclass(frozen=True, kw_only=True)
class TargetRecord:
    """What the project knows about a target.

    ``limit`` says why the other precisions are missing. ``providers`` run its graphs in onnxruntime by default.
    ``flavour`` is the TensorRT that builds and runs its engines; they are built from the graphs of ``graph_target``.
    ``row_positions`` means that rows of a decode may be at different positions, where the model can do it.
    ``builds_ahead`` means that they can be built on a machine without the GPU. ``run_packages`` and
    ``build_packages`` are the names of the packages that running and building need.
    """

    name: Target
    summary: str
    dialect: Dialect
    precisions: tuple[Precision, ...]
    limit: str
    engine: EngineKind
    providers: tuple[Provider, ...] = ()
    flavour: Flavour | None = None
    graph_target: Target
    needs_gpu: bool = False
    captures_steps: bool = False
    builds_ahead: bool = False
    row_positions: bool = False
    run_packages: tuple[str, ...] = ()
    build_packages: tuple[str, ...] = ()

    def refusal(self, precision: Precision) -> str:
        """Return why the target does not take a precision, and what to type instead; empty if it takes it."""
        if precision in self.precisions:
            return ""
        return (
            f"{self.name} takes {either(self.precisions)}, found {precision}: {self.limit}. For {precision} "
            f"export with --target {either(targets_with(precision))}"
        )


_STANDARD: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
_NO_INT4 = "standard ONNX has no product of 4-bit blocks"

TARGETS: dict[Target, TargetRecord] = {
    record.name: record
    for record in (
        TargetRecord(
            name="ort-cpu",
            summary="onnxruntime on the CPU",
            dialect="ort",
            precisions=("fp32", "int8", "int4"),
            limit="onnxruntime's CPU provider has few kernels for half precision, and casts to float32 and back",
            engine="onnxruntime",
            providers=("cpu",),
            graph_target="ort-cpu",
            row_positions=True,
            run_packages=("onnxruntime",),
        ),
        TargetRecord(
            name="ort-cuda",
            summary="onnxruntime on an NVIDIA GPU",
            dialect="ort",
            precisions=("fp32", "fp16"),
            limit="onnxruntime's CUDA provider lacks the kernels",
            engine="onnxruntime",
            providers=("cuda",),
            graph_target="ort-cuda",
            needs_gpu=True,
            run_packages=("onnxruntime-gpu",),
        ),
        TargetRecord(
            name="onnx",
            summary="standard ONNX graphs for any tool",
            dialect="standard",
            precisions=_STANDARD,
            limit=_NO_INT4,
            engine="onnxruntime",
            providers=("cpu",),
            graph_target="onnx",
            run_packages=("onnxruntime",),
        ),
        TargetRecord(
            name="tensorrt",
            summary="TensorRT engines, built on the GPU that runs them",
            dialect="standard",
            precisions=_STANDARD,
            limit=_NO_INT4,
            engine="tensorrt",
            flavour="tensorrt",
            graph_target="onnx",
            needs_gpu=True,
            captures_steps=True,
            run_packages=("tensorrt", "cuda-python"),
            build_packages=("tensorrt",),
        ),
        TargetRecord(
            name="tensorrt-rtx",
            summary="TensorRT-RTX engines, built ahead of time for the compute capabilities you name",
            dialect="standard",
            precisions=_STANDARD,
            limit=_NO_INT4,
            engine="tensorrt",
            flavour="tensorrt-rtx",
            graph_target="onnx",
            needs_gpu=True,
            captures_steps=True,
            builds_ahead=True,
            run_packages=("tensorrt-rtx", "cuda-python"),
            build_packages=("tensorrt-rtx",),
        ),
    )
}


def targets_with(precision: Precision) -> tuple[Target, ...]:
    """Return the targets that take a precision."""
    return tuple(record.name for record in TARGETS.values() if precision in record.precisions)


def engine_targets() -> tuple[Target, ...]:
    """Return the targets for which TensorRT engines are built."""
    return tuple(record.name for record in TARGETS.values() if record.flavour is not None)


def target_help() -> str:
    """Return one line for the command line: what each target is."""
    return "; ".join(f"{record.name}: {record.summary}" for record in TARGETS.values()) + "."


def precision_help() -> str:
    """Return one line for the command line: which targets take each precision."""
    named = (f"{precision} ({', '.join(targets_with(precision))})" for precision in get_args(Precision)[1:])
    return f"fp32 (every target), {', '.join(named)}."


def either(names: Iterable[str]) -> str:
    """Return names as a choice: ``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
