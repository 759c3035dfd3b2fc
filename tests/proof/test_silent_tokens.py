"""Tokens that are never chosen, such as Marian's padding, whose score is 0 wherever all others are negative."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import fatdeploy
from fatdeploy.bundle import Bundle
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.loading import model_from_source
from fatdeploy.export.pipeline import write_bundle
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.export.quantize.gate import material_of
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.proof.forced import step_logits
from fatdeploy.runtimes.proof.gate import read_material
from fatdeploy.runtimes.proof.lockstep import NOISE
from fatdeploy.runtimes.proof.probes import read_probes
from tests.support.hugging_face_folders import write_folder

SOURCES = [[5, 6, 7], [9, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Marian whose padding has score 0 where every other token has a negative one."""
    path = tmp_path_factory.mktemp("silent") / "marian"
    write_folder("marian", 3, path)
    pad = json.loads((path / "config.json").read_text())["pad_token_id"]
    tensors = load_file(path / "model.safetensors")
    tensors["final_logits_bias"] -= 40
    tensors["final_logits_bias"][0, pad] = 0
    tied = [name for name in tensors if name.endswith(("embed_tokens.weight", "shared.weight", "lm_head.weight"))]
    for name in tied:
        tensors[name][pad] = 0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**settings, "bad_words_ids": [[pad]]}))
    return path


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    model, origin = model_from_source(str(folder))
    return write_bundle(model, folder.parent / "int8", origin=replace(origin, random=True), precision="int8")


@pytest.fixture(scope="module")
def engine(folder: Path) -> EagerEngine:
    return EagerEngine(model_from_source(str(folder))[0])


def test_a_bad_word_of_one_token_is_silent(folder: Path, engine: EagerEngine) -> None:
    pad = json.loads((folder / "config.json").read_text())["pad_token_id"]
    assert engine.spec.silent_ids == (pad,) == (engine.spec.pad_id,)


def first_step(engine: EagerEngine) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of a first step as the engine computes them, and as proofs read them."""
    source, mask = np.array([SOURCES[0]]), np.ones((1, 3), bool)
    tokens = np.array([[engine.spec.bos_id]])
    plain = engine.step(tokens, engine.encode(source, mask, Capacity(1, 4)), Want.LOGITS).logits
    assert plain is not None
    return plain[0, 0], step_logits(engine, tokens, engine.encode(source, mask, Capacity(1, 4)))[0, 0]


def test_proofs_read_the_least_logit_for_a_silent_token_and_all_others_unchanged(engine: EagerEngine) -> None:
    plain, masked = first_step(engine)
    (pad,) = engine.spec.silent_ids
    assert plain.argmax() == pad
    assert plain[pad] == 0
    others = np.delete(plain, pad)
    assert masked[pad] == others.min()
    assert np.delete(masked, pad).tolist() == others.tolist()
    # The bound of noise follows the largest logit by size: neither lost nor grown by a replacement.
    assert np.abs(masked).max() == np.abs(others).max()


def test_a_step_without_silent_tokens_is_unchanged(engine: EagerEngine) -> None:
    plain = EagerEngine(engine.model)
    plain.exportable.spec = replace(engine.spec, silent_ids=())
    unmasked, logits = first_step(plain)
    assert logits.tolist() == unmasked.tolist()


def test_probes_never_contain_a_silent_token(engine: EagerEngine, bundle: Bundle) -> None:
    silent = engine.spec.silent_ids
    drawn = drawn_probe(engine, [3, 3], 6)
    for probe in [drawn, *read_probes(bundle.file(PROBES))]:
        assert not np.isin(probe.tokens, silent).any()
        assert (probe.margins >= 10 * probe.bounds).all()
    loudest = max(np.abs(np.delete(first_step(engine)[0], silent)).max(), 1)
    assert 0.5 < drawn.bounds.max() / (NOISE * loudest) < 2


def test_targets_of_the_gate_never_contain_a_silent_token(engine: EagerEngine, bundle: Bundle) -> None:
    for material in (material_of(engine, SOURCES, 6), read_material(bundle)):
        targets = np.concatenate([row[:n] for row, n in zip(material.tokens, material.lengths, strict=True)])
        assert targets.size
        assert not np.isin(targets, engine.spec.silent_ids).any()


def test_a_quantized_bundle_keeps_its_silent_tokens_and_is_verified(bundle: Bundle) -> None:
    assert bundle.manifest.precision == "int8"
    assert len(bundle.spec.silent_ids) == 1
    fatdeploy.verify(bundle.path)
    with fatdeploy.load(bundle.path, threads=1) as model:
        hypotheses = model.generate(SOURCES, max_new_tokens=6)
        loud = model.generate(SOURCES, DecodeOptions(max_new_tokens=6))
    assert not any(set(bundle.spec.silent_ids) & set(hypothesis.tokens) for hypothesis in hypotheses)
    assert [hypothesis.tokens for hypothesis in loud] == [bundle.spec.silent_ids * 6] * 2


def test_verify_against_the_folder_compares_without_silent_tokens(folder: Path) -> None:
    bundle = fatdeploy.export_model(str(folder), folder.parent / "fp32")
    record = fatdeploy.verify(bundle.path, against=str(folder)).original
    assert record is not None
    assert record.agreement is not None
    assert [result.ties for result in record.agreement.generated] == [0, 0]
