"""The certificate of a bundle: what was compared with the reference, where, with which result. Read and written here.

The names of the fields are the keys of ``parity.json``.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleError
from fatdeploy.machine import Machine
from fatdeploy.manifest import FORMAT, PARITY
from fatdeploy.records import RecordReader, json_from_record
from fatdeploy.targets import CpuClass, Precision

HIGHER_IS_BETTER = frozenset({"bleu", "chrf", "exact_match"})


@dataclass(frozen=True)
class Parity:
    """An fp32 bundle that chose every token of the reference, within the noise of float32."""

    probes: int
    rows: int
    tokens: int
    different_tokens: int
    largest_difference: float  # of the chosen tokens' logits
    largest_difference_alone: float  # the same, every row of a batch decoded alone
    bound: float
    smallest_margin: float

    def line(self) -> str:
        """Return the result in one line."""
        return (
            f"{self.tokens} tokens of {self.rows} rows are the reference's; chosen logits within "
            f"{self.largest_difference:.1e} (bound {self.bound:.1e}), smallest margin {self.smallest_margin:.1e}"
        )


@dataclass(frozen=True)
class HalfParity:
    """How close a bundle in half precision is to the reference when it reads the reference's tokens."""

    probes: int
    rows: int
    tokens: int
    same: int  # tokens that are the reference's
    agreement: float
    least_agreement: float | None  # what was required; None for random weights, which decide by little
    largest_difference: float  # of any logit
    largest_logit: float
    largest_difference_alone: float  # of any logit, between a row in its batch and the same row alone
    different_tokens_alone: int

    def line(self) -> str:
        """Return the result in one line."""
        return (
            f"{self.same} of {self.tokens} tokens of {self.rows} rows ({self.agreement:.2%}) are the reference's, each "
            f"after its own; logits up to {self.largest_logit:.1f} within {self.largest_difference:.1e}, in a batch "
            f"and alone within {self.largest_difference_alone:.1e}"
        )


@dataclass(frozen=True)
class LogitAgreement:
    """How close every logit of every step was to the live reference's."""

    rows: int
    tokens: int
    ties: int
    largest_difference: float
    largest_of_bound: float  # the same, as a part of its bound
    smallest_margin: float

    def line(self) -> str:
        """Return the result in one line."""
        return (
            f"{self.tokens} tokens of {self.rows} random sources agree but for {self.ties} ties; all logits within "
            f"{self.largest_difference:.1e} ({self.largest_of_bound:.0%} of the bound), smallest margin "
            f"{self.smallest_margin:.1e}"
        )


@dataclass(frozen=True)
class TokenAgreement:
    """How often an engine chooses the reference's token: each step after the reference's own tokens, and by itself."""

    tokens: int
    same_tokens: int
    sequences: int
    same_sequences: int
    share: float = field(init=False)  # of steps with the reference's token

    def __post_init__(self) -> None:
        if not 0 <= self.same_tokens <= self.tokens or not self.tokens:
            raise ValueError(f"expected some of at least one token, found {self.same_tokens} of {self.tokens}")
        object.__setattr__(self, "share", self.same_tokens / self.tokens)

    def line(self) -> str:
        """Return the counts in one line."""
        return (
            f"{self.share:.2%} of {self.tokens} tokens and {self.same_sequences} of {self.sequences} targets are the "
            "reference's"
        )


@dataclass(frozen=True)
class MetricChange:
    """A metric of the reference's targets, and of the quantized bundle's."""

    name: str
    reference: float
    quantized: float
    lost: float = field(init=False)  # points by which the quantized bundle is worse

    def __post_init__(self) -> None:
        change = self.quantized - self.reference
        object.__setattr__(self, "lost", -change if self.name in HIGHER_IS_BETTER else change)

    def line(self) -> str:
        """Return both values in one line."""
        return f"{self.name} {self.quantized:.2f} (reference {self.reference:.2f})"


@dataclass(frozen=True)
class MatrixPlan:
    """How the exporter stored a matrix, and why.

    ``error`` is what that form was expected to cost, as divergence of the next token's distribution, ``cost`` what it
    was measured to take: microseconds per step, or bytes if ``in_bytes``.
    """

    name: str
    kind: str
    error: float
    cost: float
    in_bytes: bool = False


SINCE_PLANS = ("by_metric", "rows", "plan")


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """What the gate measured for a quantized bundle, and the bar that it had to reach if ``enforced``.

    Errors of logits are relative to the reference's margin between its two best tokens. ``kept`` names the matrices
    that stayed in a higher precision to pass. ``by_metric`` says that lost points of the metric decided: ``bar`` is
    then what a device must keep. ``rows`` is how many rows a step of the ``plan`` has.
    """

    agreement: TokenAgreement
    metric: MetricChange | None
    median_error_of_margin: float
    steps_in_danger: float  # the share whose error is more than half of the margin, so that the token might change
    bar: float
    points: float
    enforced: bool
    kept: tuple[str, ...]
    row_difference: float
    by_metric: bool = False
    rows: int = 1
    plan: tuple[MatrixPlan, ...] = ()

    def line(self, precision: str) -> str:
        """Return how close a quantized bundle is to the reference, in one line."""
        parts = [f"{precision}: {self.agreement.line()}"]
        if self.metric is not None:
            parts.append(f", {self.metric.line()}")
        if self.kept:
            parts.append(f"; kept in a higher precision: {', '.join(self.kept)}")
        if not self.enforced:
            parts.append(" (random weights: reported, no bar)")
        return "".join(parts)


