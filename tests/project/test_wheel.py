"""The wheel as a device gets it: its contents, what it installs, how big that is, and that it works."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fatdeploy import __version__

REPOSITORY = Path(__file__).parents[2]
BASE = {"fatdeploy", "numpy", "click"}
MAX_DEVICE_BYTES = 180_000_000
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import fatdeploy, fatdeploy.runtimes
names = [found.name for found in pkgutil.iter_modules(fatdeploy.__path__, "fatdeploy.") if not found.ispkg]
names += [found.name for found in pkgutil.walk_packages(fatdeploy.runtimes.__path__, "fatdeploy.runtimes.")]
for name in names:
    importlib.import_module(name)
print(json.dumps({"imported": names, "torch": "torch" in sys.modules}))
"""

pytestmark = pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="only a git checkout knows its own files")


def run(*command: str | Path, folder: Path) -> str:
    ran = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def files_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@dataclass(frozen=True)
class Device:
    """A fresh environment after ``pip install fatdeploy``, and then ``pip install fatdeploy[cpu]``."""

    folder: Path
    packages: Path
    base: frozenset[str]

    def run(self, *command: str) -> str:
        return run(self.folder / "bin" / command[0], *command[1:], folder=self.folder)

    def installed(self) -> frozenset[str]:
        distributions = importlib.metadata.distributions(path=[str(self.packages)])
        return frozenset(canonicalize_name(distribution.name) for distribution in distributions)

    def needed_by(self, name: str) -> set[str]:
        """Return a distribution and everything it requires, directly or not."""
        (distribution,) = importlib.metadata.distributions(name=name, path=[str(self.packages)])
        needs = [Requirement(text) for text in distribution.requires or []]
        direct = [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        return {canonicalize_name(name)}.union(*map(self.needed_by, direct))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files git tracks: no junk can reach the wheel, and links stay links."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in run("git", "ls-files", "-z", folder=REPOSITORY).rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "direct", folder=checkout)
    (built,) = (checkout / "direct").iterdir()
    return built


@pytest.fixture(scope="module")
def device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Device:
    folder = tmp_path_factory.mktemp("device")
    # Without its own pip (this environment's pip installs), so that it contains only what we install.
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    constraints = str(REPOSITORY / "constraints.txt")
    install = [sys.executable, "-m", "pip", "--python", str(folder), "install", "-c", constraints]
    run(*install, wheel, folder=folder)
    base = Device(folder, packages, frozenset()).installed()
    run(*install, f"{wheel}[cpu]", folder=folder)
    return Device(folder, packages, base)


def test_the_wheel_has_the_linked_folders_as_packages_and_nothing_beside_them(wheel: Path) -> None:
    names = files_in(wheel)
    assert {name.partition("/")[0] for name in names} == {"fatdeploy", f"fatdeploy-{__version__}.dist-info"}
    assert {
        "fatdeploy/py.typed",
        "fatdeploy/export/__init__.py",
        "fatdeploy/runtimes/__init__.py",
        "fatdeploy/runtimes/doctor/examine.py",
    } <= set(names)


def test_every_module_that_git_knows_is_in_the_wheel(wheel: Path, checkout: Path) -> None:
    modules = {path.relative_to(checkout).as_posix() for path in (checkout / "fatdeploy").glob("*.py")}
    for folder in ("export", "runtimes"):
        modules |= {f"fatdeploy/{path.relative_to(checkout).as_posix()}" for path in (checkout / folder).rglob("*.py")}
    assert modules == {name for name in files_in(wheel) if name.endswith(".py")}


def test_the_bundled_model_is_in_the_wheel_whole(wheel: Path, checkout: Path) -> None:
    folder = checkout / "export" / "g2p" / "checkpoint"
    place = "fatdeploy/export/g2p/checkpoint/"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.startswith(place)}
    assert packed == {place + path.name: path.read_bytes() for path in folder.iterdir()}
    assert {place + name for name in ("config.json", "model.safetensors", "tokenizer.json", "NOTICE")} <= packed.keys()


def test_a_wheel_made_from_the_source_archive_has_the_same_files(wheel: Path, checkout: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "through-sdist", folder=checkout)
    (archive,) = (checkout / "through-sdist").glob("*.tar.gz")
    (rebuilt,) = (checkout / "through-sdist").glob("*.whl")
    assert files_in(rebuilt) == files_in(wheel)
    with tarfile.open(archive) as members:
        assert not [member.name for member in members if member.issym()]


def test_without_extras_only_numpy_and_click_come_along(device: Device) -> None:
    assert device.base == BASE


def test_the_cpu_extra_brings_onnxruntime_and_what_that_needs(device: Device) -> None:
    assert device.installed() == BASE | device.needed_by("onnxruntime")
    assert "torch" not in device.installed()


def test_a_device_needs_less_than_180_megabytes(device: Device) -> None:
    size = sum(path.lstat().st_size for path in device.packages.rglob("*") if path.is_file())
    print(f"fatdeploy[cpu] takes {size / 1e6:.1f} MB")
    assert size <= MAX_DEVICE_BYTES, f"fatdeploy[cpu] takes {size / 1e6:.1f} MB of {MAX_DEVICE_BYTES / 1e6:.0f} MB"


def test_the_commands_run_on_a_device(device: Device) -> None:
    assert device.run("fatdeploy", "--version") == f"fatdeploy, version {__version__}\n"
    assert "doctor" in device.run("fatdeploy", "--help")


def test_the_doctor_on_a_device_finds_a_runtime_and_no_torch(device: Device) -> None:
    report = json.loads(device.run("fatdeploy", "doctor", "--json"))
    states = {part["name"]: part["state"] for part in report["parts"]}
    assert report["healthy"] is True
    assert (states["onnxruntime"], states["torch"], states["tokenizers"]) == ("present", "missing", "missing")


def test_every_module_that_a_device_may_use_is_imported_without_torch(device: Device) -> None:
    result = json.loads(device.run("python", "-I", "-c", IMPORT_ALL))
    nested = {"fatdeploy.runtimes.doctor.examine", "fatdeploy.runtimes.engines.trt.build.network"}
    assert {"fatdeploy.cli", "fatdeploy.machine", *nested} <= set(result["imported"])
    assert result["torch"] is False
