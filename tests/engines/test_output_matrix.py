"""Rows of the output matrix, from the weights file and from the reference: hidden states times them are the logits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fatdeploy.bundle import digest_of, read_bundle, write_manifest
from fatdeploy.errors import BundleError, ConfigError, SpecMismatch
from fatdeploy.export.graph_files import initializers_of, read_structure
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.package import placed_output_matrix
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.quantize.matrices import constant_array
from fatdeploy.export.reference.presets import PRESETS
from fatdeploy.export.reference.weights import random_model
from fatdeploy.manifest import DECODER, MANIFEST, WEIGHTS, OutputMatrix
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.targets import Precision, Target
from tests.support.bundles import bundle_of, model_of
from tests.support.choices import tiny
from tests.support.engines.output_rows import check_output_rows


@pytest.mark.parametrize("dialect", ["ort", "standard"])
@pytest.mark.parametrize("preset", PRESETS)
def test_hidden_states_times_the_output_rows_of_a_bundle_are_its_logits(preset: str, dialect: str) -> None:
    bundle = bundle_of(f"{preset}-tiny", dialect)
    check_output_rows(OrtEngine(bundle))
    # Tied: the encoder's embedding, which is the first tensor of the file.
    assert bundle.manifest.output_matrix == OutputMatrix(0, "float32", transposed=False)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": False}, {"head": "mlp", "tie_embeddings": False}, {"output_bias": True}],
    ids=str,
)
def test_hidden_states_times_the_output_rows_of_the_reference_are_its_logits(changes: dict) -> None:
    check_output_rows(EagerEngine(tiny(changes)))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_bundle_has_the_references_output_rows(preset: str) -> None:
    ids = np.array([60, 2, 17])
    rows, expected = (
        engine.output_rows(ids)
        for engine in (OrtEngine(bundle_of(f"{preset}-tiny")), EagerEngine(model_of(f"{preset}-tiny")))
    )
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(("target", "precision"), [("ort-cpu", "fp32"), ("ort-cpu", "int8"), ("onnx", "fp32")])
def test_a_shortlist_adds_the_output_bias(target: Target, precision: Precision, tmp_path: Path) -> None:
    model = tiny({"output_bias": True, "encoder_layers": 1, "decoder_layers": 1})
    with torch.no_grad():
        model.output_bias.mul_(20)
    origin = Origin(name="biased", random=True)
    engine = OrtEngine(write_bundle(model, tmp_path / "bundle", origin=origin, target=target, precision=precision))
    ids = np.array([41, 3, 3, 0])
    bias = model.output_bias.detach().numpy()[ids]
    if precision == "int8":
        # It contains what the integers lose on average: exactly what the graph adds.
        graph = read_structure(tmp_path / "bundle" / DECODER).graph
        constants = {tensor.name: tensor for tensor in initializers_of(graph)}
        added = constant_array(constants["output/corrected"], tmp_path / "bundle")
        np.testing.assert_array_equal(engine.output_bias(ids), added[ids])
        assert 0 < np.abs(added[ids] - bias).max() < np.abs(bias).max()
    else:
        np.testing.assert_array_equal(engine.output_bias(ids), bias)
        check_output_rows(engine)
    sources = [[5, 9, 33], [8, 60, 4, 4, 12], [7]]
    everything = [*range(engine.spec.vocab_size)]
    for beams in (1, 3):
        plain = decode(engine, sources, DecodeOptions(num_beams=beams, max_new_tokens=12))
        listed = decode(engine, sources, DecodeOptions(num_beams=beams, max_new_tokens=12, shortlist=everything))
        assert [row.tokens for row in listed] == [row.tokens for row in plain]
    # Without the bias other tokens win.
    unbiased = EagerEngine(random_model(replace(model.config, output_bias=False), 1))
    expected = decode(engine, sources, DecodeOptions(max_new_tokens=12))
    assert [row.tokens for row in decode(unbiased, sources, DecodeOptions(max_new_tokens=12))] != [
        row.tokens for row in expected
    ]


def test_logits_with_copying_are_not_a_product() -> None:
    assert EagerEngine(tiny({"copy": True})).output_rows(np.array([3])) is None


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (np.array([3, 64]), "ids must lie in 0…63, found 64"),
        (np.array([3, -1]), "ids must lie in 0…63, found -1"),
        (np.array([[3]]), r"ids must be int64 \[n\], found int64 \[1, 1\]"),
        (np.array([3.0]), r"ids must be int64 \[n\], found float64 \[1\]"),
    ],
)
def test_invalid_ids_are_refused(ids: np.ndarray, reason: str) -> None:
    for engine in (OrtEngine(bundle_of("fat-tiny")), EagerEngine(model_of("fat-tiny"))):
        with pytest.raises(SpecMismatch, match=f"^output rows refused: {reason}$"):
            engine.output_rows(ids)


def test_a_bundle_of_the_first_format_decodes_and_asks_to_be_exported_again_for_its_rows(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(bundle_of("fat-tiny").path, folder)
    values = json.loads((folder / MANIFEST).read_text())
    del values["output_matrix"], values["digest"]
    values["format"] = [1, 0]
    (folder / MANIFEST).write_text(json.dumps({**values, "digest": digest_of(values)}))
    engine = OrtEngine(read_bundle(folder))
    assert decode(engine, [[5, 6]]) == decode(OrtEngine(bundle_of("fat-tiny")), [[5, 6]])
    with pytest.raises(ConfigError, match="export it again with this version: fatdeploy export SOURCE --out DIR --f"):
        engine.output_rows(np.array([3]))


def test_a_matrix_that_ends_beyond_the_weights_is_refused(tmp_path: Path) -> None:
    shutil.copytree(bundle_of("fat-tiny").path, tmp_path / "wrong")
    manifest = bundle_of("fat-tiny").manifest
    size = manifest.files[WEIGHTS].size
    wrong = replace(manifest, output_matrix=OutputMatrix(size - 8188, "float32", transposed=False))
    engine = OrtEngine(write_manifest(tmp_path / "wrong", wrong))
    with pytest.raises(
        BundleError, match=rf"must end within {size} bytes of weights\.bin, the manifest says {size + 4}"
    ):
        engine.output_rows(np.array([3]))


def test_a_matrix_that_no_graph_keeps_in_the_file_is_added_to_it(tmp_path: Path) -> None:
    bundle = bundle_of("fat-tiny")
    for name in (DECODER, WEIGHTS):
        shutil.copyfile(bundle.file(name), tmp_path / name)
    before = (tmp_path / WEIGHTS).read_bytes()
    matrix = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    place = placed_output_matrix(matrix, tmp_path)
    after = (tmp_path / WEIGHTS).read_bytes()
    assert (place.transposed, place.offset % 64) == (False, 0)
    assert after[: len(before)] == before
    assert after[place.offset :] == matrix.tobytes()
