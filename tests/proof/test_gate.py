"""The gate of quantized bundles: what it counts and refuses, what it certifies, and what it keeps to pass."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.certificate import MetricChange, TokenAgreement, read_certificate
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError, ParityFailed
from fatdeploy.export.graph_files import graphs_of
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.pipeline import Origin, Plain, trial_of, write_quantized
from fatdeploy.export.quantize.examples import Example, random_examples
from fatdeploy.export.quantize.gate import RANDOM_STEPS, Bar, Gate, Judgement, metric_of
from fatdeploy.export.quantize.planning.plan import planned
from fatdeploy.export.quantize.quantizer import Quantizer
from fatdeploy.export.quantize.request import QuantizeRequest
from fatdeploy.export.training.tokenizers import Kind, built_tokenizer
from fatdeploy.machine import Machine
from fatdeploy.manifest import DECODER, EMBEDDING, ENCODER, GATE, PARITY, WEIGHTS, Quantization
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.runtimes.proof import cpu_checks, gate
from fatdeploy.runtimes.proof.cpu_checks import cpu_class, record_here
from fatdeploy.runtimes.proof.fidelity import Fidelity
from fatdeploy.runtimes.proof.gate import (
    Material,
    check_rows,
    read_material,
    token_agreement,
    write_material,
)
from fatdeploy.runtimes.proof.promise import Promise
from fatdeploy.runtimes.proof.verify import verified_quantized
from fatdeploy.runtimes.text.tokenizer import Tokenizer, tokenizer_from_file
from fatdeploy.spec import Tokens
from tests.support.aligned import aligned
from tests.support.bundles import bundle_of, model_of
from tests.support.engines.scripted import SPEC, ScriptedEngine
from tests.support.quantized import hollow_bundle, quantized_of, quantizer_from, quantizer_of

TINY = "transformer-tiny"
# What follows each token, by the first token of the source; 9 follows all others.
RULES: dict[int, dict[int, int]] = {
    5: {1: 3, 3: 4, 4: 2},  # says 3 4 EOS
    6: {1: 3, 3: 4, 4: 4},  # says 3 4 4 4
    7: {1: 2},  # says EOS
    8: {1: 4, 3: 4, 4: 2},  # says 4 EOS
}
MATERIAL = Material(
    source=np.array([[5, 9], [6, 0], [7, 9], [8, 0]]),
    mask=np.array([[True, True], [True, False], [True, True], [True, False]]),
    tokens=np.array([[3, 4, 2, 0], [3, 3, 3, 3], [2, 0, 0, 0], [3, 4, 2, 0]]),
    lengths=np.array([3, 4, 1, 3]),
)
SAID = Quantization("any", 7, {"output": "int8 static"}, enforced=True)


class FollowingEngine(ScriptedEngine):
    """Follows the rules after each token, however many tokens it reads at once."""

    def __init__(self) -> None:
        super().__init__({first: [first] for first in RULES})
        self.encoded = 0

    def encode(self, *arguments: Any) -> list[list[int]]:
        self.encoded += 1
        return super().encode(*arguments)

    def step(self, tokens: Tokens, state: list[list[int]], want: Want) -> StepOut:
        logits = np.zeros((*tokens.shape, self.spec.vocab_size), np.float32)
        for row, (first,) in enumerate(state):
            for place, token in enumerate(tokens[row].tolist()):
                logits[row, place, RULES[first].get(token, 9)] = 1
        return StepOut(None, logits=logits)


def repeated(times: int) -> Material:
    return Material(**{name: np.concatenate([getattr(MATERIAL, name)] * times) for name in vars(MATERIAL)})


def bytes_of(**arrays: Any) -> bytes:
    data = BytesIO()
    np.savez(data, **arrays)
    return data.getvalue()


def judged_bundle(folder: Path, certificate: object) -> Bundle:
    """Return a bundle with the material that judges it and a certificate."""
    plain = json.loads(bundle_of(TINY).file(PARITY).read_text())
    values = {**plain, **certificate} if isinstance(certificate, dict) else certificate
    files = {"parity_json": json.dumps(values).encode(), "gate_npz": bytes_of(**vars(MATERIAL))}
    return hollow_bundle(folder, SAID, **files)


def certificate_with(bar: float, *, enforced: bool) -> dict[str, Any]:
    counts = {"tokens": 4, "same_tokens": 3, "sequences": 2, "same_sequences": 1}
    rest = {"metric": None, "median_error_of_margin": 0.1, "steps_in_danger": 0.1, "points": 0.3, "kept": []}
    return {"gate": {"agreement": counts, "bar": bar, "enforced": enforced, "row_difference": 0.0, **rest}}


# -- material ----------------------------------------------------------------------------------------------------------


def test_rows_have_no_more_padding_than_they_need() -> None:
    rows = MATERIAL.rows(slice(2, 4))
    assert rows.source.tolist() == [[7, 9], [8, 0]]
    assert rows.tokens.tolist() == [[2, 0, 0], [3, 4, 2]]
    alone = MATERIAL.rows(slice(3, 4))
    assert (alone.source.tolist(), alone.mask.tolist(), alone.tokens.tolist()) == ([[8]], [[True]], [[3, 4, 2]])
    assert rows.counts.tolist() == [[True, False, False], [True, True, True]]


@pytest.mark.parametrize(
    ("size", "shapes"), [(3, [(3, 2, 4), (1, 1, 3)]), (2, [(2, 2, 4), (2, 2, 3)]), (9, [(4, 2, 4)])]
)
def test_batches_are_all_rows_in_order(size: int, shapes: list[tuple[int, int, int]]) -> None:
    batches = list(MATERIAL.batches(size))
    assert [(*batch.source.shape, batch.tokens.shape[1]) for batch in batches] == shapes
    assert np.concatenate([batch.source[:, 0] for batch in batches]).tolist() == [5, 6, 7, 8]
    assert np.concatenate([batch.lengths for batch in batches]).tolist() == [3, 4, 1, 3]


def test_a_batch_with_a_long_target_has_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MOST_STEPS", 6)
    batches = list(repeated(2).batches())
    # Targets of 3, 4, 1 and 3 tokens: two of 4 are more than 6 steps, two of 3 are not.
    assert [batch.lengths.tolist() for batch in batches] == [[3], [4], [1, 3], [3], [4], [1, 3]]
    assert token_agreement(FollowingEngine(), repeated(2)) == TokenAgreement(22, 14, 8, 4)
    monkeypatch.setattr(gate, "MOST_STEPS", 2)
    assert [batch.lengths.tolist() for batch in MATERIAL.batches()] == [[3], [4], [1], [3]]


def test_targets_have_no_eos_and_are_in_reading_order() -> None:
    assert MATERIAL.targets(SPEC) == [[3, 4], [3, 3, 3, 3], [], [3, 4]]
    assert MATERIAL.targets(replace(SPEC, target_order="right_to_left")) == [[4, 3], [3, 3, 3, 3], [], [4, 3]]


def test_material_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_material(tmp_path / GATE, MATERIAL)
    material = read_material(hollow_bundle(tmp_path / "bundle", SAID, gate_npz=(tmp_path / GATE).read_bytes()))
    for name, array in vars(MATERIAL).items():
        np.testing.assert_array_equal(getattr(material, name), array, strict=True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "No data left in file"),
        (b"not a zip", "contains pickled"),
        (bytes_of(**vars(MATERIAL))[:300], ""),
        (bytes_of(source=MATERIAL.source), "mask is not a file in the archive"),
        (bytes_of(**{**vars(MATERIAL), "mask": np.array([{}])}), "Object arrays cannot be loaded"),
        (bytes_of(**{**vars(MATERIAL), "mask": MATERIAL.mask[:, :1]}), r"bool \[4, 1\], int64 \[4, 4\], int64 \[4\]"),
        (bytes_of(**{**vars(MATERIAL), "tokens": MATERIAL.tokens[:3]}), r"no sources and targets: .* int64 \[3, 4\]"),
        (bytes_of(**{**vars(MATERIAL), "tokens": MATERIAL.tokens[0]}), r"no sources and targets: .* int64 \[4\]"),
        (bytes_of(**{**vars(MATERIAL), "mask": MATERIAL.source}), r"no sources and targets: int64 \[4, 2\], int64"),
        (bytes_of(**{name: array[:0] for name, array in vars(MATERIAL).items()}), r"no sources and .*int64 \[0, 2\]"),
        (
            bytes_of(**{**vars(MATERIAL), "lengths": np.array([3, 5, 1, 3])}),
            r"targets have 1…4 tokens, found \[3, 5, 1, 3\]",
        ),
        (
            bytes_of(**{**vars(MATERIAL), "lengths": np.array([3, 4, 0, 3])}),
            r"targets have 1…4 tokens, found \[3, 4, 0, 3\]",
        ),
    ],
)
def test_damaged_material_is_a_bundle_error(tmp_path: Path, data: bytes, reason: str) -> None:
    bundle = hollow_bundle(tmp_path / "bundle", SAID, gate_npz=data)
    with pytest.raises(BundleError, match=rf"cannot read .*gate\.npz: .*{reason}.*; export the bundle again"):
        read_material(bundle)


def test_a_bundle_without_material_says_so(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"does not list gate\.npz"):
        read_material(hollow_bundle(tmp_path / "bundle", SAID))


# -- agreement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 9])
def test_agreement_is_counted_after_the_references_tokens_and_by_itself(times: int) -> None:
    engine = FollowingEngine()
    agreement = token_agreement(engine, repeated(times))
    # Source 5: all of 3. Source 6: 3, then 4 three times instead of 3. Source 7: its EOS. Source 8: all but the
    # first; decoding freely it diverges from there.
    assert agreement == TokenAgreement(11 * times, (3 + 1 + 1 + 2) * times, 4 * times, 2 * times)
    assert agreement.share == pytest.approx(7 / 11)
    assert engine.released == engine.encoded > 0


def test_rows_that_do_not_depend_on_their_batch_differ_by_zero() -> None:
    engine = FollowingEngine()
    assert check_rows(engine, MATERIAL, "int8") == 0.0
    assert engine.released == engine.encoded == 1 + 4 + 1


class Crowded(FollowingEngine):
    """Adds to every logit a number that depends on how many rows there are."""

    per_row = 0.001

    def step(self, tokens: Tokens, state: list[list[int]], want: Want) -> StepOut:
        out = super().step(tokens, state, want)
        assert out.logits is not None
        return replace(out, logits=out.logits + np.float32(self.per_row * len(state)))


def test_a_row_that_depends_on_its_batch_is_refused_by_what_its_precision_allows() -> None:
    with pytest.raises(
        ParityFailed,
        match=r"row 0 of a batch of 4 gets logits that differ from those it gets alone by 3\.0e-03 of the largest "
        r"\(bound 0e\+00 for int8\): a row depends on its batch",
    ):
        check_rows(Crowded(), MATERIAL, "int8")
    with pytest.raises(ParityFailed, match=r"\(bound 2e-03 for fp16\)"):
        check_rows(Crowded(), MATERIAL, "fp16")
    assert check_rows(Crowded(), MATERIAL, "bf16") == pytest.approx(0.003 / 1.001, rel=1e-3)


def test_nan_logits_are_refused() -> None:
    engine = Crowded()
    engine.per_row = float("nan")
    with pytest.raises(ParityFailed, match="differ from those it gets alone by nan"):
        check_rows(engine, MATERIAL, "bf16")


class Remembering(FollowingEngine):
    """Answers differently when it sees a batch again."""

    def step(self, tokens: Tokens, state: list[list[int]], want: Want) -> StepOut:
        out = super().step(tokens, state, want)
        assert out.logits is not None
        return replace(out, logits=out.logits + np.float32(1e-6 * (self.encoded > 5)))


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_an_engine_that_is_not_repeatable_is_refused_in_every_precision(precision: str) -> None:
    with pytest.raises(ParityFailed, match="the same batch decoded twice gave two answers"):
        check_rows(Remembering(), MATERIAL, precision)


# -- verification ------------------------------------------------------------------------------------------------------


def test_below_an_enforced_bar_is_a_failure(tmp_path: Path) -> None:
    certificate = certificate_with(0.995, enforced=True)
    bundle = judged_bundle(tmp_path / "bundle", certificate)
    with pytest.raises(
        ParityFailed,
        match=r"7 of 11 tokens are the reference's here \(63\.64%\), the bar is 99\.50% and 75\.00% were when it was "
        r"exported: this CPU computes something else",
    ):
        verified_quantized(bundle, FollowingEngine())


@pytest.mark.parametrize(("bar", "enforced"), [(0.995, False), (7 / 11, True), (0.5, True)])
def test_a_bundle_at_its_bar_or_without_one_is_reported(tmp_path: Path, bar: float, enforced: bool) -> None:
    certificate = certificate_with(bar, enforced=enforced)
    bundle = judged_bundle(tmp_path / "bundle", certificate)
    assert asdict(verified_quantized(bundle, FollowingEngine())) == {
        "tokens": 11,
        "same_tokens": 7,
        "sequences": 4,
        "same_sequences": 2,
        "share": 7 / 11,
        "recorded_share": 0.75,
        "bar": bar,
        "enforced": enforced,
        "row_difference": 0.0,
    }


def test_without_a_bar_only_the_cost_of_rounding_is_accepted() -> None:
    few, many = Promise(0.75, None), Promise(0.95, None)
    # 3 tokens of few, a hundredth of many; the certified share of 12 tokens is 9 of them, of 1,000 it is 950.
    assert few.lost(Fidelity(12, 6)) is None
    assert few.lost(Fidelity(12, 5)) == (
        "5 of 12 tokens are the reference's here (41.67%) and 75.00% were when it was exported; rounding on another "
        "machine explains at most 3 tokens"
    )
    assert many.lost(Fidelity(1000, 940)) is None
    assert many.lost(Fidelity(1000, 939)) is not None
    assert many.lost(Fidelity(1000, 1000)) is None
    # Where there is a bar, nothing else counts.
    assert Promise(1.0, 0.9).lost(Fidelity(1000, 900)) is None
    assert Promise(0.9, 0.95).lost(Fidelity(1000, 949)) is not None


def with_scales_times(bundle: Bundle, folder: Path, factor: float) -> Bundle:
    """Return a copy with the decoder's float tensors multiplied: it loads, hashes are right, numbers are not."""
    shutil.copytree(bundle.path, folder)
    data = bytearray(bundle.file(WEIGHTS).read_bytes())
    graph = onnx.load(bundle.file(DECODER), load_external_data=False).graph
    places = set()
    for tensor in (initializer for part in graphs_of(graph) for initializer in part.initializer):
        external = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_type == onnx.TensorProto.FLOAT and external:
            places.add((int(external["offset"]), int(external["length"])))
    assert places
    for offset, length in places:
        floats = np.frombuffer(bytes(data[offset : offset + length]), np.float32)
        data[offset : offset + length] = (floats * np.float32(factor)).tobytes()
    (folder / WEIGHTS).write_bytes(data)
    return write_manifest(folder, bundle.manifest)


