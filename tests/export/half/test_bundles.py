"""Bundles in half precision: they run, they are close to the reference, and mistakes are refused."""

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fatdeploy
from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.errors import BackendUnavailable, ConfigError, ParityFailed
from fatdeploy.export.g2p import NAME
from fatdeploy.export.models.eager import EagerEngine, EagerState
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.models.loading import model_from_source
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.proof.certify_half import LEAST_AGREEMENT, half_parity
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.manifest import PARITY, PROBES, WEIGHTS
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sources import padded
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.ort.sessions import _check_bfloat16
from fatdeploy.runtimes.engines.output_matrix import stored_output_rows
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.runtimes.proof.lockstep import compared
from fatdeploy.runtimes.proof.probes import read_probes
from fatdeploy.spec import Tokens
from fatdeploy.targets import Precision
from tests.support.bundles import HALF_PRESETS, bundle_of, half_of, model_of, shared_bundle
from tests.support.words import g2p_bundle, ids_of_test_words, reference

BATCH = 100


@cache
def g2p_half() -> Bundle:
    model, origin = model_from_source(NAME)
    return shared_bundle(
        f"{NAME}-fp16",
        lambda folder: write_bundle(model, folder, origin=origin, target="onnx", precision="fp16"),
    )


def certificate_of(bundle: Bundle) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(bundle.file(PARITY).read_text())
    return values


@pytest.mark.parametrize("preset", HALF_PRESETS)
def test_presets_run_in_fp16_and_their_certificates_record_how_close_they_are(preset: str) -> None:
    bundle = half_of(f"{preset}-tiny")
    assert (bundle.manifest.precision, bundle.manifest.target) == ("fp16", "onnx")
    certificate = certificate_of(bundle)
    parity, own = certificate["parity"], certificate["own_graphs"]
    assert certificate["executed"].startswith("copies of the bundle's graphs in float32")
    assert own["executed"].startswith("the bundle's own graphs")
    assert own["agreement"] > 0.97
    assert 0 < own["largest_difference"] < 0.01 * max(1, own["largest_logit"])
    assert parity["least_agreement"] is None  # random weights
    assert parity["agreement"] == parity["same"] / parity["tokens"]
    assert parity["agreement"] > 0.97
    assert 0 < parity["largest_difference"] < 0.01 * max(1, parity["largest_logit"])
    assert parity["largest_difference_alone"] <= 2 * parity["largest_difference"]


@pytest.mark.parametrize("preset", HALF_PRESETS)
def test_only_memory_and_caches_are_half(preset: str) -> None:
    full, half = model_of(f"{preset}-tiny").spec, half_of(f"{preset}-tiny").spec
    assert {tensor.dtype for tensor in half.memory} == {"float16"}
    assert {(tensor.kind, tensor.dtype) for tensor in half.state} <= {("cache", "float16"), ("recurrent", "float32")}
    assert half.results == full.results
    assert half.length_log_probs == full.length_log_probs


@pytest.mark.parametrize("preset", ["transformer", "fat"])
def test_weights_need_half_the_space(preset: str) -> None:
    full, half = (
        bundle.manifest.files[WEIGHTS].size
        for bundle in (bundle_of(f"{preset}-tiny", "standard"), half_of(f"{preset}-tiny"))
    )
    assert half == pytest.approx(full / 2, rel=0.02)


@pytest.mark.parametrize("preset", [name for name in HALF_PRESETS if name != "transformer-nat"])
def test_beams_batches_and_shortlists_run_in_fp16(preset: str) -> None:
    engine = OrtEngine(half_of(f"{preset}-tiny"), OrtOptions(threads=1))
    sources = [[5, 6, 7, 8, 9], [20, 21]]
    options = DecodeOptions(num_beams=3, max_new_tokens=8)
    batch, alone = decode(engine, sources, options), [decode(engine, [source], options)[0] for source in sources]
    assert [hypothesis.tokens for hypothesis in batch] == [hypothesis.tokens for hypothesis in alone]
    short = decode(engine, sources, DecodeOptions(shortlist=tuple(range(3, 40)), max_new_tokens=8))
    assert all(token < 40 for hypothesis in short for token in hypothesis.tokens)


def test_output_rows_are_the_halves_of_the_references() -> None:
    ids = np.array([60, 2, 17])
    for precision, error in (("fp16", 2.0**-11), ("bf16", 2.0**-8)):
        bundle = half_of("fat-tiny", precision)
        matrix = bundle.manifest.output_matrix
        assert matrix is not None
        assert (matrix.offset, matrix.dtype) == (0, {"fp16": "float16", "bf16": "bfloat16"}[precision])
        rows, expected = stored_output_rows(bundle, ids), EagerEngine(model_of("fat-tiny")).output_rows(ids)
        assert rows is not None
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, expected, rtol=error, atol=1e-7)
        assert (rows != expected).any()


