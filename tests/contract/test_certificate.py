"""The certificate: it is read back as written, damage is one error, and bundles of every format load."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fatdeploy
from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.certificate import (
    Certificate,
    CpuCheck,
    CudaRecord,
    GateResult,
    HalfParity,
    LogitAgreement,
    MetricChange,
    OwnGraphs,
    Parity,
    TokenAgreement,
    read_certificate,
    write_certificate,
)
from fatdeploy.errors import BundleError
from fatdeploy.machine import Machine
from fatdeploy.manifest import FORMAT, PARITY, WideRows
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.proof.promise import promise_of
from fatdeploy.runtimes.shortlist.table import read_table

DATA = Path(__file__).parents[1] / "data" / "bundles"
FORMATS = sorted(path.name for path in DATA.iterdir())
SOURCE = [5, 6, 7, 8, 9, 10, 11]
OLD_TOKENS = (10, 53, 57, 37, 37, 42, 49, 49)  # the reference's, whatever the format
TOKENS = {
    **dict.fromkeys(FORMATS, OLD_TOKENS),
    "1.4": (12, 12, 21, 12, 12, 12, 21, 21),
    "1.5": (19, 5, 21, 26, 47, 26, 47, 24),
    "1.6": (19, 5, 21, 26, 47, 26, 47, 4),
    "1.7": (15, 15, 33, 10, 16, 46, 16, 56),
    "1.8": (11, 11, 50, 61, 50, 29, 50, 44),
}

MACHINE = Machine("made up", None, "x86_64", ("avx2",), 4, None, "Linux 6.1", "3.11.7")
HALF = HalfParity(4, 13, 832, 830, 830 / 832, None, 0.01, 12.0, 0.02, 1)
FULL = Certificate(
    engine="onnxruntime CPU",
    parity=Parity(4, 13, 832, 51, 7e-07, 7e-07, 2e-05, 2e-04),
    probes_sha256="ab" * 32,
    versions={"fatdeploy": "0.2.0"},
    machine=MACHINE,
    agreement=LogitAgreement(13, 832, 0, 8e-07, 0.04, 2e-04),
    precision="int8",
    gate=GateResult(
        agreement=TokenAgreement(200, 199, 10, 9),
        metric=MetricChange("bleu", 30.0, 29.5),
        median_error_of_margin=0.01,
        steps_in_danger=0.02,
        bar=0.99,
        points=0.3,
        enforced=True,
        kept=("output",),
        row_difference=0.0,
    ),
    checked_on=(CpuCheck("x86-vnni", 0.995, MACHINE),),
    executed="copies",
    own_graphs=OwnGraphs("its own graphs", HALF),
    cuda=CudaRecord("no GPU", {"decoder.onnx": ("Acosh",)}),
)


@pytest.fixture
def copied(tmp_path: Path) -> Bundle:
    """Return a quantized bundle that a test may change."""
    shutil.copytree(DATA / "1.3", tmp_path / "bundle")
    return read_bundle(tmp_path / "bundle")


def rewritten(bundle: Bundle, values: object) -> Bundle:
    """Return the bundle with another certificate and correct hashes."""
    (bundle.path / PARITY).write_text(values if isinstance(values, str) else json.dumps(values))
    return write_manifest(bundle.path, bundle.manifest)


# -- every released format ---------------------------------------------------------------------------------------------


def test_a_bundle_of_every_format_is_kept() -> None:
    assert [f"{FORMAT[0]}.{minor}" for minor in range(FORMAT[1] + 1)] == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_a_bundle_of_every_format_loads_and_decodes(name: str) -> None:
    with fatdeploy.load(DATA / name, threads=1) as model:
        assert model.bundle.manifest.format == tuple(map(int, name.split(".")))
        (hypothesis,) = model.generate([SOURCE], fatdeploy.DecodeOptions(max_new_tokens=8))
    assert tuple(hypothesis.tokens) == TOKENS[name]


def test_a_bundle_of_an_imported_model_keeps_its_settings_and_its_text() -> None:
    with fatdeploy.load(DATA / "1.4", threads=1) as model:
        spec, generation = model.spec, model.bundle.manifest.generation
        assert (spec.vocab_size, spec.source_vocab_size, spec.silent_ids, spec.pad_id) == (40, 48, (39,), 39)
        assert generation is not None
        assert generation.options == {
            "bad_words": [[39]],
            "forced_eos_id": 0,
            "max_new_tokens": 11,
            "no_repeat_ngram_size": 3,
            "num_beams": 3,
            "renormalize": True,
        }
        hypotheses = model.generate([SOURCE, [5, 47]])
        (translated,) = model.generate(["red cat and seven pen"])
    assert [hypothesis.tokens for hypothesis in hypotheses] == [
        (35, 24, 15, 17, 29, 17, 7, 35, 17, 17),
        (17, 17, 17, 12, 17, 29, 17, 17, 7, 21),
    ]
    assert translated.text == "eight rain bird salt six sand salt bird salt bird"


@pytest.mark.parametrize("name", FORMATS)
def test_rows_have_one_position_unless_the_bundle_says_otherwise(name: str) -> None:
    spec = read_bundle(DATA / name).spec
    assert (spec.row_positions, spec.position.shape) == (
        (True, ("rows",)) if name in ("1.5", "1.6", "1.8") else (False, ())
    )


@pytest.mark.parametrize("name", FORMATS)
def test_state_starts_at_zero_unless_the_bundle_says_otherwise(name: str) -> None:
    spec = read_bundle(DATA / name).spec
    assert [tensor.name for tensor in spec.starts] == (["start.sum"] if name == "1.7" else [])


def test_the_output_bias_of_a_bundle_is_read() -> None:
    matrix = read_bundle(DATA / "1.4").manifest.output_matrix
    assert matrix is not None
    assert matrix.bias is not None
    with closing(OrtEngine(read_bundle(DATA / "1.4"))) as engine:
        biases = engine.output_bias(np.array([0, 39]))
    assert biases is not None
    assert biases[0] == pytest.approx(0.08746128, abs=1e-7)
    assert biases[1] == 0


def test_the_certificate_of_an_imported_model_says_what_the_original_gave() -> None:
    record = read_certificate(read_bundle(DATA / "1.4")).original
    assert record is not None
    assert record.agreement is not None
    assert record.compared == "transformers 5.22.2"
    assert [(result.num_beams, result.targets) for result in record.agreement.generated] == [(3, 13), (1, 13)]


@pytest.mark.parametrize("name", FORMATS)
def test_the_certificate_of_every_format_is_read_and_says_what_the_file_says(name: str) -> None:
    bundle = read_bundle(DATA / name)
    certificate = read_certificate(bundle)
    assert certificate.as_dict() == json.loads((DATA / name / PARITY).read_text())
    assert certificate.parity.tokens == 13 * bundle.spec.max_target
    promise = promise_of(bundle)
    quantized = bundle.manifest.quantization is not None
    assert (promise.share == 1.0) == (not quantized) == (promise.bar is not None)


# -- writing and reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "certificate",
    [
        FULL,
        replace(FULL, gate=None, precision=None, checked_on=(), executed=None, own_graphs=None, cuda=None),
        replace(FULL, parity=HALF, agreement=None, own_graphs=OwnGraphs("not executed")),
    ],
)
def test_what_is_written_comes_back(copied: Bundle, certificate: Certificate) -> None:
    write_certificate(copied.path, certificate)
    assert read_certificate(write_manifest(copied.path, copied.manifest)) == certificate


def test_absent_parts_of_a_certificate_are_left_out() -> None:
    plain = replace(FULL, gate=None, precision=None, checked_on=(), executed=None, own_graphs=None, cuda=None)
    assert set(plain.as_dict()) == {"engine", "parity", "probes_sha256", "versions", "machine", "agreement"}
    own = FULL.as_dict()["own_graphs"]
    assert (own["executed"], own["same"], own["tokens"]) == ("its own graphs", 830, 832)
    gate = FULL.as_dict()["gate"]
    assert (gate["agreement"]["share"], gate["metric"]["lost"]) == (0.995, 0.5)


def test_lines_for_people() -> None:
    assert FULL.gate is not None
    assert FULL.gate.line("int8") == (
        "int8: 99.50% of 200 tokens and 9 of 10 targets are the reference's, bleu 29.50 (reference 30.00); kept in a "
        "higher precision: output"
    )
    assert replace(FULL.gate, enforced=False, kept=()).line("int8").endswith("(random weights: reported, no bar)")
    assert FULL.parity.line().startswith("832 tokens of 13 rows are the reference's; chosen logits within 7.0e-07")
    assert HALF.line().startswith("830 of 832 tokens of 13 rows (99.76%) are the reference's")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": 3}, r"engine: expected str, found 3"),
        ({"parity": {}}, r"parity: expected an object"),
        ({"gate": {}}, r"gate\.agreement: missing; gate\.metric: missing"),
        ({"machine": None, "versions": []}, r"versions: expected .*; machine: expected"),
        ({"surprise": 1}, r"surprise: unknown"),
    ],
)
def test_a_damaged_certificate_is_one_error_with_every_reason(
    copied: Bundle, changes: dict[str, Any], reason: str
) -> None:
    values = json.loads((copied.path / PARITY).read_text())
    with pytest.raises(BundleError, match=rf"parity\.json cannot be read: {reason}.*; export the bundle again"):
        read_certificate(rewritten(copied, {**values, **changes}))


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "3"])
def test_a_file_that_is_not_a_certificate_is_a_bundle_error(copied: Bundle, text: str) -> None:
    with pytest.raises(BundleError, match=r"parity\.json cannot be read: .*; export the bundle again"):
        read_certificate(rewritten(copied, text))


def test_a_later_minor_may_add_to_a_certificate(copied: Bundle) -> None:
    values = json.loads((copied.path / PARITY).read_text())
    (copied.path / PARITY).write_text(json.dumps({**values, "surprise": 1}))
    later = write_manifest(copied.path, replace(copied.manifest, format=(FORMAT[0], FORMAT[1] + 1)))
    assert read_certificate(later).parity.tokens == 13 * 16


def test_impossible_counts_are_refused(copied: Bundle) -> None:
    values = json.loads((copied.path / PARITY).read_text())
    values["gate"]["agreement"] |= {"same_tokens": 7, "tokens": 3}
    with pytest.raises(BundleError, match=r"gate\.agreement: expected some of at least one token, found 7 of 3"):
        read_certificate(rewritten(copied, values))


def test_a_bundle_with_a_shortlist_keeps_it() -> None:
    with fatdeploy.load(DATA / "1.5", threads=1) as model:
        record = model.bundle.manifest.shortlist
        assert record is not None
        assert (record.lines, record.held_out, record.frequent) == (27, 3, 10)
        (listed,) = model.generate([SOURCE], max_new_tokens=8, shortlist="auto")
    table = read_table(model.bundle)
    assert table is not None
    assert set(listed.tokens) <= {*table.frequent.tolist(), *table.targets_of(np.array(SOURCE)).tolist()}
    assert tuple(listed.tokens) == (29, 8, 35, 8, 43, 39, 43, 50)


def test_a_smoothed_output_matrix_says_how_hidden_states_become_bytes() -> None:
    matrix = read_bundle(DATA / "1.5").manifest.output_matrix
    assert matrix is not None
    assert (matrix.dtype, matrix.block_size, matrix.smoothing, matrix.bias) == ("int8", None, 24576, 24960)
    assert matrix.activation == (pytest.approx(0.01990777), 127)


def test_an_output_matrix_whose_first_rows_have_8_bits_says_where_they_are() -> None:
    bundle = read_bundle(DATA / "1.6")
    matrix = bundle.manifest.output_matrix
    assert matrix is not None
    assert (matrix.dtype, matrix.offset, matrix.scales, matrix.zeros) == ("int4", 10816, 11584, 11776)
    assert matrix.wide == WideRows(rows=16, offset=10240, scales=10752, block_size=32)
    assert bundle.manifest.quantization is not None
    assert bundle.manifest.quantization.matrices["output"] == "int4 split at 16"