def test_random_weights_that_are_damaged_are_refused_and_those_rounded_otherwise_are_not(tmp_path: Path) -> None:
    bundle = quantized_of(TINY, "int8")
    gated = read_certificate(bundle).gate
    assert gated is not None
    assert not gated.enforced
    rounded = with_scales_times(bundle, tmp_path / "rounded", 1 + 2.0**-23)
    agreement = verified_quantized(rounded, OrtEngine(rounded, OrtOptions(threads=1)))
    assert abs(agreement.same_tokens - gated.agreement.same_tokens) <= 3
    damaged = with_scales_times(bundle, tmp_path / "damaged", 1.25)
    with pytest.raises(
        ParityFailed, match=r"of 711 tokens .* rounding .* explains at most 7 tokens: .*; export again with --cpu"
    ):
        verified_quantized(damaged, OrtEngine(damaged, OrtOptions(threads=1)))


@pytest.mark.parametrize(
    "certificate",
    [
        {},
        {"gate": 3},
        {"gate": {"bar": 1, "enforced": True}},
        {"gate": {**certificate_with(1, enforced=True)["gate"], "bar": "x"}},
    ],
)
def test_a_certificate_without_a_gate_is_a_bundle_error(tmp_path: Path, certificate: dict[str, Any]) -> None:
    bundle = judged_bundle(tmp_path / "bundle", certificate)
    with pytest.raises(BundleError, match=r"parity\.json cannot be read: gate.*; export the bundle again"):
        verified_quantized(bundle, FollowingEngine())


