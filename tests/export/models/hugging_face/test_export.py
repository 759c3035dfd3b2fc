"""Imported models in bundles: every family in both dialects says what the reference says, and int8 keeps its rows."""

from pathlib import Path

import numpy as np
import pytest

from fatdeploy import load
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.hugging_face.folder import model_from_folder
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.spec import ModelSpec
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS
from tests.support.hugging_face_folders import MODELS, write_folder

OPTIONS = DecodeOptions(num_beams=3, max_new_tokens=10)


def imported(family: str, folder: Path) -> ReferenceModel:
    write_folder(family, 3, folder)
    return model_from_folder(folder)[0]


def drawn_sources(spec: ModelSpec) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, spec.n_source_ids, size=length).tolist() for length in (3, 9, 1, 5)]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dialect", ["ort", pytest.param("standard", marks=pytest.mark.slow)])
def test_a_bundle_says_what_the_reference_says(family: str, dialect: Dialect, tmp_path: Path) -> None:
    model = imported(family, tmp_path / "folder")
    sources = drawn_sources(model.spec)
    write_bundle(model, tmp_path / "bundle", origin=Origin(name=family, random=True), target=TARGETS[dialect])
    expected = decode(EagerEngine(model), sources, OPTIONS)
    with load(tmp_path / "bundle") as bundle:
        results = bundle.generate(sources, OPTIONS)
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    assert [result.score for result in results] == pytest.approx([result.score for result in expected], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_row_in_int8_does_not_depend_on_its_batch(family: str, tmp_path: Path) -> None:
    model = imported(family, tmp_path / "folder")
    sources = drawn_sources(model.spec)
    origin = Origin(name=family, random=True)
    write_bundle(model, tmp_path / "bundle", origin=origin, target=TARGETS["ort"], precision="int8")
    with load(tmp_path / "bundle") as bundle:
        together = bundle.generate(sources, OPTIONS)
        alone = [bundle.generate([source], OPTIONS)[0] for source in sources]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
