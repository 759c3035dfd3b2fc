"""What of each GPU target works on a machine, and what is missing for the rest."""

from collections.abc import Collection
from dataclasses import dataclass

from fatdeploy.runtimes.cuda_devices import Cuda
from fatdeploy.runtimes.packages import CUDA_PYTHON, GPU_RUNTIME, TENSORRT, TENSORRT_RTX, Package

DEVICE = "a CUDA device"


@dataclass(frozen=True)
class Work:
    """Something that is done with a target: the packages that it takes, and whether it takes a GPU."""

    name: str
    packages: tuple[Package, ...]
    needs_device: bool = True


@dataclass(frozen=True)
class Ability:
    """Whether something can be done here, or what is missing for it."""

    target: str
    work: str
    missing: tuple[str, ...]

    @property
    def works(self) -> bool:
        return not self.missing

    def as_dict(self) -> dict[str, object]:
        return {"target": self.target, "work": self.work, "works": self.works, "missing": list(self.missing)}


# RTX compiles ahead of time, for compute capabilities that are named; TensorRT makes plans on the GPU they are for.
WORKS: dict[str, tuple[Work, ...]] = {
    "ort-cuda": (Work("run", (GPU_RUNTIME,)),),
    "tensorrt": (Work("build engines", (TENSORRT,)), Work("run", (TENSORRT, CUDA_PYTHON))),
    "tensorrt-rtx": (
        Work("build engines", (TENSORRT_RTX,), needs_device=False),
        Work("run", (TENSORRT_RTX, CUDA_PYTHON)),
    ),
}


def abilities(whole: Collection[str], cuda: Cuda) -> tuple[Ability, ...]:
    """Return what can be done with each target, given the packages that are here and not broken."""
    return tuple(
        Ability(target, work.name, _missing(work, whole, cuda)) for target, works in WORKS.items() for work in works
    )


def ability_line(ability: Ability) -> tuple[str, str, str]:
    """Return target, work and verdict for a human."""
    verdict = "works here, as far as can be seen without doing it" if ability.works else _needs(ability.missing)
    return ability.target, ability.work, verdict


def _missing(work: Work, whole: Collection[str], cuda: Cuda) -> tuple[str, ...]:
    missing = [package.name for package in work.packages if package.name not in whole]
    if work.needs_device and not cuda.devices:
        missing.append(DEVICE)
    return tuple(missing)


def _needs(missing: tuple[str, ...]) -> str:
    return f"missing: {', '.join(missing)}"