# -- kinds of CPU ------------------------------------------------------------------------------------------------------


def machine_with(architecture: str, features: tuple[str, ...] | None, cpu: str = "made up") -> Machine:
    return Machine(cpu, None, architecture, features, 4, None, "Linux 6.1", "3.11.7")


@pytest.mark.parametrize(
    ("architecture", "features", "expected"),
    [
        ("x86_64", ("avx", "avx2", "avx512f", "avx512_vnni"), "x86-vnni"),
        ("AMD64", ("avx", "avx2", "avx_vnni"), "x86-vnni"),
        ("x86_64", ("avx", "avx2", "fma"), "x86-avx2"),
        ("x86_64", ("avx",), None),
        ("x86_64", None, None),
        ("aarch64", ("asimd", "asimddp"), "arm64"),
        ("arm64", None, "arm64"),
        ("ARM64", None, "arm64"),
        ("armv7l", ("neon",), None),
    ],
)
def test_the_class_of_a_cpu(architecture: str, features: tuple[str, ...] | None, expected: str | None) -> None:
    assert cpu_class(machine_with(architecture, features)) == expected


def test_a_record_adds_a_kind_of_cpu_and_replaces_one_of_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = judged_bundle(tmp_path / "bundle", {**certificate_with(0.5, enforced=True), "engine": "onnxruntime CPU"})
    (first.path / "notes").mkdir()
    (first.path / "notes" / "mine.txt").write_text("of a user")

    def recorded(machine: Machine, share: float) -> list[tuple[str, str, float]]:
        monkeypatch.setattr(cpu_checks, "this_machine", lambda: machine)
        record_here(read_bundle(first.path), share)
        bundle = read_bundle(first.path)
        assert (bundle.digest, bundle.manifest.files.keys()) == (first.digest, first.manifest.files.keys())
        certificate = json.loads(bundle.file(PARITY).read_text())
        assert (certificate["gate"]["bar"], certificate["engine"]) == (0.5, "onnxruntime CPU")
        return [(check["cpu_class"], check["machine"]["cpu"], check["share"]) for check in certificate["checked_on"]]

    vnni = machine_with("x86_64", ("avx2", "avx512_vnni"), "new")
    assert recorded(vnni, 0.99) == [("x86-vnni", "new", 0.99)]
    arm = machine_with("aarch64", (), "small")
    assert recorded(arm, 0.98) == [("x86-vnni", "new", 0.99), ("arm64", "small", 0.98)]
    newer = machine_with("x86_64", ("avx2", "avx_vnni"), "newer")
    assert recorded(newer, 0.97) == [("arm64", "small", 0.98), ("x86-vnni", "newer", 0.97)]
    assert (first.path / "notes" / "mine.txt").read_text() == "of a user"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("entries", [3, [3], None])
