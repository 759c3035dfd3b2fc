"""One door for every precision: run what came with a bundle on this machine, and hold it to its certificate."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.certificate import LogitAgreement, OriginalRecord, Parity, TokenAgreement, read_certificate
from fatdeploy.errors import ConfigError, ParityFailed
from fatdeploy.exporter import exporter
from fatdeploy.manifest import PARITY, PROBES
from fatdeploy.runtimes.engines.opening import opened_engine
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.cpu_checks import record_here
from fatdeploy.runtimes.proof.fidelity import Fidelity, token_fidelity
from fatdeploy.runtimes.proof.gate import check_rows, material_from_probe, read_material, row_kind, token_agreement
from fatdeploy.runtimes.proof.probes import read_probes, verified
from fatdeploy.runtimes.proof.promise import promise_of

Item = TypeVar("Item")
# Shows how far a list has come while somebody goes through it.
Progress = Callable[[list[Item]], AbstractContextManager[Iterable[Item]]]


@dataclass(frozen=True)
class HalfCheck:
    """How close a bundle in half precision is to the reference here, each step after the reference's own tokens."""

    rows: int
    tokens: int
    same: int
    recorded_share: float  # when it was exported
    bar: float | None  # None for random weights
    row_difference: float  # between a row in its batch and the row alone, relative to the largest logit
    share: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", self.same / self.tokens)

    def line(self) -> str:
        """Return the result in one line."""
        bar = "random weights: judged by the export's" if self.bar is None else f"the bar is {self.bar:.2%}"
        return (
            f"{self.same} of {self.tokens} tokens of {self.rows} rows ({self.share:.2%}) are the reference's, each "
            f"after its own ({bar}; {self.recorded_share:.2%} when it was exported); a row of a batch "
            f"{_row_words(self.row_difference)}"
        )


@dataclass(frozen=True)
class GateCheck(TokenAgreement):
    """How close a quantized bundle is to the reference here, on the sources of its gate."""

    recorded_share: float  # when it was exported
    bar: float
    enforced: bool
    row_difference: float  # between a row in its batch and the row alone, relative to the largest logit

    def line(self) -> str:
        """Return the result in one line."""
        bar = f"the bar is {self.bar:.2%}" if self.enforced else "random weights: judged by the export's"
        return (
            f"{self.same_tokens} of {self.tokens} tokens ({self.share:.2%}) and {self.same_sequences} of "
            f"{self.sequences} targets are the reference's ({bar}; {self.recorded_share:.2%} when it was exported); "
            f"a row of a batch {_row_words(self.row_difference)}"
        )


@dataclass(frozen=True)
class Verification:
    """A bundle that keeps the promise of its certificate on this machine.

    ``result`` is a ``Parity`` for fp32, a ``HalfCheck`` for fp16 and bf16, a ``GateCheck`` for int8 and int4.
    ``against`` is the comparison with the live model, where one was asked for, and ``original`` that with the model it
    was imported from.
    """

    bundle: Bundle
    result: Parity | HalfCheck | GateCheck
    against: LogitAgreement | None = None
    original: OriginalRecord | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        others = {"against": self.against, "original": self.original}
        return asdict(self.result) | {name: asdict(value) for name, value in others.items() if value is not None}

    def line(self) -> str:
        """Return the result in one line."""
        return self.result.line()


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """What to compare a bundle with beyond its probes: a model that ``export`` takes, on random sources."""

    source: str
    count: int = 32
    seed: int = 1


