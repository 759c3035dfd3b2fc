"""The bundle: a folder of graphs and weights, and the manifest by which every file is checked before it is read."""

import hashlib
import json
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fatdeploy._version import VERSION
from fatdeploy.errors import BundleError, BundleReplaced, in_one_line
from fatdeploy.folders import Identity, identity_of, replaced_folder
from fatdeploy.manifest import FORMAT, GRAPHS, MANIFEST, PARITY, REQUIRED, WEIGHTS, FileRecord, Manifest
from fatdeploy.plans import Part
from fatdeploy.records import RecordReader, json_from_record, shown
from fatdeploy.spec import ModelSpec

_LARGEST_MANIFEST = 16 << 20
_MOST_REASONS = 20
# ValueError: a NUL in the path. RuntimeError: links in a circle, before Python 3.13.
_UNREADABLE = (OSError, ValueError, RuntimeError)
_EXPORT = "fatdeploy export SOURCE --out"
# How often a folder is read again that was replaced meanwhile.
ATTEMPTS = 5
# For a folder that may not be a bundle at all: the advice must not be to overwrite it.
_WRITE_ONE = f"a bundle is a folder with a {MANIFEST}; write one: {_EXPORT} DIR"


@dataclass(frozen=True)
class Bundle:
    """A folder whose files match its manifest.

    Two exports of the same input with the same versions have the same ``digest``: it covers everything except the
    certificate, which depends on the machine. ``identity`` is that of the files that were checked.
    """

    path: Path
    manifest: Manifest
    digest: str
    identity: Identity = field(repr=False, compare=False)

    @property
    def spec(self) -> ModelSpec:
        """The contract of the graphs."""
        return self.manifest.spec

    @property
    def total_bytes(self) -> int:
        """The size of all listed files."""
        return sum(record.size for record in self.manifest.files.values())

    @property
    def is_unchanged(self) -> bool:
        """Whether the files at the bundle's path are those that were checked."""
        return identity_of(self.path, _named(self.manifest)) == self.identity

    def check_unchanged(self) -> None:
        """Raise BundleReplaced if the files at the bundle's path are no longer those that were checked."""
        if not self.is_unchanged:
            raise bundle_replaced(self.path)

    @cached_property
    def weights(self) -> NDArray[np.uint8]:
        """The bytes of the weights file, mapped once: they stay those of this bundle when its folder is replaced."""
        # As a plain array: parts of a memmap would be memmaps too.
        return np.asarray(np.memmap(self.file(WEIGHTS), np.uint8, "r"))

    def file(self, name: str) -> Path:
        """Return the path of a listed file; other files of the folder were not checked and are refused."""
        if name not in self.manifest.files:
            listed = ", ".join(sorted(self.manifest.files))
            raise BundleError(f"{self.path}: its {MANIFEST} does not list {shown(name)}, only {listed}")
        return self.path / name


def write_manifest(folder: str | Path, manifest: Manifest) -> Bundle:
    """Write the manifest of all files that are now in the folder; the same content gives the same bytes."""
    folder = Path(folder)
    try:
        # Through JSON and back first: a key that is not a string sorts differently from the string it becomes.
        values = json.loads(json.dumps(json_from_record(replace(manifest, files=_records(folder))), allow_nan=False))
        values["digest"] = digest_of(values)
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise BundleError(f"{folder / MANIFEST} cannot be written as JSON: {error}") from error
    (folder / MANIFEST).write_bytes(text.encode())
    return read_bundle(folder, check_hashes=False)


def read_bundle(path: str | Path, *, check_hashes: bool = True) -> Bundle:
    """Return the bundle in a folder; anything damaged, missing or unknown is one BundleError with every reason."""
    path = Path(path)
    for _ in range(ATTEMPTS):
        folder = _existing_folder(path)
        before = identity_of(folder, [])
        try:
            return _read(path, folder, before, check_hashes)
        except BundleError as error:
            # Half of it may be of a bundle that took its place meanwhile.
            if identity_of(folder, []) == before:
                raise
            reason = error
    raise bundle_replaced(path) from reason


def bundle_replaced(path: Path) -> BundleReplaced:
    """Return the error for a bundle whose files were replaced by those of another one."""
    return BundleReplaced(f"{path} was replaced while it was read: run the same again")


