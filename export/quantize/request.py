"""What a quantization is asked for, and what it is calibrated and judged with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.quantize.examples import Example
from fatdeploy.export.quantize.gate import Bar
from fatdeploy.export.quantize.integers import WeightBits
from fatdeploy.export.quantize.recipe import MatrixPrecision
from fatdeploy.export.quantize.rewrite_qdq import RangeMethod
from fatdeploy.export.quantize.saturation_probe import WEIGHT_BITS, check_cpu
from fatdeploy.runtimes.text.tokenizer import Tokenizer
from fatdeploy.targets import CpuClass, TargetRecord

Integers = Literal["int8", "int4"]
Purpose = Literal["latency", "throughput"]
# Rows of a step that a plan is made for: one sentence at a time, or many at once.
ROWS: dict[Purpose, int] = {"latency": 1, "throughput": 32}
# Least shares of the reference's tokens. Forms that are fast for many rows, and 4 bits, cannot keep as many.
LEAST_AGREEMENT, LEAST_SMALLER = 0.99, 0.98


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """How to quantize; ``of`` holds precisions of single matrices, by name or pattern.

    ``purpose`` says what is to be fast: one row at a time (``latency``) or many (``throughput``); ``rows`` is their
    number where the default does not fit. ``activations`` and ``ranges`` are for graphs of standard ops: what weights
    are multiplied with, and how ranges are chosen. ``metric`` is one of ``METRICS``; None leaves the choice to the
    tokenizer. ``recover`` has no effect any more: a plan always keeps what the bar needs.
    """

    precision: Integers
    purpose: Purpose = "latency"
    rows: int | None = None
    activations: Literal["int8", "float"] = "int8"
    ranges: RangeMethod = "percentile"
    cpu: CpuClass = "any"
    of: Mapping[str, MatrixPrecision] = field(default_factory=dict)
    recover: bool = False
    bar: Bar = field(default_factory=Bar)
    metric: str | None = None

    @property
    def n_rows(self) -> int:
        """How many rows a step has that the plan is made for."""
        return ROWS[self.purpose] if self.rows is None else self.rows

    @property
    def threads(self) -> int | None:
        """How many threads compute such a step: many rows are decoded by workers of one thread each."""
        return None if self.n_rows <= ROWS["latency"] else 1

    @property
    def least_agreement(self) -> float:
        """The share of the reference's tokens that is asked for, or its default."""
        if self.bar.agreement is not None:
            return self.bar.agreement
        exact = self.precision == "int8" and self.n_rows < ROWS["throughput"]
        return LEAST_AGREEMENT if exact else LEAST_SMALLER

    @property
    def weight_bits(self) -> WeightBits:
        """Usable bits of 8-bit weights; those that are multiplied with floats are never summed as integers."""
        return 8 if self.activations == "float" else WEIGHT_BITS[self.cpu]


@dataclass(frozen=True)
class Trial:
    """A request to quantize, and the examples to calibrate with and to judge by.

    Without ``most_steps`` targets are judged to their end.
    """

    request: QuantizeRequest
    calibration: Sequence[Example]
    probes: Sequence[Example]
    tokenizer: Tokenizer | None = None
    metric: str | None = None
    most_steps: int | None = None


def check_request(request: QuantizeRequest, target: TargetRecord) -> None:
    """Raise, with all reasons, if a target cannot run the request or this CPU cannot prove it."""
    reasons = [
        refusal
        for precision in sorted({request.precision, *request.of.values()})
        if (refusal := target.refusal(precision))
    ]
    choices = {
        "--activations float": request.activations != QuantizeRequest.activations,
        "--ranges min-max": request.ranges != QuantizeRequest.ranges,
    }
    needed = "for graphs of standard ops (--target tensorrt, tensorrt-rtx or onnx)"
    if target.dialect != "ort":
        choices = {"--for": request.purpose != QuantizeRequest.purpose, "--rows": request.rows is not None}
        needed = "for --target ort-cpu, where costs are measured"
    reasons += [f"{name} is {needed}" for name, is_set in choices.items() if is_set]
    if request.rows is not None and request.rows < 1:
        reasons.append(f"rows must be 1 or more, found {request.rows}")
    if reasons:
        raise ConfigError(in_one_line("the model cannot be quantized like this", reasons))
    if request.activations == "int8":
        check_cpu(request.cpu)