def test_g2p_in_fp16_chooses_the_references_phonemes() -> None:
    engine, words = OrtEngine(g2p_half(), OrtOptions(threads=1)), ids_of_test_words()[::4]
    assert len(words) == 500
    same = total = 0
    for start in range(0, len(words), BATCH):
        source, mask = padded(words[start : start + BATCH], engine.spec)
        comparison = compared(engine, reference(), source, mask, steps=20)
        same += int((comparison.expected == comparison.found).sum())
        total += comparison.expected.size
    print(f"{same} of {total}")
    assert same >= LEAST_AGREEMENT * total


def test_g2p_in_fp16_is_half_as_large_certified_and_pronounces() -> None:
    bundle = g2p_half()
    assert bundle.total_bytes == pytest.approx(g2p_bundle("standard").total_bytes / 2, rel=0.1)
    assert certificate_of(bundle)["parity"]["least_agreement"] == LEAST_AGREEMENT
    with fatdeploy.load(bundle.path, threads=1) as model:
        assert [output.text for output in model.generate(["knight", "station"])] == ["N AY1 T", "S T EY1 SH AH0 N"]


def test_a_bundle_in_bf16_says_that_its_graphs_were_not_executed() -> None:
    bundle = half_of("fat-tiny", "bf16")
    certificate = certificate_of(bundle)
    assert certificate["engine"] == "onnxruntime CPU, bf16 emulated in float32"
    assert certificate["own_graphs"]["executed"].startswith("not executed")
    # Eight bits instead of eleven.
    largest = certificate["parity"]["largest_difference"]
    assert largest > 2 * certificate_of(half_of("fat-tiny"))["parity"]["largest_difference"]
    assert certificate["parity"]["agreement"] > 0.85
    assert {tensor.dtype for tensor in bundle.spec.memory} == {"bfloat16"}


def test_bf16_on_a_cpu_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="is in bf16, for which onnxruntime's CPU provider has no kernels"):
        OrtEngine(half_of("fat-tiny", "bf16"))


def test_bf16_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="need ml_dtypes, not installed here: pip install ml_dtypes"):
        _check_bfloat16(half_of("fat-tiny", "bf16"), OrtOptions(providers=["cuda", "cpu"]))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_for_a_cpu_is_refused(precision: Precision, tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["export", "fat-tiny", "--out", str(tmp_path / "out"), "--precision", precision])
    assert run.exit_code == 1
    assert re.search(rf"For {precision} export with --target .*onnx", run.output)
    with pytest.raises(ConfigError, match="ort-cpu takes fp32, int8 or int4"):
        write_bundle(model_of("fat-tiny"), tmp_path / "out", origin=Origin(name="fat"), precision=precision)
    assert not (tmp_path / "out").exists()


def test_another_model_does_not_pass_for_the_half_of_a_trained_one() -> None:
    probes = read_probes(half_of("fat-tiny").file(PROBES))
    other = EagerEngine(model_from_preset("fat-tiny", seed=1))
    with pytest.raises(
        ParityFailed, match=r"tokens \(.*%\) are the reference's, a trained model must have at least 99.5%"
    ):
        half_parity(other, exportable_model(model_of("fat-tiny")), probes[:1], LEAST_AGREEMENT)


class Overflowing(EagerEngine):
    """Returns NaN from the third step onwards."""

    def step(self, tokens: Tokens, state: EagerState, want: Want) -> StepOut:
        output = super().step(tokens, state, want)
        return output if state.position < 3 else StepOut(logits=np.full_like(output.logits, np.nan))


def test_a_logit_that_is_not_a_number_is_reported_with_its_place() -> None:
    probes, model = read_probes(half_of("fat-tiny").file(PROBES)), model_of("fat-tiny")
    with pytest.raises(ParityFailed, match="probe 0, row 0, step 2: a logit is infinite or not a number"):
        half_parity(Overflowing(model), exportable_model(model), probes[:1], None)


def test_the_reference_agrees_with_itself() -> None:
    probes, model = read_probes(half_of("fat-tiny").file(PROBES)), model_of("fat-tiny")
    parity = half_parity(EagerEngine(model), exportable_model(model), probes[:2], 1.0)
    assert (parity.same, parity.tokens, parity.rows) == (4 * 48, 4 * 48, 4)
    assert parity.largest_difference_alone < 1e-4


def test_verify_and_inspect_say_what_half_precision_promises() -> None:
    bundle = half_of("fat-tiny")
    verified, inspected = (CliRunner().invoke(main, [verb, str(bundle.path)]) for verb in ("verify", "inspect"))
    assert verified.exit_code == 0
    assert "tokens of 13 rows (" in verified.output
    assert "random weights: judged by the export's" in verified.output
    parity = certificate_of(bundle)["parity"]
    assert f"{parity['same']} of {parity['tokens']} tokens of 13 rows on" in inspected.output
    assert "half: " in inspected.output
