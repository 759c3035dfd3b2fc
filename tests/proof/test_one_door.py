"""``fatdeploy.verify``: one entry point for every precision, in Python and on the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fatdeploy
from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.certificate import CpuCheck, HalfParity, Parity, read_certificate, write_certificate
from fatdeploy.cli import main
from fatdeploy.errors import BackendUnavailable, ConfigError, FatdeployError, ParityFailed
from fatdeploy.machine import this_machine
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes.proof.cpu_checks import cpu_class
from fatdeploy.runtimes.proof.verify import GateCheck, HalfCheck, LiveModel
from tests.support.bundles import bundle_of, half_of
from tests.support.quantized import quantized_of

TINY = "fat-tiny"


def bundle_in(precision: str) -> Bundle:
    if precision == "fp32":
        return bundle_of(TINY)
    return half_of(TINY, precision) if precision in ("fp16", "bf16") else quantized_of(TINY, precision)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "options", "kind"),
    [
        ("fp32", {}, Parity),
        ("fp16", {}, HalfCheck),
        ("fp16", {"emulated": True}, HalfCheck),
        ("bf16", {"emulated": True}, HalfCheck),
        ("int8", {}, GateCheck),
        ("int4", {}, GateCheck),
    ],
)
def test_every_precision_is_verified_by_its_own_rules(precision: str, options: dict[str, Any], kind: type) -> None:
    bundle = bundle_in(precision)
    verification = fatdeploy.verify(bundle.path, **options)
    assert isinstance(verification, fatdeploy.Verification)
    assert type(verification.result) is kind
    assert verification.bundle == bundle
    flags = [f"--{name}" for name in options]
    run = CliRunner().invoke(main, ["verify", str(bundle.path), *flags])
    assert (run.exit_code, run.stdout) == (0, f"{bundle.path}: {verification.line()}\n")
    printed = CliRunner().invoke(main, ["verify", str(bundle.path), "--json", *flags])
    assert json.loads(printed.stdout) == verification.as_dict()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_emulation_finds_what_the_export_found(precision: str) -> None:
    bundle = bundle_in(precision)
    parity = read_certificate(bundle).parity
    assert isinstance(parity, HalfParity)
    check = fatdeploy.verify(bundle.path, emulated=True).result
    assert isinstance(check, HalfCheck)
    assert (check.tokens, check.same, check.rows) == (parity.tokens, parity.same, parity.rows)
    assert check.recorded_share == check.share == parity.agreement
    assert 0 <= check.row_difference < 0.02
    assert check.bar is None
    assert f"{check.same} of {check.tokens} tokens of 13 rows" in check.line()


def test_bf16_on_a_cpu_without_kernels_is_a_fatdeploy_error() -> None:
    with pytest.raises(FatdeployError, match=r"bf16, for which onnxruntime.* --emulated"):
        fatdeploy.verify(bundle_in("bf16").path)


@pytest.fixture
def damaged(tmp_path: Path) -> Bundle:
    """Return an fp16 bundle with correct hashes and wrong weights."""
    bundle = bundle_in("fp16")
    shutil.copytree(bundle.path, tmp_path / "damaged")
    weights = np.fromfile(tmp_path / "damaged" / WEIGHTS, np.float16)
    (weights * np.float16(1.25)).tofile(tmp_path / "damaged" / WEIGHTS)
    return write_manifest(tmp_path / "damaged", bundle.manifest)


def test_half_precision_with_wrong_results_is_refused(damaged: Bundle) -> None:
    with pytest.raises(ParityFailed, match=r"of 832 tokens are the reference's here .*: this device computes"):
        fatdeploy.verify(damaged.path)


@pytest.mark.parametrize("more", [0, 1])
def test_half_precision_with_a_bar_must_reach_it(tmp_path: Path, more: int) -> None:
    bundle = bundle_in("bf16")
    shutil.copytree(bundle.path, tmp_path / "barred")
    certificate = read_certificate(bundle)
    parity = certificate.parity
    assert isinstance(parity, HalfParity)
    assert parity.same < parity.tokens  # or no bar would be too high
    bar = (parity.same + more) / parity.tokens
    write_certificate(tmp_path / "barred", replace(certificate, parity=replace(parity, least_agreement=bar)))
    write_manifest(tmp_path / "barred", bundle.manifest)
    if more:
        with pytest.raises(ParityFailed, match=rf"{parity.same} of 832 tokens .* the bar is {bar:.2%}"):
            fatdeploy.verify(tmp_path / "barred", emulated=True)
    else:
        assert f"the bar is {bar:.2%}" in fatdeploy.verify(tmp_path / "barred", emulated=True).line()


@pytest.mark.parametrize(
    ("precision", "options", "reason"),
    [
        ("fp32", {"record": True}, "record is for quantized bundles, found fp32"),
        ("fp16", {"record": True}, "record is for quantized bundles, found fp16"),
        ("int8", {"against": TINY}, "against compares the logits of fp32, found int8"),
        ("fp16", {"against": TINY}, "against compares the logits of fp32, found fp16"),
        ("fp32", {"emulated": True}, "emulated is for fp16 and bf16, found fp32"),
        ("fp32", {"emulated": True, "record": True}, "record is for .*; emulated is for"),
    ],
)
def test_options_that_a_precision_does_not_use_are_refused(
    precision: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        fatdeploy.verify(bundle_in(precision).path, **options)


def test_the_live_model_may_be_a_name_or_say_how_many_sources() -> None:
    path = bundle_of("transformer-tiny").path
    few = fatdeploy.verify(path, against=LiveModel(source="transformer-tiny", count=3, seed=7)).against
    assert few is not None
    assert (few.rows, few.tokens) == (3, 3 * 48)


def test_without_the_exporter_the_live_model_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"needs torch and onnx .*pip install 'fatdeploy\[export\]'"):
        fatdeploy.verify(bundle_of(TINY).path, against=TINY)


def test_a_recorded_cpu_is_in_the_certificate(tmp_path: Path) -> None:
    bundle = quantized_of(TINY, "int8")
    shutil.copytree(bundle.path, tmp_path / "copy")
    write_certificate(tmp_path / "copy", replace(read_certificate(bundle), checked_on=()))
    write_manifest(tmp_path / "copy", bundle.manifest)
    check = fatdeploy.verify(tmp_path / "copy", threads=1).result
    assert read_certificate(read_bundle(tmp_path / "copy")).checked_on == ()
    fatdeploy.verify(tmp_path / "copy", record=True, threads=1)
    [recorded] = read_certificate(read_bundle(tmp_path / "copy")).checked_on
    assert isinstance(check, GateCheck)
    assert recorded == CpuCheck(cpu_class(this_machine()), check.share, this_machine())