def _read(path: Path, folder: Path, before: Identity, check_hashes: bool) -> Bundle:
    """Return the bundle in a folder whose own identity was taken before anything of it was read."""
    values, digest = _values_and_digest(path, folder)
    manifest = _manifest_from_values(path, values, digest)
    _, *stamps = identity_of(folder, _named(manifest))
    reasons = [f"{name}: {MANIFEST} does not list it" for name in _needed(manifest) if name not in manifest.files]
    for name, record in manifest.files.items():
        reason = _wrong_name(name) or _wrong_file(folder, name, record, check_hashes)
        if reason:
            reasons.append(f"{shown(name)}: {reason}")
    if reasons:
        _refuse(path, reasons)
    bundle = Bundle(folder, manifest, digest, (*before, *stamps))
    bundle.check_unchanged()
    return bundle


def _named(manifest: Manifest) -> list[str]:
    """Return the files of a bundle that have plain names, with the manifest itself."""
    return [MANIFEST, *(name for name in manifest.files if not _wrong_name(name))]


def copy_files(bundle: Bundle, folder: Path) -> None:
    """Copy every listed file of a bundle into another folder; the manifest is written anew there."""
    for name in bundle.manifest.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.file(name), folder / name)


@contextmanager
def changed_bundle(bundle: Bundle, manifest: Manifest) -> Iterator[Path]:
    """Yield a copy of a bundle's files to change; with the manifest it takes the bundle's place at the end.

    A crash leaves the bundle as it was.
    """
    with replaced_folder(bundle.path, force=True) as new:
        copy_files(bundle, new)
        yield new
        write_manifest(new, manifest)
        # Files that the manifest does not list are somebody else's: they stay, and stay unlisted.
        shutil.copytree(
            bundle.path,
            new,
            symlinks=True,
            dirs_exist_ok=True,
            ignore=lambda folder, names: [
                name for name in names if (new / Path(folder).relative_to(bundle.path) / name).is_file()
            ],
        )


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's values, without the digest itself and the record of the certificate."""
    files = values.get("files")
    if isinstance(files, dict):
        files = {name: record for name, record in files.items() if name != PARITY}
    covered = {name: value for name, value in values.items() if name != "digest"} | {"files": files}
    return hashlib.sha256(json.dumps(covered, sort_keys=True, allow_nan=False).encode()).hexdigest()


def graph_hash(manifest: Manifest, part: Part) -> str:
    """Return the sha256 of a part's graph and the weights, which identifies what a plan was built from."""
    records = [manifest.files[name] for name in (GRAPHS[part], WEIGHTS)]
    return hashlib.sha256("\n".join(record.sha256 for record in records).encode()).hexdigest()


def _needed(manifest: Manifest) -> list[str]:
    """Return the files that every bundle must have."""
    plans = [plan.file for plan in manifest.plans]
    if {plan.part for plan in manifest.plans} == set(GRAPHS):
        return plans if manifest.output_matrix is None else [*plans, WEIGHTS]
    return [*REQUIRED, *plans]


def _refuse(path: Path, reasons: list[str], advice: str = "") -> NoReturn:
    listed = reasons[:_MOST_REASONS]
    if len(reasons) > len(listed):
        listed.append(f"and {len(reasons) - len(listed)} more")
    advice = advice or f"copy the folder again, or export it again: {_EXPORT} {path} --force"
    raise BundleError(f"{in_one_line(f'bundle {path} refused', listed)}. {advice[0].upper()}{advice[1:]}")


def _cause(error: Exception) -> str:
    """Return an error's message without the path in it, which our message names already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _records(folder: Path) -> dict[str, FileRecord]:
    records = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name == MANIFEST or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise BundleError(f"{path} is not a regular file; a bundle contains copies of its files, not links to them")
        records[name] = FileRecord(path.stat().st_size, _sha256(path))
    return records


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _existing_folder(path: Path) -> Path:
    try:
        folder = path.resolve(strict=True)
        if folder.is_dir():
            return folder
        reason = "it is a file"
    except _UNREADABLE as error:
        reason = _cause(error)
    _refuse(path, [reason], _WRITE_ONE)


def _values_and_digest(path: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a folder's manifest, and the digest that it must have."""
    reason = _not_a_file(folder, MANIFEST)
    if reason:
        _refuse(path, [f"{MANIFEST}: {reason}"], _WRITE_ONE)
    try:
        values = _values_from_json(folder / MANIFEST)
        return values, digest_of(values)
    # ValueError: not JSON, not UTF-8, a number with more digits than Python reads or beyond a float.
    except (OSError, ValueError, RecursionError) as error:
        _refuse(path, [f"{MANIFEST} cannot be read: {_cause(error)}"])