def test_a_record_in_a_damaged_certificate_is_refused(tmp_path: Path, entries: object) -> None:
    bundle = judged_bundle(tmp_path / "bundle", {"checked_on": entries})
    with pytest.raises(BundleError, match=r"parity\.json cannot be read: checked_on.*; export the bundle again"):
        record_here(bundle, 1.0)


@pytest.mark.parametrize("certificate", [[], 3])
def test_a_certificate_that_is_not_an_object_is_refused(tmp_path: Path, certificate: object) -> None:
    with pytest.raises(BundleError, match=r"parity\.json cannot be read: expected an object, found "):
        record_here(judged_bundle(tmp_path / "bundle", certificate), 1.0)


# -- judgement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reference", "quantized", "lost"),
    [
        ("token_error_rate", 10.0, 12.5, 2.5),
        ("sequence_error_rate", 30.0, 29.0, -1.0),
        ("bleu", 30.0, 28.0, 2.0),
        ("chrf", 50.0, 50.5, -0.5),
        ("exact_match", 70.0, 69.0, 1.0),
    ],
)
def test_points_are_lost_where_errors_grow_or_scores_fall(
    name: str, reference: float, quantized: float, lost: float
) -> None:
    assert MetricChange(name, reference, quantized).lost == lost


@pytest.mark.parametrize(
    ("bar", "same", "errors", "passes"),
    [
        (None, 99, None, True),
        (None, 98, None, False),
        # With targets the metric decides alone, unless a share was asked for as well.
        (None, 90, 10.25, True),
        (None, 100, 10.5, False),
        (0.99, 99, 10.25, True),
        (0.99, 98, 9.0, False),
        (0.99, 99, 10.5, False),
    ],
)
def test_a_judgement_passes_by_tokens_or_by_points(
    bar: float | None, same: int, errors: float | None, passes: bool
) -> None:
    metric = None if errors is None else MetricChange("token_error_rate", 10.0, errors)
    judgement = Judgement(TokenAgreement(100, same, 10, 9), metric, 0.01, 0.0)
    assert judgement.passes(Bar(bar, 0.25), 0.99) is passes


