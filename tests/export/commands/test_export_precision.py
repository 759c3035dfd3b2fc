"""``fatdeploy export --precision``: one quantized bundle from the command to its record, and what is refused early."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.errors import ConfigError
from fatdeploy.export.commands.export import export
from fatdeploy.export.commands.export_options import precision_of, precisions_from_text
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.quantize.gate import Bar
from fatdeploy.export.quantize.request import QuantizeRequest
from fatdeploy.export.reference.checkpoint import save_checkpoint
from fatdeploy.machine import this_machine
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import SOURCE_MULTIPLE, OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.evaluation.metrics import METRICS
from fatdeploy.runtimes.proof.cpu_checks import cpu_class
from tests.support.bundles import bundle_of, model_of, shared_bundle
from tests.support.choices import tiny

TINY = "transformer-tiny"
# The longest source is not a multiple of SOURCE_MULTIPLE: it cannot be padded to one.
MOST = 30
PLAIN: dict[str, Any] = {
    "tokenizer": "keep",
    "precision": "fp32",
    "precision_of": (),
    "cpu": "any",
    "calibration": None,
    "probes": None,
    "purpose": "latency",
    "rows": None,
    "recover": False,
    "min_agreement": None,
    "max_loss": 0.3,
    "metric": None,
    "activations": "int8",
    "ranges": "percentile",
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@cache
def exported() -> tuple[Bundle, dict[str, str]]:
    """Return a bundle that the command has written, and its output."""
    options = ("--precision", "int8", "--attention", 1, "--max-source", MOST, "--max-target", 40)

    def write(folder: Path) -> None:
        result = run("export", TINY, "--out", folder, *options)
        assert result.exit_code == 0, result.stderr
        folder.with_suffix(".json").write_text(json.dumps({"stdout": result.stdout, "stderr": result.stderr}))

    bundle = shared_bundle("exported-int8", write)
    output: dict[str, str] = json.loads(bundle.path.with_suffix(".json").read_text())
    return bundle, output


def certificate_of(bundle: Bundle) -> dict[str, Any]:
    certificate: dict[str, Any] = json.loads(bundle.file("parity.json").read_text())
    return certificate


@pytest.fixture
def copied(tmp_path: Path) -> Bundle:
    shutil.copytree(exported()[0].path, tmp_path / "bundle")
    return read_bundle(tmp_path / "bundle")


def test_a_quantized_bundle_has_its_probes_its_gate_and_no_float_matrices() -> None:
    bundle, _ = exported()
    assert sorted(bundle.manifest.files) == [
        "decoder.onnx",
        "encoder.onnx",
        "gate.npz",
        "parity.json",
        "probes.npz",
        "saturation.onnx",
        "weights.bin",
    ]
    assert sorted(path.name for path in bundle.path.iterdir()) == sorted([*bundle.manifest.files, "manifest.json"])
    manifest = bundle.manifest
    assert (manifest.precision, manifest.target) == ("int8", "ort-cpu")
    quantization = manifest.quantization
    assert quantization is not None
    assert (quantization.cpu, quantization.weight_bits, quantization.enforced) == ("any", 7, False)
    assert len(quantization.matrices) == 24
    assert quantization.matrices["embedding"] == "int8"
    assert {kind for name, kind in quantization.matrices.items() if name != "embedding"} <= {
        "int8 static",
        "int8 by row",
    }
    for part in ("encoder.onnx", "decoder.onnx"):
        ops = manifest.histograms[part]
        assert ops.keys() == {"traced", "simplified", "quantized"}
        assert ops["quantized"]["MatMulIntegerToFloat"] >= 8
    assert manifest.output_matrix is not None
    assert manifest.output_matrix.dtype == "int8"


def test_the_stages_are_named_and_both_proofs_are_shown() -> None:
    bundle, output = exported()
    assert output["stderr"].splitlines() == [
        "tracing the encoder …",
        "tracing the decoder …",
        "simplifying …",
        "drawing probes from the reference …",
        "comparing the graphs with the reference …",
        "asking the reference about 32 probes …",
        "calibrating with 32 sources …",
        "measuring how much each matrix matters …",
        "trying the forms of matrix 1 of 23 …",
        "trying the forms of matrix 21 of 23 …",
        "quantizing …",
        "judging …",
    ]
    agreement = certificate_of(bundle)["gate"]["agreement"]
    first, second = output["stdout"].splitlines()
    assert first.startswith(f"{bundle.path}: {bundle.total_bytes / 1e6:.1f} MB; 520 tokens of 13 rows are the ")
    assert second == (
        f"{bundle.path}: int8: {agreement['share']:.2%} of {agreement['tokens']} tokens and "
        f"{agreement['same_sequences']} of 32 targets are the reference's (random weights: reported, no bar)"
    )


def test_the_certificate_records_the_result_of_the_gate_and_the_machine() -> None:
    certificate = certificate_of(exported()[0])
    assert (certificate["precision"], certificate["parity"]["tokens"]) == ("int8", 13 * 40)
    gate = certificate["gate"]
    assert (gate["bar"], gate["points"], gate["enforced"], gate["kept"]) == (0.99, 0.3, False, [])
    assert (gate["row_difference"], gate["metric"]) == (0.0, None)
    assert gate["agreement"]["sequences"] == 32
    assert 0.8 < gate["agreement"]["share"] < 1
    assert gate["agreement"]["share"] == gate["agreement"]["same_tokens"] / gate["agreement"]["tokens"]
    assert 0 < gate["median_error_of_margin"] < 0.5
    assert 0 < gate["steps_in_danger"] < 0.5
    machine = this_machine()
    (here,) = certificate["checked_on"]
    assert (here["cpu_class"], here["machine"]["cpu"]) == (cpu_class(machine), machine.cpu)
    assert here["share"] == gate["agreement"]["share"]


def test_verify_counts_again_on_this_machine() -> None:
    bundle, _ = exported()
    agreement = certificate_of(bundle)["gate"]["agreement"]
    result = run("verify", bundle.path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        f"{bundle.path}: {agreement['same_tokens']} of {agreement['tokens']} tokens ({agreement['share']:.2%}) and "
        f"{agreement['same_sequences']} of 32 targets are the reference's (random weights: judged by the export's; "
        f"{agreement['share']:.2%} when it was exported); a row of a batch equals the row alone, bit for bit\n"
    )
    values = json.loads(run("verify", bundle.path, "--json").stdout)
    assert values == {
        **agreement,
        "recorded_share": agreement["share"],
        "bar": 0.99,
        "enforced": False,
        "row_difference": 0.0,
    }


def test_verify_does_not_compare_a_quantized_bundle_with_the_live_model() -> None:
    result = run("verify", exported()[0].path, "--against", TINY)
    assert result.exit_code == 1
    assert "against compares the logits of fp32, found int8" in result.stderr


def test_a_record_replaces_an_older_one_of_this_kind_of_cpu(copied: Bundle) -> None:
    (before,) = certificate_of(copied)["checked_on"]
    result = run("verify", copied.path, "--record")
    assert result.exit_code == 0, result.stderr
    again = read_bundle(copied.path)
    assert again.digest == copied.digest
    assert certificate_of(again)["checked_on"] == [before]
    assert run("verify", copied.path).exit_code == 0


def test_a_record_is_refused_for_fp32() -> None:
    result = run("verify", bundle_of(TINY).path, "--record")
    assert result.exit_code == 1
    assert "record is for quantized bundles, found fp32" in result.stderr


def test_inspect_shows_how_matrices_are_stored_and_the_result_of_the_gate() -> None:
    bundle, _ = exported()
    result = run("inspect", bundle.path)
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    quantization = bundle.manifest.quantization
    assert quantization is not None
    kinds = [kind for name, kind in quantization.matrices.items() if name != "embedding"]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("int8 by row", "int8 static") if kind in kinds)
    certificate = certificate_of(bundle)
    agreement, cpu = certificate["gate"]["agreement"], certificate["machine"]["cpu"] or "an unknown CPU"
    for line in (
        f"precision int8 for --cpu any (7-bit weights in int8); 23 matrices: {counted}; embedding int8",
        f"size {bundle.total_bytes / 1e6:.1f} MB in 8 files",
        f"verified int8: {agreement['share']:.2%} of {agreement['tokens']} tokens (random weights: no bar); "
        f"before, in fp32: 520 tokens of 13 rows on {cpu}, onnxruntime CPU",
        f"checked on {cpu_class(this_machine()) or 'an unknown CPU'} ({agreement['share']:.2%})",
        "alignments cross-attention of layer 1",
    ):
        assert line in lines
    decoder = lines[lines.index("decoder.onnx") :]
    assert [line.partition(":")[0] for line in decoder if " ops: " in line] == ["traced", "simplified", "quantized"]
    values = json.loads(run("inspect", bundle.path, "--json").stdout)
    assert values["quantization"]["matrices"] == quantization.matrices
    assert values["certificate"] == certificate


def test_inspect_shows_the_bar_and_every_kind_of_cpu(copied: Bundle) -> None:
    certificate = certificate_of(copied)
    certificate["gate"] |= {"enforced": True, "bar": 0.995}
    certificate["checked_on"] = [{"cpu_class": "arm64", "share": 0.9962}, {"cpu_class": None, "share": 0.9951}]
    (copied.path / "parity.json").write_text(json.dumps(certificate))
    write_manifest(copied.path, copied.manifest)
    lines = [" ".join(line.split()) for line in run("inspect", copied.path).stdout.splitlines()]
    (verified,) = [line for line in lines if line.startswith("verified ")]
    assert " tokens (the bar was 99.50%); before, in fp32: 520 tokens of 13 rows on " in verified
    assert "checked on arm64 (99.62%), an unknown CPU (99.51%)" in lines


@pytest.mark.parametrize("damage", [{"gate": {}}, {"checked_on": [{}]}, {"checked_on": 3}])
def test_inspect_refuses_an_incomplete_certificate(copied: Bundle, damage: dict[str, Any]) -> None:
    (copied.path / "parity.json").write_text(json.dumps({**certificate_of(copied), **damage}))
    write_manifest(copied.path, copied.manifest)
    result = run("inspect", copied.path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "parity.json cannot be read: " in result.stderr


# -- sources that are padded further -----------------------------------------------------------------------------------


def test_alignments_have_the_width_of_the_source_however_far_it_is_padded() -> None:
    bundle, _ = exported()
    assert MOST % SOURCE_MULTIPLE
    engine, draw = OrtEngine(bundle), np.random.default_rng(0)
    reference = EagerEngine(
        exportable_model(model_of(TINY), Choices(attention_layer=1, max_source=MOST, max_target=40))
    )
    for length in [*range(1, 2 * SOURCE_MULTIPLE + 2), 3, MOST - 1, MOST]:
        source = draw.integers(3, 64, (2, length))
        mask = np.ones_like(source, bool)
        mask[1, (length + 1) // 2 :] = False
        weights, expected = (
            [
                np.array(backend.step(tokens, state, Want.LOGITS).attention)
                for state in [backend.encode(source, mask, Capacity(1, 8))]
                for tokens in (np.array([[1], [1]]), np.array([[5, 6], [7, 8]]))
            ]
            for backend in (engine, reference)
        )
        assert [array.shape for array in weights] == [(2, 2, 1, length), (2, 2, 2, length)]
        for mine, theirs in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine.sum(-1), 1, atol=1e-5)
            np.testing.assert_allclose(mine, theirs, atol=0.1)
            assert not mine[1, ..., (length + 1) // 2 :].any()


def test_alignments_of_a_decode_cover_each_source_token_even_when_rows_leave() -> None:
    engine, draw = OrtEngine(exported()[0]), np.random.default_rng(1)
    sources = [draw.integers(3, 64, length) for length in (5, 1, 7, 2, MOST)]
    for options in (DecodeOptions(max_new_tokens=9), DecodeOptions(max_new_tokens=9, num_beams=3)):
        together = decode(engine, sources, options)
        for source, hypothesis in zip(sources, together, strict=True):
            (alone,) = decode(engine, [source], options)
            assert hypothesis.tokens == alone.tokens
            assert hypothesis.alignments is not None
            assert hypothesis.alignments.shape == (len(hypothesis.tokens), len(source))
            np.testing.assert_array_equal(hypothesis.alignments, alone.alignments)


# -- what is refused before anything is traced -------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    """Return the one line of an export that is refused before it begins."""
    result = run("export", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "max_source": 8, "max_target": 8}
    save_checkpoint(tiny(sizes), tmp_path / "trained")
    (tmp_path / "sources.txt").write_text("3 4 5\n6 7\n")
    return tmp_path / "trained"


def test_trained_weights_need_real_sources(checkpoint: Path) -> None:
    out, sources = checkpoint.with_name("out"), checkpoint.with_name("sources.txt")
    line = refused(checkpoint, "--out", out, "--precision", "int8")
    assert line.startswith("Error: a quantization of trained weights needs --calibration and --probes: files with ")
    line = refused(checkpoint, "--out", out, "--precision", "int4", "--calibration", sources)
    assert line.startswith("Error: a quantization of trained weights needs --probes: ")
    assert not out.exists()


def test_sources_that_the_model_cannot_read_are_reported_before_anything_is_traced(checkpoint: Path) -> None:
    out, sources = checkpoint.with_name("out"), checkpoint.with_name("sources.txt")
    sources.write_text("3 4 5\n6 99\n")
    line = refused(checkpoint, "--out", out, "--precision", "int8", "--calibration", sources, "--probes", sources)
    assert "sources.txt: 1 of 2 lines cannot be used: source ids must lie in 0…63, found 99 at line 2; " in line


def test_probes_with_some_targets_are_refused_before_anything_is_traced(checkpoint: Path) -> None:
    out, sources = checkpoint.with_name("out"), checkpoint.with_name("sources.txt")
    files = ("--calibration", sources, "--probes", sources)
    line = refused(checkpoint, "--out", out, "--precision", "int8", *files, "--metric", "exact_match")
    assert line.startswith("Error: the gate has no metric: --metric exact_match needs targets: give --probes a file ")
    sources.write_text("3 4 5\t6 7\n6 7\n")
    line = refused(checkpoint, "--out", out, "--precision", "int8", *files)
    assert line == (
        "Error: the gate has no metric: 1 of 2 probes have no target: give each of --probes a target, or none"
    )


def test_the_command_offers_every_metric() -> None:
    (option,) = [parameter for parameter in export.params if parameter.name == "metric"]
    assert isinstance(option.type, click.Choice)
    assert set(option.type.choices) == set(METRICS)


def test_graphs_of_standard_ops_have_no_4_bit_integers(tmp_path: Path) -> None:
    line = refused(TINY, "--out", tmp_path / "out", "--precision", "int4", "--target", "onnx")
    assert line.startswith("Error: the model cannot be quantized like this: onnx takes ")
    assert line.endswith("export with --target ort-cpu")


def test_fp32_has_nothing_to_choose(tmp_path: Path) -> None:
    line = refused(TINY, "--out", tmp_path / "out", "--calibration", "some.txt")
    assert line == ("Error: nothing is quantized in fp32 (use --precision int8 or int4): --calibration is for integers")


def test_invalid_precisions_are_refused_together(tmp_path: Path) -> None:
    options = ("--precision-of", "output", "--precision-of", "output=int7", "--precision-of", "ffn*=int8")
    line = refused(TINY, "--out", tmp_path / "out", "--precision", "int8", *options)
    assert line == (
        "Error: --precision-of refused: 'output' must be NAME=fp32|int8|int4; 'output=int7' must be NAME=fp32|int8|int4"
    )


def test_a_cpu_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    result = run("export", TINY, "--out", tmp_path / "out", "--precision", "int8", "--cpu", "riscv")
    assert result.exit_code == 2
    assert "'riscv' is not one of 'any', 'x86-avx2', 'x86-vnni', 'arm64'" in result.stderr


# -- options as the pipeline takes them --------------------------------------------------------------------------------


def test_options_become_a_request() -> None:
    assert precision_of(PLAIN) == "fp32"
    assert precision_of({**PLAIN, "precision": "int8"}) == QuantizeRequest(
        precision="int8", cpu="any", of={}, bar=Bar(None, 0.3)
    )
    many = precision_of({**PLAIN, "precision": "int8", "purpose": "throughput"})
    assert isinstance(many, QuantizeRequest)
    assert (many.n_rows, many.threads, many.least_agreement) == (32, 1, 0.98)
    assert QuantizeRequest(precision="int8").least_agreement == 0.99
    assert QuantizeRequest(precision="int4").least_agreement == 0.98
    assert QuantizeRequest(precision="int8", rows=8, bar=Bar(0.9)).least_agreement == 0.9
    values = {"precision": "int4", "cpu": "arm64", "recover": True, "min_agreement": 0.9, "max_loss": 1.5}
    values |= {"metric": "bleu"}
    assert precision_of({**PLAIN, **values, "precision_of": ("output=int8",)}) == QuantizeRequest(
        precision="int4", cpu="arm64", of={"output": "int8"}, recover=True, bar=Bar(0.9, 1.5), metric="bleu"
    )


def test_all_options_without_effect_in_fp32_are_reported_at_once() -> None:
    values = {
        "precision_of": ("output=int8",),
        "cpu": "arm64",
        "calibration": Path("a"),
        "probes": Path("b"),
        "purpose": "throughput",
        "rows": 4,
        "recover": True,
        "min_agreement": 0.9,
        "max_loss": 1.0,
        "metric": "chrf",
        "activations": "float",
        "ranges": "min-max",
    }
    names = ("--precision-of", "--calibration", "--probes", "--recover", "--for", "--rows", "--cpu")
    names += ("--min-agreement", "--max-loss", "--metric", "--activations", "--ranges")
    with pytest.raises(ConfigError, match=f": {'; '.join(f'{name} is for integers' for name in names)}$"):
        precision_of({**PLAIN, **values})


def test_precisions_are_read_from_text_and_the_last_one_wins() -> None:
    assert precisions_from_text(()) == {}
    precisions = precisions_from_text(("encoder.*=fp32", "output=int4", "a=b=int8", "output=int8"))
    assert precisions == {"encoder.*": "fp32", "output": "int8", "a=b": "int8"}


@pytest.mark.parametrize("text", ["output", "=int8", "output=", "output=fp16", "output=INT8", ""])
def test_an_invalid_precision_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--precision-of refused: '{text}' must be NAME=fp32\|int8\|int4$"):
        precisions_from_text((text,))
