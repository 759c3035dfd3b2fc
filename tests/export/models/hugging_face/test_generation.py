"""Imported models, decoded by our loop, say what ``generate`` says: the same tokens, the same scores."""

from pathlib import Path

import numpy as np
import pytest

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.hugging_face.folder import model_from_folder
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.spec import ModelSpec
from tests.support.hugging_face_folders import MODELS, generated, write_folder

TOLERANCE = 1e-4
in_every_family = pytest.mark.parametrize("family", MODELS)


def drawn_sources(draw: np.random.Generator, spec: ModelSpec, count: int) -> list[list[int]]:
    """Return sources of different lengths without padding inside."""
    ordinary = np.delete(np.arange(spec.n_source_ids), spec.pad_id)
    return [draw.choice(ordinary, size=length).tolist() for length in draw.permutation(12)[:count] + 1]


@in_every_family
@pytest.mark.parametrize("beams", range(1, 9))
@pytest.mark.parametrize("shortest", [0, 6])
def test_targets_match_generate(family: str, beams: int, shortest: int, tmp_path: Path) -> None:
    theirs = write_folder(family, 100 * beams + shortest, tmp_path).model()
    engine = EagerEngine(model_from_folder(tmp_path)[0].double())
    sources = drawn_sources(np.random.default_rng(beams), engine.spec, 4)
    options = DecodeOptions(
        num_beams=beams,
        max_new_tokens=12,
        min_new_tokens=shortest,
        suppress_tokens=[engine.spec.pad_id],  # padding that is generated would move the positions of M2M100
        scores=True,
    )
    expected = generated(theirs, sources, options, engine.spec)
    results = decode(engine, sources, options)
    assert [result.tokens for result in results] == [target.tokens for target in expected]
    assert [result.score for result in results] == pytest.approx([target.score for target in expected], abs=TOLERANCE)


@in_every_family
def test_drawn_models_are_lively(family: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    targets = []
    for seed in range(8):
        write_folder(family, seed, tmp_path)
        engine = EagerEngine(model_from_folder(tmp_path)[0])
        options = DecodeOptions(max_new_tokens=12, min_new_tokens=6)
        targets += decode(engine, drawn_sources(draw, engine.spec, 8), options)
    assert len({target.tokens for target in targets}) >= 40
    assert np.mean([len(set(target.tokens)) for target in targets]) >= 3