def test_a_judgement_in_one_line() -> None:
    judgement = Judgement(TokenAgreement(200, 199, 10, 9), MetricChange("bleu", 30.0, 29.5), 0.01, 0.02)
    assert judgement.line() == (
        "99.50% of 200 tokens and 9 of 10 targets are the reference's; bleu 29.50 (reference 30.00)"
    )


class Numbers:
    """A tokenizer whose texts are ids."""

    n_tokens = 64

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def test_the_reference_itself_is_judged_to_be_right_and_another_model_is_not() -> None:
    reference = EagerEngine(model_of(TINY))
    sources = [example.source for example in random_examples(reference.spec, 1)[:3]]
    most = {"most_steps": RANDOM_STEPS}
    first = Gate(reference, [Example(source) for source in sources], None, **most)
    targets = [" ".join(map(str, row)) for row in first.material.targets(reference.spec)]
    # Two of three references are the model's own targets; no model returns the third.
    references = [targets[0], targets[1], " ".join(["x"] * len(targets[2].split()))]
    examples = [Example(ids, (text,)) for ids, text in zip(sources, references, strict=True)]
    judged = Gate(reference, examples, Numbers(), metric="token_error_rate", **most).judged(reference)
    n_tokens = int(first.material.lengths.sum())
    assert judged.agreement == TokenAgreement(n_tokens, n_tokens, 3, 3)
    lengths = [len(row.split()) for row in targets]
    expected = 100 * lengths[2] / sum(lengths)
    assert judged.metric is not None
    assert (judged.metric.name, judged.metric.lost) == ("token_error_rate", 0.0)
    assert (judged.metric.reference, judged.metric.quantized) == pytest.approx((expected, expected))
    assert (judged.median_error, judged.steps_in_danger) == (0.0, 0.0)
    second = Gate(reference, examples, Numbers(), metric="token_error_rate", **most)
    other = second.judged(EagerEngine(model_of("at-tiny")))
    assert other.agreement.share < 0.5
    assert other.metric is not None
    assert other.metric.lost > 30
    assert other.steps_in_danger > 0.5
    assert first.judged(reference).metric is None


