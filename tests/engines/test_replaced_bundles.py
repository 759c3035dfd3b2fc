"""A bundle whose folder is replaced: a model is the old one or the new one, never something between."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import fatdeploy
from fatdeploy.bundle import ATTEMPTS, Bundle, read_bundle, write_manifest
from fatdeploy.errors import BundleReplaced
from fatdeploy.folders import replaced_folder
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes import loading
from fatdeploy.runtimes.engines.opening import opened_engine
from tests.support.bundles import bundle_of

SOURCES = [[5, 6, 7], [9, 8, 7, 6]]
OPTIONS = fatdeploy.DecodeOptions(max_new_tokens=8)
SHORT = fatdeploy.DecodeOptions(max_new_tokens=8, shortlist=list(range(3, 40)))
WRITER = """
import shutil, sys, time
from pathlib import Path
from fatdeploy.folders import replaced_folder
live, *others = map(Path, sys.argv[1:4])
end, turn = time.monotonic() + float(sys.argv[4]), 0
while time.monotonic() < end:
    turn += 1
    with replaced_folder(live, force=True) as new:
        shutil.copytree(others[turn % 2], new, dirs_exist_ok=True)
    time.sleep(0.01)
"""


def tokens(model: fatdeploy.Model, options: fatdeploy.DecodeOptions = OPTIONS) -> list[tuple[int, ...]]:
    return [result.tokens for result in model.generate(SOURCES, options)]


def replace_by(folder: Path, other: Path) -> None:
    with replaced_folder(folder, force=True) as new:
        shutil.copytree(other, new, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two bundles that differ in their weights alone."""
    folder = tmp_path_factory.mktemp("replaced")
    for name in ("first", "second"):
        shutil.copytree(bundle_of("transformer-tiny").path, folder / name)
    path = folder / "second" / WEIGHTS
    weights = np.fromfile(path, np.float32)
    np.random.default_rng(0).shuffle(weights)
    weights.tofile(path)
    write_manifest(folder / "second", bundle_of("transformer-tiny").manifest)
    return folder / "first", folder / "second"


@pytest.fixture
def live(others: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(others[0], tmp_path / "live")


def test_a_loaded_model_stays_itself_when_its_folder_is_replaced(others: tuple[Path, Path], live: Path) -> None:
    with fatdeploy.load(live, threads=1) as model, fatdeploy.load(others[1], threads=1) as second:
        expected = tokens(model), tokens(model, SHORT)
        replace_by(live, others[1])
        assert (tokens(model), tokens(model, SHORT)) == expected
        assert expected[0] != tokens(second)
        assert expected[1] != tokens(second, SHORT)


def test_a_shortlist_that_was_not_used_before_reads_the_weights_of_its_own_model(
    others: tuple[Path, Path], live: Path
) -> None:
    with fatdeploy.load(others[0], threads=1) as first, fatdeploy.load(live, threads=1) as model:
        replace_by(live, others[1])
        assert tokens(model, SHORT) == tokens(first, SHORT)


def test_an_engine_of_files_that_were_replaced_after_they_were_checked_is_refused(
    others: tuple[Path, Path], live: Path
) -> None:
    bundle = read_bundle(live)
    replace_by(live, others[1])
    with pytest.raises(BundleReplaced, match="was replaced while it was read: run the same again"):
        opened_engine(bundle)


def test_a_model_is_loaded_again_if_its_folder_was_replaced_meanwhile(
    others: tuple[Path, Path], live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[str] = []

    def replaced_then_opened(bundle: Bundle, **options: object) -> object:
        if not digests:
            replace_by(live, others[1])
        digests.append(bundle.digest)
        return opened_engine(bundle, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "opened_engine", replaced_then_opened)
    with fatdeploy.load(live, threads=1) as model, fatdeploy.load(others[1], threads=1) as second:
        assert tokens(model) == tokens(second)
    assert digests[:2] == [read_bundle(folder).digest for folder in others]


def test_a_folder_that_is_replaced_all_the_time_is_an_error_at_last(
    others: tuple[Path, Path], live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Counter[str]()

    def replaced_then_opened(bundle: Bundle, **options: object) -> object:
        attempts["opened"] += 1
        replace_by(live, others[attempts["opened"] % 2])
        return opened_engine(bundle, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "opened_engine", replaced_then_opened)
    with pytest.raises(BundleReplaced):
        fatdeploy.load(live, threads=1)
    assert attempts["opened"] == ATTEMPTS


def test_loads_during_exchanges_give_one_model_or_the_other(others: tuple[Path, Path], live: Path) -> None:
    expected = []
    for folder in others:
        with fatdeploy.load(folder, threads=1, spinning=False) as model:
            expected.append(tokens(model))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, live, *others, "4"])
    loads: Counter[int] = Counter()
    while writer.poll() is None:
        try:
            with fatdeploy.load(live, threads=1, spinning=False) as model:
                loads[expected.index(tokens(model))] += 1
        except BundleReplaced:
            loads[-1] += 1
    assert writer.wait() == 0
    assert loads.total() > 0
    with fatdeploy.load(live, threads=1, spinning=False) as model:
        assert tokens(model) in expected