def _values_from_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(_LARGEST_MANIFEST + 1)
    if len(data) > _LARGEST_MANIFEST:
        raise ValueError(f"expected at most {_LARGEST_MANIFEST} bytes, found more")
    values = json.loads(data.decode(), object_pairs_hook=_object_from_pairs, parse_constant=_no_number)
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, found {shown(values)}")
    return values


def _object_from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(name)} occurs more than once")
    return values


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _manifest_from_values(path: Path, values: dict[str, Any], digest: str) -> Manifest:
    minor = _checked_minor(path, values)
    reader = RecordReader(allow_unknown=minor > FORMAT[1], allow_missing=minor < FORMAT[1])
    written = values.pop("digest", None)
    if written != digest:
        reader.reasons.append(f"expected digest {digest}, found {shown(written)}: it was changed after it was written")
    manifest = reader.read(Manifest, values)
    if manifest is None or reader.reasons:
        advice = _upgrade(values, newer=minor > FORMAT[1] and written == digest)
        _refuse(path, [f"{MANIFEST}: {reason}" for reason in reader.reasons], advice)
    return manifest


def _checked_minor(path: Path, values: dict[str, Any]) -> int:
    """Return the minor version of a manifest's format; another major has other rules, so nothing else is read."""
    version = values.get("format")
    if not isinstance(version, list) or [type(number) for number in version] != [int, int] or min(version) < 0:
        _refuse(path, [f"{MANIFEST}: format: expected {list(FORMAT)}, found {shown(version)}"])
    major, minor = version
    if major != FORMAT[0]:
        reason = f"{MANIFEST}: format: expected {FORMAT[0]}.x, found {major}.{minor}"
        _refuse(path, [reason], _upgrade(values, newer=major > FORMAT[0]))
    return int(minor)


def _upgrade(values: dict[str, Any], *, newer: bool) -> str:
    """Return the advice for a manifest that a newer fatdeploy wrote; it names its version."""
    if not newer:
        return ""
    versions = values.get("versions")
    writer = versions.get("fatdeploy") if isinstance(versions, dict) else None
    needed = f"fatdeploy {shown(writer)}" if isinstance(writer, str) else "a newer fatdeploy"
    return f"it needs {needed}, this is {VERSION}: pip install -U fatdeploy"


def _wrong_name(name: str) -> str:
    """Return why a name may lead out of the folder on some system: Windows reads backslashes, drives and streams."""
    path = PurePosixPath(name)
    plain = name.isprintable() and not set(name) & set('\\:*?"<>|')
    if not plain or path.is_absolute() or ".." in path.parts or not path.parts or str(path) != name:
        return "expected a plain relative path inside the folder"
    return f"{MANIFEST} cannot list itself" if name == MANIFEST else ""


def _not_a_file(folder: Path, name: str) -> str:
    """Return why a name is not a regular file inside the folder; the folder is resolved, and nothing is opened."""
    try:
        real = (folder / name).resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError:
        return "missing"
    except _UNREADABLE as error:
        return f"cannot be read: {_cause(error)}"
    if not real.is_relative_to(folder):
        return "expected a file inside the folder, found a link that leaves it"
    return "" if stat.S_ISREG(mode) else "expected a regular file, found something else"


def _wrong_file(folder: Path, name: str, record: FileRecord, check_hash: bool) -> str:
    reason = _not_a_file(folder, name)
    if reason:
        return reason
    path = folder / name
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"expected {record.size} bytes, found {size}"
        sha256 = _sha256(path) if check_hash else record.sha256
    except OSError as error:
        return f"cannot be read: {_cause(error)}"
    return "" if sha256 == record.sha256 else f"expected sha256 {shown(record.sha256)}, found {sha256}"