@pytest.mark.parametrize("random", [True, False])
def test_targets_of_random_weights_are_cut_and_those_of_trained_ones_are_judged_to_the_end(
    tmp_path: Path, random: bool
) -> None:
    plain = bundle_of(TINY)
    exportable = exportable_model(model_of(TINY)).with_spec(plain.spec)
    graphs = {part: plain.path / part for part in (ENCODER, DECODER)}
    model = Plain(exportable, Origin(name=TINY, random=random), "ort-cpu", {}, graphs, stage=lambda _: None)
    request = QuantizeRequest(
        precision="int8", of={"*": "fp32", "output": "int8", EMBEDDING: "int8"}, bar=Bar(agreement=0.5)
    )
    examples = [Example(ids) for ids in (np.array([5, 9, 33]), np.array([40, 8]))]
    trial = trial_of(model.origin, request, (examples, examples), None, lambda _: None)
    write_quantized(model, plain, folder_in(tmp_path), trial)
    material = read_material(read_bundle(tmp_path / "new"))
    whole = [decode(EagerEngine(exportable), [example.source])[0] for example in examples]
    lengths = [len(hypothesis.tokens) + (hypothesis.finish == "eos") for hypothesis in whole]
    assert max(lengths) > RANDOM_STEPS
    assert material.lengths.tolist() == [min(RANDOM_STEPS, length) if random else length for length in lengths]


