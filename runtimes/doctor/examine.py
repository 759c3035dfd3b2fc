"""What this machine can do and what it lacks: packages, devices, problems, and what to type for each."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from fatdeploy.machine import Machine, this_machine
from fatdeploy.runtimes.doctor.abilities import Ability, abilities
from fatdeploy.runtimes.doctor.cuda_driver import Cuda, cuda_here
from fatdeploy.runtimes.doctor.packages import (
    ALTERNATIVES,
    CONFLICT,
    CONFLICT_FIX,
    CPU_RUNTIME,
    GPU_RUNTIME,
    PACKAGES,
    TENSORRT,
    TENSORRT_RTX,
    Package,
    extra_of,
    install_command,
    installed_versions,
)


class PackageState(StrEnum):
    """Whether a package is installed, and whether it is intact."""

    PRESENT = "present"
    MISSING = "missing"
    BROKEN = "broken"


class Kind(StrEnum):
    """The kind of a problem; a limit is worth knowing and needs no repair."""

    CONFLICT = "conflict"
    BROKEN = "broken"
    LIMIT = "limit"


# A package that was built with them lists them whether or not the libraries they need are installed.
UNPROVED_PROVIDERS = ("CUDAExecutionProvider", "NvTensorRTRTXExecutionProvider", "TensorrtExecutionProvider")


@dataclass(frozen=True)
class PackageReport:
    """The state of a package here; ``install`` is what to type if it is missing or broken."""

    name: str
    purpose: str
    state: PackageState
    version: str | None = None
    detail: str = ""
    install: str | None = None


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and what to type to fix it."""

    kind: Kind
    message: str
    fix: str | None = None


@dataclass(frozen=True)
class Report:
    """Everything that the doctor reports."""

    machine: Machine
    parts: tuple[PackageReport, ...]
    cuda: Cuda
    targets: tuple[Ability, ...]
    problems: tuple[Problem, ...]

    @property
    def healthy(self) -> bool:
        return all(problem.kind is Kind.LIMIT for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self), "targets": [ability.as_dict() for ability in self.targets]}


class BrokenInstallError(Exception):
    """A package is installed and cannot be used; the message says why."""


def examine() -> Report:
    """Examine this machine and its packages; problems are reported, never raised."""
    cuda = cuda_here()
    versions = installed_versions()
    parts = tuple(part_from_package(package, versions, cuda) for package in PACKAGES)
    targets = abilities({part.name for part in parts if part.state is PackageState.PRESENT}, cuda)
    return Report(this_machine(), parts, cuda, targets, tuple(problems_of({part.name: part for part in parts}, cuda)))


def part_from_package(package: Package, versions: Mapping[str, str], cuda: Cuda) -> PackageReport:
    """Return the state of a package, given the versions of all installed packages."""
    if package.name not in versions:
        remark, install = remark_on(package, versions, cuda), install_command(package, versions)
        return PackageReport(package.name, package.purpose, PackageState.MISSING, None, remark, install)
    version = versions[package.name] or None
    try:
        check_files(package, version)
        detail = onnxruntime_providers() if package.module == CPU_RUNTIME.module else ""
    except BrokenInstallError as reason:
        repair = f"pip uninstall -y {package.name} && pip install 'fatdeploy[{extra_of(package, versions)}]'"
        return PackageReport(package.name, package.purpose, PackageState.BROKEN, version, str(reason), repair)
    return PackageReport(package.name, package.purpose, PackageState.PRESENT, version, detail)


def remark_on(package: Package, versions: Mapping[str, str], cuda: Cuda) -> str:
    """Return what to know before installing a missing package."""
    if package is CPU_RUNTIME and GPU_RUNTIME.name in versions:
        return "not needed: onnxruntime-gpu runs on the CPU too"
    if package.extra == "export" and GPU_RUNTIME.name in versions:
        return "in another environment, for it brings onnxruntime, which overwrites onnxruntime-gpu:"
    if package.needs_device and not cuda.devices:
        return "no CUDA device here; with one:"
    return ""


def check_files(package: Package, version: str | None) -> None:
    """Raise if the metadata or module of an installed package is missing; only parent packages are imported."""
    if version is None:
        raise BrokenInstallError("its metadata has no version")
    try:
        spec = importlib.util.find_spec(package.module)
    except ModuleNotFoundError:
        spec = None
    # A folder that an uninstall left half empty looks like a namespace package, which has no origin.
    if spec is None or spec.origin is None:
        raise BrokenInstallError(f"its module {package.module} is gone")


def onnxruntime_providers() -> str:
    """Import onnxruntime and return the execution providers that it lists."""
    try:
        listed = importlib.import_module("onnxruntime").get_available_providers()
    except Exception as error:  # a damaged native package raises anything
        raise BrokenInstallError(
            f"import onnxruntime: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    proved = [provider for provider in listed if provider not in UNPROVED_PROVIDERS]
    unproved = [provider for provider in listed if provider in UNPROVED_PROVIDERS]
    remark = [f"{', '.join(unproved)} listed; not proved until a session runs"] if unproved else []
    return "; ".join([", ".join(proved), *remark])


def problems_of(parts: Mapping[str, PackageReport], cuda: Cuda) -> Iterator[Problem]:
    """Yield what is wrong, limits first: what needs repair comes last, where it is seen."""
    installed = {name for name, part in parts.items() if part.state is not PackageState.MISSING}
    if not cuda.devices:
        yield from limits_without_device(installed)
    if cuda.broken:
        yield Problem(Kind.BROKEN, f"the CUDA driver does not work: {cuda.reason}")
    for part in parts.values():
        # If both are installed, the repair of the conflict below fixes this too.
        if part.state is PackageState.BROKEN and not (part.name in ALTERNATIVES <= installed):
            yield Problem(Kind.BROKEN, f"{part.name} is broken: {part.detail}", part.install)
    if installed >= ALTERNATIVES:
        yield Problem(Kind.CONFLICT, CONFLICT, CONFLICT_FIX)


def limits_without_device(installed: set[str]) -> Iterator[Problem]:
    """Yield what the installed GPU packages can still do."""
    limits = {
        GPU_RUNTIME.name: "it runs bundles on the CPU only",
        TENSORRT.name: "engines can be neither built nor run",
        TENSORRT_RTX.name: "engines can be built ahead of time for chosen compute capabilities; to run needs a GPU",
    }
    for name, limit in limits.items():
        if name in installed:
            yield Problem(Kind.LIMIT, f"{name} is installed, but there is no CUDA device: {limit}")
