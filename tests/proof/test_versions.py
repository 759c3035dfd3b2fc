"""An onnxruntime that a bundle was not verified with: older is refused, newer has to prove itself once."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fatdeploy
from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.errors import BackendUnavailable
from fatdeploy.manifest import PROBES
from fatdeploy.measured import VARIABLE
from fatdeploy.runtimes.proof import verify
from fatdeploy.runtimes.proof.probes import read_probes, write_probes
from tests.support.bundles import bundle_of

OLDER, NEWER = ("99.0.0", "99.0.1"), ("1.0.0", "1.0.1")


def bundle_verified_with(range_: tuple[str, str], folder: Path, preset: str = "transformer-tiny") -> Bundle:
    """Return a copy of a bundle that says it was verified with these versions of onnxruntime."""
    bundle = bundle_of(preset)
    shutil.copytree(bundle.path, folder)
    return write_manifest(folder, replace(bundle.manifest, onnxruntime=range_))


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the digests of bundles whose probes were run."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    digests: list[str] = []
    verified = verify.verified_bundle

    def counted(bundle: Bundle, engine: object) -> object:
        digests.append(bundle.digest)
        return verified(bundle, engine)  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "verified_bundle", counted)
    return digests


def test_caches_refuse_an_onnxruntime_that_is_older_than_their_bundle(tmp_path: Path) -> None:
    bundle = bundle_verified_with(OLDER, tmp_path / "bundle")
    with pytest.raises(BackendUnavailable, match=r"needs onnxruntime 99\.0\.0 or newer, this is .*pip install"):
        fatdeploy.load(bundle.path)
    with pytest.raises(BackendUnavailable, match="needs onnxruntime"):
        fatdeploy.verify(bundle.path)


@pytest.mark.parametrize(("preset", "range_"), [("fat-tiny", OLDER), ("transformer-tiny", NEWER)])
def test_another_version_proves_itself_once(
    preset: str, range_: tuple[str, str], proofs: list[str], tmp_path: Path
) -> None:
    bundle = bundle_verified_with(range_, tmp_path / "bundle", preset)
    for _ in range(2):
        with fatdeploy.load(bundle.path) as model:
            assert model.generate([[5, 6, 7]], max_new_tokens=3)[0].tokens
    assert proofs == [bundle.digest]


def test_the_version_of_the_export_needs_no_further_proof(proofs: list[str]) -> None:
    with fatdeploy.load(bundle_of("transformer-tiny").path):
        assert proofs == []


def test_a_version_that_does_not_give_the_tokens_is_refused_every_time(proofs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    bundle = bundle_verified_with(NEWER, folder)
    [probe, *rest] = read_probes(bundle.file(PROBES))
    other = replace(probe, tokens=np.where(probe.tokens == 5, 6, 5))
    write_probes(folder / PROBES, [other, *rest])
    write_manifest(folder, bundle.manifest)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=r"with .*, which is installed here, it does not keep its promise"):
            fatdeploy.load(folder)
    assert len(proofs) == 2
