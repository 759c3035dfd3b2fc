"""What a bench measures: the requested settings, checked against the limits of each bundle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.bench.weight_bytes import bytes_a_step_reads
from fatdeploy.targets import TARGETS

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.bundle import Bundle

# Each round is a new process per bundle and number of threads: percentiles show what varies between processes.
MOST_ROUNDS = 4


@dataclass(frozen=True)
class Setting:
    """What is decoded at once: a number of sources with a number of beams each."""

    batch: int
    beams: int

    @property
    def rows(self) -> int:
        return self.batch * self.beams


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The options of a bench; ``defaults`` names those that were not typed, which a bundle may lower."""

    batch: tuple[int, ...]
    source: int
    target: int
    beams: tuple[int, ...]
    threads: tuple[int, ...]
    repetitions: int
    spinning: bool = True
    no_defaults: bool = False  # without the default options of the bundles
    defaults: frozenset[str] = frozenset()

    @property
    def rounds(self) -> int:
        """Number of processes per bundle and number of threads."""
        return min(MOST_ROUNDS, self.repetitions)

    def repetitions_of(self, index: int) -> int:
        """Return the number of repetitions in a round."""
        return self.repetitions // self.rounds + (index < self.repetitions % self.rounds)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one process measures: each setting of a bundle with one number of threads."""

    bundle: str
    threads: int
    spinning: bool
    source: int
    target: int
    settings: tuple[Setting, ...]
    repetitions: int
    decoder_bytes: int
    cuda_graphs: bool = True  # for engines that can record steps
    plain: bool = False  # without the bundle's default options
    thorough: bool  # also check every row alone and one batch twice: slow, and enough in one round


@dataclass(frozen=True)
class BenchPlan:
    """What is measured of one bundle, and notes on the options that were lowered for it."""

    label: str
    bundle: "Bundle"
    request: BenchRequest
    decoder_bytes: int  # weights that a step reads
    notes: tuple[str, ...]
    cuda_graphs: bool = True  # for engines that can record steps

    @property
    def parallel(self) -> bool:
        return self.bundle.spec.decoding == "parallel"

    @property
    def settings(self) -> tuple[Setting, ...]:
        """From few rows to many, so that the memory peak of a setting is not that of a larger one."""
        settings = (Setting(batch, beams) for batch in self.request.batch for beams in self.request.beams)
        return tuple(sorted(settings, key=lambda setting: (setting.rows, setting.batch)))

    def turn(self, threads: int, index: int) -> Turn:
        """Return the turn of a round."""
        return Turn(
            bundle=str(self.bundle.path),
            threads=threads,
            spinning=self.request.spinning,
            source=self.request.source,
            target=self.request.target,
            settings=self.settings,
            repetitions=self.request.repetitions_of(index),
            decoder_bytes=self.decoder_bytes,
            cuda_graphs=self.cuda_graphs,
            plain=self.request.no_defaults,
            thorough=index == 0,
        )


def plans_for(bundles: "dict[str, Bundle]", request: BenchRequest) -> list[BenchPlan]:
    """Return the plans of all bundles; raise with every option that is beyond the limits of a bundle."""
    reasons = [reason for label, bundle in bundles.items() for reason in _wrong(label, bundle, request)]
    if reasons:
        raise ConfigError(in_one_line("bench refused", reasons))
    return [plan for label, bundle in bundles.items() for plan in _by_capture(_plan(label, bundle, request))]


def _by_capture(plan: BenchPlan) -> Iterator[BenchPlan]:
    """Yield a plan, or two if the engine can record steps: with and without, under different labels."""
    if not TARGETS[plan.bundle.manifest.target].captures_steps:
        yield plan
        return
    yield replace(plan, label=f"{plan.label}, steps recorded")
    yield replace(plan, label=f"{plan.label}, steps not recorded", notes=(), cuda_graphs=False)


def fitting_threads(request: BenchRequest, cores: int) -> BenchRequest:
    """Return the options with at most one thread per core; raise if more were typed."""
    if "threads" in request.defaults:
        return replace(request, threads=tuple(number for number in request.threads if number <= cores) or (1,))
    if max(request.threads) > cores:
        raise ConfigError(f"--threads must lie in 1…{cores} (the cores of this process), found {request.threads}")
    return request


@dataclass(frozen=True)
class Limit:
    """The largest value of an option that a bundle accepts, and why."""

    option: str
    most: int
    why: str


def _limits(bundle: "Bundle") -> Iterator[Limit]:
    spec = bundle.spec
    yield Limit("source", spec.max_source, "its max_source")
    yield Limit("target", spec.max_target, "its max_target")
    if spec.decoding == "parallel":
        yield Limit("beams", 1, "it generates all tokens at once")
    else:
        yield Limit("beams", max(1, spec.vocab_size // 2), "half its vocabulary")


def _values(request: BenchRequest, option: str) -> tuple[int, ...]:
    values = {"source": (request.source,), "target": (request.target,), "beams": request.beams}
    return values[option]


def _wrong(label: str, bundle: "Bundle", request: BenchRequest) -> Iterator[str]:
    for limit in _limits(bundle):
        largest = max(_values(request, limit.option))
        if largest > limit.most and limit.option not in request.defaults:
            yield f"--{limit.option} must lie in 1…{limit.most} for {label} ({limit.why}), found {largest}"


def _plan(label: str, bundle: "Bundle", request: BenchRequest) -> BenchPlan:
    """Return the plan of a bundle, with defaults lowered to its limits and a note about each."""
    from fatdeploy.manifest import DECODER

    notes = []
    if TARGETS[bundle.manifest.target].needs_gpu and len(request.threads) > 1:
        notes.append(f"{label}: --threads {_listed(request.threads)} lowered to {request.threads[0]} (it is for a GPU)")
        request = replace(request, threads=request.threads[:1])
    beams = _own_beams(bundle, request)
    if beams != request.beams:
        notes.append(f"{label}: --beams {_listed(request.beams)} changed to {_listed(beams)} (its default options)")
        request = replace(request, beams=beams)
    for limit in _limits(bundle):
        values = _values(request, limit.option)
        fitting = tuple(dict.fromkeys(min(value, limit.most) for value in values))
        if fitting != values:
            notes.append(f"{label}: --{limit.option} {_listed(values)} lowered to {_listed(fitting)} ({limit.why})")
        request = _lowered(request, limit.option, fitting)
    return BenchPlan(label, bundle, request, bytes_a_step_reads(bundle.file(DECODER)), tuple(notes))


def _own_beams(bundle: "Bundle", request: BenchRequest) -> tuple[int, ...]:
    """Return the numbers of beams to measure: greedy, and what the bundle decodes with, unless some were typed."""
    from fatdeploy.runtimes.defaults import default_options

    if request.no_defaults or "beams" not in request.defaults:
        return request.beams
    own = default_options(bundle).num_beams
    return request.beams if own == 1 else (1, own)


def _lowered(request: BenchRequest, option: str, values: tuple[int, ...]) -> BenchRequest:
    match option:
        case "source":
            return replace(request, source=values[0])
        case "target":
            return replace(request, target=values[0])
        case _:
            return replace(request, beams=values)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