@dataclass(frozen=True)
class CpuCheck:
    """A kind of CPU on which a quantized bundle was checked, and its share of the reference's tokens there."""

    cpu_class: CpuClass | None
    share: float
    machine: Machine | None = None


@dataclass(frozen=True)
class OwnGraphs:
    """What running a half-precision bundle's own graphs showed, where that is possible; ``executed`` says what ran."""

    executed: str
    parity: HalfParity | None = None


@dataclass(frozen=True)
class CudaRecord:
    """What is known about a bundle for onnxruntime's CUDA provider on a machine without one."""

    executed: str
    ops_without_cuda_kernel: dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class GenerateAgreement:
    """Targets that equal those of the original's ``generate``; a tie is another target with the same score."""

    settings: str
    targets: int
    ties: int
    num_beams: int


@dataclass(frozen=True, kw_only=True)
class OriginalAgreement:
    """How close an imported model and its fp32 bundle are to the original, as the original's own package runs it."""

    versions: dict[str, str]  # of the package
    dtype: Literal["float64", "float32"]
    positions: int
    largest_relative_difference: float  # of any logit, relative to the largest
    generated: tuple[GenerateAgreement, ...]

    def line(self) -> str:
        """Return the result in one line."""
        [(package, version)] = self.versions.items()
        targets = ", ".join(
            f"{result.targets - result.ties} of {result.targets} targets with {result.settings}"
            for result in self.generated
        )
        return (
            f"{package} {version} gives {targets}; logits at {self.positions} positions within "
            f"{self.largest_relative_difference:.1e} of the largest in {self.dtype}"
        )


@dataclass(frozen=True)
class OriginalRecord:
    """What an imported model was compared with; ``compared`` says it in words."""

    compared: str
    agreement: OriginalAgreement | None = None

    def line(self) -> str:
        """Return the result in one line."""
        return f"compared with {self.compared}" if self.agreement is None else self.agreement.line()


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was proved where a bundle was exported.

    ``agreement`` compares all logits with the live reference (fp32 graphs). ``precision`` and ``gate`` are there for
    quantized bundles, whose ``parity`` is that of their fp32 graphs. ``executed`` and ``own_graphs`` are there for half
    precision, ``cuda`` for bundles that onnxruntime's CUDA provider runs, ``original`` for imported models.
    """

    engine: str
    parity: Parity | HalfParity
    probes_sha256: str
    versions: dict[str, str]
    machine: Machine
    agreement: LogitAgreement | None = None
    precision: Precision | None = None
    gate: GateResult | None = None
    checked_on: tuple[CpuCheck, ...] = ()
    executed: str | None = None
    own_graphs: OwnGraphs | None = None
    cuda: CudaRecord | None = None
    original: OriginalRecord | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; what a bundle of this kind does not have is left out."""
        values: dict[str, Any] = json_from_record(self)
        own = values["own_graphs"]
        if own is not None:
            values["own_graphs"] = {"executed": own["executed"], **(own["parity"] or {})}
        if self.gate is not None and not self.gate.plan:
            # Written before there were plans.
            values["gate"] = {name: values["gate"][name] for name in values["gate"] if name not in SINCE_PLANS}
        return {name: value for name, value in values.items() if value is not None and value != []}

    def needed_gate(self, path: Path) -> GateResult:
        """Return the gate's result; without one the certificate at ``path`` is not a quantized bundle's."""
        if self.gate is None:
            raise _unreadable(path, "gate: missing")
        return self.gate


def write_certificate(folder: Path, certificate: Certificate) -> None:
    """Write the certificate of the bundle in a folder."""
    (folder / PARITY).write_text(json.dumps(certificate.as_dict(), indent=2, sort_keys=True) + "\n")


def read_certificate(bundle: Bundle) -> Certificate:
    """Return the certificate of a bundle of any format so far; one that is damaged is a BundleError."""
    path = bundle.file(PARITY)
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error
    # The rule of the manifest: a later minor may add keys at the top.
    reader = RecordReader(allow_unknown=bundle.manifest.format[1] > FORMAT[1], allow_missing=True)
    certificate = reader.read(Certificate, _nested(values))
    if certificate is None:
        raise _unreadable(path, "; ".join(reader.reasons))
    return certificate


def _nested(values: Any) -> Any:
    """Return the values with the numbers of ``own_graphs``, which stand beside its text, in a record of their own."""
    own = values.get("own_graphs") if isinstance(values, dict) else None
    if not isinstance(own, dict):
        return values
    numbers = {name: value for name, value in own.items() if name != "executed"}
    return {**values, "own_graphs": {"executed": own.get("executed"), "parity": numbers or None}}


def _unreadable(path: Path, reason: str) -> BundleError:
    return BundleError(f"{path} cannot be read: {reason}; export the bundle again")