def verify(
    path: str | Path,
    *,
    against: str | LiveModel | None = None,
    record: bool = False,
    emulated: bool = False,
    progress: Progress[Any] = nullcontext,
    **engine_options: Any,
) -> Verification:
    """Check on this machine that a bundle keeps its certificate's promise; a difference is ``ParityFailed``.

    fp32 must give the reference's tokens, half precision and integers as many as their bar asks for; in every
    precision a row of a batch must get what it gets alone. ``against`` also compares with the live model, ``record``
    adds this kind of CPU to the certificate of a quantized bundle, and ``emulated`` runs half precision in float32 with
    every result rounded, for machines without kernels for it; ``against`` and ``emulated`` need ``fatdeploy[export]``.
    ``engine_options`` are those of ``fatdeploy.load``.
    """
    bundle = read_bundle(path)
    _check_options(bundle, against is not None, record, emulated)
    live = LiveModel(source=against) if isinstance(against, str) else against
    with _engine(bundle, emulated, engine_options) as engine:
        result = verified_bundle(bundle, engine)
        agreement, original = None, None
        if live is not None:
            compare = exporter("proof.live_model").compared_with_model
            agreement, original = compare(bundle, engine, live.source, live.count, live.seed, progress)
    bundle.check_unchanged()
    if record and isinstance(result, GateCheck):
        record_here(bundle, result.share)
    return Verification(bundle, result, agreement, original)


def verified_bundle(bundle: Bundle, engine: Engine[Any]) -> Parity | HalfCheck | GateCheck:
    """Return how close an engine's answers are to the reference's, by the rules of the bundle's precision."""
    if bundle.manifest.quantization is not None:
        return verified_quantized(bundle, engine)
    if bundle.manifest.precision == "fp32":
        return verified(engine, read_probes(bundle.file(PROBES)))
    return verified_half(bundle, engine)


def verified_half(bundle: Bundle, engine: Engine[Any]) -> HalfCheck:
    """Return how close a bundle in half precision is to the reference here; below its promise is ParityFailed."""
    promise, probes = promise_of(bundle), read_probes(bundle.file(PROBES))
    difference = max(check_rows(engine, material_from_probe(probe), bundle.manifest.precision) for probe in probes)
    fidelity = token_fidelity(engine, probes)
    if (reason := promise.lost(fidelity)) is not None:
        raise ParityFailed(f"{reason}: this device computes something else; export again in fp32, or bf16 for fp16")
    rows = sum(len(probe.tokens) for probe in probes)
    return HalfCheck(rows, fidelity.tokens, fidelity.same, promise.share, promise.bar, difference)


def verified_quantized(bundle: Bundle, engine: Engine[Any]) -> GateCheck:
    """Return how close a quantized bundle is to the reference here; below its promise is ParityFailed."""
    gate = read_certificate(bundle).needed_gate(bundle.path / PARITY)
    material = read_material(bundle)
    difference = check_rows(engine, material, row_kind(bundle.manifest.precision, bundle.manifest.quantization))
    counts = token_agreement(engine, material)
    if (reason := promise_of(bundle).lost(Fidelity(counts.tokens, counts.same_tokens))) is not None:
        raise ParityFailed(f"{reason}: this CPU computes something else; export again with --cpu any, or in fp32")
    return GateCheck(
        *(counts.tokens, counts.same_tokens, counts.sequences, counts.same_sequences),
        *(gate.agreement.share, gate.bar, gate.enforced, difference),
    )


@contextmanager
def _engine(bundle: Bundle, emulated: bool, options: dict[str, Any]) -> Iterator[Engine[Any]]:
    if emulated:
        with exporter("proof.certify_half").emulated_engine(bundle) as engine:
            yield engine
    else:
        with closing(opened_engine(bundle, **options)) as engine:
            yield engine


def _check_options(bundle: Bundle, against: bool, record: bool, emulated: bool) -> None:
    precision = bundle.manifest.precision
    reasons = []
    if record and bundle.manifest.quantization is None:
        reasons.append(f"record is for quantized bundles, found {precision}: its promise holds on every CPU")
    if against and precision != "fp32":
        reasons.append(f"against compares the logits of fp32, found {precision}: leave it out")
    if emulated and precision not in ("fp16", "bf16"):
        reasons.append(f"emulated is for fp16 and bf16, found {precision}: leave it out")
    if reasons:
        raise ConfigError(f"verify refused: {'; '.join(reasons)}")


def _row_words(difference: float) -> str:
    return f"differs from the row alone by {difference:.0e}" if difference else "equals the row alone, bit for bit"