def test_a_metric_of_a_trained_model_compares_whole_targets() -> None:
    reference = EagerEngine(exportable_model(model_of(TINY), Choices(max_target=80)))
    (whole,) = decode(reference, [np.array([5, 9, 33])])
    examples = [Example(np.array([5, 9, 33]), (" ".join(map(str, whole.tokens)),))]
    assert len(whole.tokens) > RANDOM_STEPS
    judged = Gate(reference, examples, None, metric="token_error_rate").judged(reference)
    assert judged.metric == MetricChange("token_error_rate", 0.0, 0.0)
    cut = Gate(reference, examples, None, metric="token_error_rate", most_steps=50).judged(reference)
    assert cut.metric is not None
    assert cut.metric.reference == cut.metric.quantized == pytest.approx(100 * (1 - 50 / len(whole.tokens)))


# -- which metric ------------------------------------------------------------------------------------------------------

PAIR, BARE = Example(np.array([3]), ("x",)), Example(np.array([4]))


def tokenizer_of(kind: Kind, folder: Path) -> Tokenizer:
    built_tokenizer([("a b", "a b")], kind).save(folder / "tokenizer.json")
    return tokenizer_from_file(folder / "tokenizer.json")


def silent(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize(
    ("kind", "metric"), [("symbols", "token_error_rate"), ("characters", "token_error_rate"), ("bpe", "bleu")]
)
def test_the_metric_is_that_of_the_tokens_unless_one_is_wanted(tmp_path: Path, kind: Kind, metric: str) -> None:
    tokenizer = tokenizer_of(kind, tmp_path)
    assert metric_of(None, [PAIR, PAIR], tokenizer, silent) == metric
    assert metric_of("exact_match", [PAIR], tokenizer, silent) == "exact_match"
    assert metric_of("chrf", [PAIR], tokenizer, silent) == "chrf"
    assert metric_of(None, [BARE, BARE], tokenizer, silent) is None


def test_ids_without_a_tokenizer_are_symbols() -> None:
    assert metric_of(None, [PAIR], None, silent) == "token_error_rate"


def test_without_sacrebleu_the_chosen_metric_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    tokenizer, messages = tokenizer_of("bpe", tmp_path), list[str]()
    assert metric_of(None, [PAIR], tokenizer, messages.append) == "token_error_rate"
    assert messages == ["judging by token_error_rate: bleu needs sacrebleu (pip install 'fatdeploy[eval]')"]
    with pytest.raises(BackendUnavailable, match=r"pip install .*, or choose another metric: --metric token_"):
        metric_of("bleu", [PAIR], tokenizer, silent)


def test_what_cannot_be_measured_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"1 of 3 probes have no target: give each of --probes a target, or none"):
        metric_of(None, [PAIR, BARE, PAIR], None, silent)
    with pytest.raises(
        ConfigError,
        match=r"no metric: --metric bleu needs targets: give --probes a file with source, TAB, target per line; "
        r"--metric bleu needs text, and the model has no tokenizer: use --metric token_error_rate$",
    ):
        metric_of("bleu", [BARE, BARE], None, silent)


def test_metrics_of_text_are_better_when_they_are_higher() -> None:
    reference, other = EagerEngine(model_of(TINY)), EagerEngine(model_of("at-tiny"))
    examples = [Example(ids) for ids in (np.array([5, 9, 33]), np.array([40, 8]))]
    rows = Gate(reference, examples, None, most_steps=20).material.targets(reference.spec)
    pairs = [
        replace(example, references=(" ".join(map(str, row)),)) for example, row in zip(examples, rows, strict=True)
    ]
    for metric in ("bleu", "chrf", "exact_match"):
        change = Gate(reference, pairs, Numbers(), metric=metric, most_steps=20).judged(other).metric
        assert change is not None
        assert change.reference == pytest.approx(100)
        assert change.lost == pytest.approx(100 - change.quantized)
        assert change.lost > 50


# -- what a quantization must keep -------------------------------------------------------------------------------------

FEW = {"encoder.*": "fp32", "*ffn*": "fp32", "*attention*": "fp32"}


def folder_in(path: Path) -> Path:
    (path / "new").mkdir()
    return path / "new"


def test_below_the_bar_every_matrix_is_listed_the_worst_first(tmp_path: Path) -> None:
    request = QuantizeRequest(precision="int8", of={"*": "int8"}, bar=Bar(agreement=1.01))
    quantizer = quantizer_of(TINY, request)
    with pytest.raises(
        ParityFailed,
        match=r"the gate refuses this int8 bundle: \d\d\.\d\d% of 711 tokens and \d+ of 12 targets are the "
        r"reference's; the bar is 101\.00% of tokens, and no plan reaches it: allow higher precisions \(leave out "
        r"--precision-of\), or .*worst first:$",
    ) as caught:
        quantizer.written(folder_in(tmp_path), enforced=True)
    names = [line.split()[0] for line in caught.value.table]
    assert len(names) == 23
    assert set(names) == {matrix.name for matrix in quantizer.matrices}
    errors = [float(line.split()[-1]) for line in caught.value.table]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0


