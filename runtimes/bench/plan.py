"""What a bench measures: the settings that were asked for, checked against what each bundle can do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.bench.weight_bytes import bytes_a_step_reads
from fatdeploy.targets import TARGETS

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.bundle import Bundle

# Each is a process of its own a bundle and number of threads: what changes between processes shows in the percentiles.
MOST_ROUNDS = 4


@dataclass(frozen=True)
class Setting:
    """What is decoded at once: so many sources, with so many beams each."""

    batch: int
    beams: int

    @property
    def rows(self) -> int:
        return self.batch * self.beams


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The options of a bench; those in ``defaults`` nobody typed, so that a bundle may lower them."""

    batch: tuple[int, ...]
    source: int
    target: int
    beams: tuple[int, ...]
    threads: tuple[int, ...]
    repetitions: int
    spinning: bool = True
    defaults: frozenset[str] = frozenset()

    @property
    def rounds(self) -> int:
        """How many processes measure each bundle with each number of threads."""
        return min(MOST_ROUNDS, self.repetitions)

    def repetitions_of(self, index: int) -> int:
        """Return how many repetitions a round has."""
        return self.repetitions // self.rounds + (index < self.repetitions % self.rounds)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one process measures: a bundle with so many threads, every setting so often."""

    bundle: str
    threads: int
    spinning: bool
    source: int
    target: int
    settings: tuple[Setting, ...]
    repetitions: int
    decoder_bytes: int
    cuda_graphs: bool = True  # of engines that record their steps
    thorough: bool  # also every row alone and one batch twice, which takes long and need not be done in every round


@dataclass(frozen=True)
class BenchPlan:
    """What is measured of one bundle, and what was lowered for it."""

    label: str
    bundle: "Bundle"
    asked: BenchRequest
    decoder_bytes: int  # of the weights that a step reads
    notes: tuple[str, ...]
    cuda_graphs: bool = True  # of engines that record their steps

    @property
    def parallel(self) -> bool:
        return self.bundle.spec.decoding == "parallel"

    @property
    def settings(self) -> tuple[Setting, ...]:
        """From few rows to many: the peak of memory after each is that of a process which ran no larger one."""
        every = (Setting(batch, beams) for batch in self.asked.batch for beams in self.asked.beams)
        return tuple(sorted(every, key=lambda one: (one.rows, one.batch)))

    def turn(self, threads: int, index: int) -> Turn:
        """Return what the process of a round does."""
        return Turn(
            bundle=str(self.bundle.path),
            threads=threads,
            spinning=self.asked.spinning,
            source=self.asked.source,
            target=self.asked.target,
            settings=self.settings,
            repetitions=self.asked.repetitions_of(index),
            decoder_bytes=self.decoder_bytes,
            cuda_graphs=self.cuda_graphs,
            thorough=index == 0,
        )


def plans_for(bundles: "dict[str, Bundle]", asked: BenchRequest) -> list[BenchPlan]:
    """Return what is measured of each bundle; whatever one of them cannot do is refused, all at once."""
    reasons = [reason for label, bundle in bundles.items() for reason in _wrong(label, bundle, asked)]
    if reasons:
        raise ConfigError(in_one_line("bench refused", reasons))
    return [plan for label, bundle in bundles.items() for plan in _by_capture(_plan(label, bundle, asked))]


def _by_capture(plan: BenchPlan) -> Iterator[BenchPlan]:
    """Yield a plan, or two of a bundle whose engine can record steps: with and without, under names of their own."""
    if not TARGETS[plan.bundle.manifest.target].captures_steps:
        yield plan
        return
    yield replace(plan, label=f"{plan.label}, steps recorded")
    yield replace(plan, label=f"{plan.label}, steps not recorded", notes=(), cuda_graphs=False)


def fitting_threads(asked: BenchRequest, cores: int) -> BenchRequest:
    """Return the options with as many threads as there are cores at most; more that were typed are refused."""
    if "threads" in asked.defaults:
        return replace(asked, threads=tuple(number for number in asked.threads if number <= cores) or (1,))
    if max(asked.threads) > cores:
        raise ConfigError(f"--threads must lie in 1…{cores} (the cores that this process has), found {asked.threads}")
    return asked


@dataclass(frozen=True)
class Limit:
    """The largest value of an option that a bundle takes, and why."""

    option: str
    most: int
    why: str


def _limits(bundle: "Bundle") -> Iterator[Limit]:
    spec = bundle.spec
    yield Limit("source", spec.max_source, "its max_source")
    yield Limit("target", spec.max_target, "its max_target")
    if spec.decoding == "parallel":
        yield Limit("beams", 1, "it says all tokens at once")
    else:
        yield Limit("beams", max(1, spec.vocab_size // 2), "half its vocabulary")


def _given(asked: BenchRequest, option: str) -> tuple[int, ...]:
    values = {"source": (asked.source,), "target": (asked.target,), "beams": asked.beams}
    return values[option]


def _wrong(label: str, bundle: "Bundle", asked: BenchRequest) -> Iterator[str]:
    for limit in _limits(bundle):
        largest = max(_given(asked, limit.option))
        if largest > limit.most and limit.option not in asked.defaults:
            yield f"--{limit.option} must lie in 1…{limit.most} for {label} ({limit.why}), found {largest}"


def _plan(label: str, bundle: "Bundle", asked: BenchRequest) -> BenchPlan:
    """Return the plan of a bundle; what nobody typed is lowered to what it takes, and told."""
    from fatdeploy.manifest import DECODER

    notes = []
    if TARGETS[bundle.manifest.target].needs_gpu and len(asked.threads) > 1:
        notes.append(f"{label}: --threads {_listed(asked.threads)} lowered to {asked.threads[0]} (it is for a GPU)")
        asked = replace(asked, threads=asked.threads[:1])
    for limit in _limits(bundle):
        given = _given(asked, limit.option)
        fitting = tuple(dict.fromkeys(min(value, limit.most) for value in given))
        if fitting != given:
            notes.append(f"{label}: --{limit.option} {_listed(given)} lowered to {_listed(fitting)} ({limit.why})")
        asked = _lowered(asked, limit.option, fitting)
    return BenchPlan(label, bundle, asked, bytes_a_step_reads(bundle.file(DECODER)), tuple(notes))


def _lowered(asked: BenchRequest, option: str, values: tuple[int, ...]) -> BenchRequest:
    match option:
        case "source":
            return replace(asked, source=values[0])
        case "target":
            return replace(asked, target=values[0])
        case _:
            return replace(asked, beams=values)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
