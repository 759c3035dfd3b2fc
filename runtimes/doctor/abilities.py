"""What a machine can do with each GPU target, and what is missing for the rest."""

from collections.abc import Collection
from dataclasses import dataclass

from fatdeploy.runtimes.doctor.cuda_driver import Cuda
from fatdeploy.targets import TARGETS, TargetRecord

DEVICE = "a CUDA device"


@dataclass(frozen=True)
class Work:
    """A use of a target: the packages that it needs, and whether it needs a GPU."""

    name: str
    packages: tuple[str, ...]
    needs_device: bool = True


@dataclass(frozen=True)
class Ability:
    """Whether a use of a target is possible here, or what is missing for it."""

    target: str
    work: str
    missing: tuple[str, ...]

    @property
    def works(self) -> bool:
        return not self.missing

    def as_dict(self) -> dict[str, object]:
        return {"target": self.target, "work": self.work, "works": self.works, "missing": list(self.missing)}


def abilities(working: Collection[str], cuda: Cuda) -> tuple[Ability, ...]:
    """Return what can be done with each target, given the packages that are installed and not broken."""
    return tuple(
        Ability(record.name, work.name, _missing(work, working, cuda))
        for record in TARGETS.values()
        if record.needs_gpu
        for work in works_of(record)
    )


def works_of(record: TargetRecord) -> tuple[Work, ...]:
    """Return the uses of a target."""
    build = Work("build engines", record.build_packages, needs_device=not record.builds_ahead)
    run = Work("run", record.run_packages)
    return (build, run) if record.build_packages else (run,)


def ability_line(ability: Ability) -> tuple[str, str, str]:
    """Return target, work and verdict for a human."""
    verdict = "works here, as far as can be seen without doing it" if ability.works else _needs(ability.missing)
    return ability.target, ability.work, verdict


def _missing(work: Work, working: Collection[str], cuda: Cuda) -> tuple[str, ...]:
    missing = [name for name in work.packages if name not in working]
    if work.needs_device and not cuda.devices:
        missing.append(DEVICE)
    return tuple(missing)


def _needs(missing: tuple[str, ...]) -> str:
    return f"missing: {', '.join(missing)}"