def test_a_plan_of_floats_alone_reaches_every_token_but_no_impossible_bar(tmp_path: Path) -> None:
    quantizer = quantizer_of(TINY, QuantizeRequest(precision="int8", bar=Bar(agreement=1.01)))
    with pytest.raises(ParityFailed, match=r"100\.00% of 711 tokens .* no plan reaches it: give better --calibration"):
        quantizer.written(folder_in(tmp_path), enforced=True)


def test_without_a_bar_to_meet_nothing_is_refused(tmp_path: Path) -> None:
    quantizer = quantizer_of(TINY, QuantizeRequest(precision="int8", of=FEW, bar=Bar(agreement=1.01)))
    judged = quantizer.written(folder_in(tmp_path), enforced=False)
    assert (judged.kept, judged.quantization.enforced) == ((), False)
    assert 0.9 < judged.judgement.agreement.share < 1


def measured(request: QuantizeRequest, folder: Path) -> tuple[Quantizer, float]:
    """Return a quantizer and the share that it reaches with nothing kept."""
    quantizer = quantizer_of(TINY, request)
    return quantizer, quantizer.written(folder, enforced=False).judgement.agreement.share


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_plan_gets_more_exact_until_it_passes_and_says_what_is_kept(tmp_path: Path, precision: Any) -> None:
    folder = folder_in(tmp_path)
    quantizer, share = measured(QuantizeRequest(precision=precision, of=FEW), folder)
    cheapest = planned(quantizer.options, np.inf)
    quantizer.request = replace(quantizer.request, bar=Bar(agreement=(share + 1) / 2))
    judged = quantizer.written(folder, enforced=True)
    assert judged.judgement.agreement.share >= quantizer.request.least_agreement > share
    assert judged.quantization.enforced
    errors = {row.name: row.error for row in judged.plan}
    assert sum(errors.values()) < cheapest.error
    assert errors.keys() == quantizer.options.keys()
    kinds = judged.quantization.matrices
    assert {row.name: row.kind for row in judged.plan} == {name: kinds[name] for name in errors}
    raised = [name for name in errors if not kinds[name].startswith(quantizer.precisions[name])]
    assert sorted(judged.kept) == sorted(raised)
    assert read_bundle(folder).manifest.quantization == replace(judged.quantization, enforced=False)


def test_nothing_is_raised_while_the_precision_that_was_asked_for_can_pass(tmp_path: Path) -> None:
    quantizer, share = measured(QuantizeRequest(precision="int8"), folder_in(tmp_path))
    quantizer.request = replace(quantizer.request, bar=Bar(agreement=share - 0.1))
    judged = quantizer.written(tmp_path / "new", enforced=True)
    assert judged.kept == ()
    assert {row.kind for row in judged.plan} == {"int8 static"}


def test_an_untied_embedding_is_judged_and_can_be_kept(tmp_path: Path) -> None:
    engine, reference = aligned("plain", "ort", 0)
    plain, exportable = engine._bundle, exportable_model(reference.exportable)
    assert not any(
        matrix.tied for matrix in quantizer_from(plain, exportable, QuantizeRequest(precision="int4")).matrices
    )
    request = QuantizeRequest(precision="int4", of={"*": "fp32", EMBEDDING: "int4"}, bar=Bar(agreement=1.01))
    quantizer = quantizer_from(plain, exportable, request)
    with pytest.raises(ParityFailed, match="the gate refuses this int4 bundle") as caught:
        quantizer.written(folder_in(tmp_path), enforced=True)
    name, kind, error = caught.value.table[0].split()
    assert (name, kind) == (EMBEDDING, "int4")
    assert float(error) > 0
    free = quantizer_from(plain, exportable, replace(request, of={"encoder.*": "fp32", "decoder.*": "fp32"}))
    assert [option.recipe.precision for option in free.options[EMBEDDING]] == ["fp32", "int8", "int4"]
