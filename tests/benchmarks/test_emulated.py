"""Bundles on an emulated CPU: what is compared, what must be refused, and what is said without the emulator."""

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.emulated import run
from benchmarks.emulated.answers import answers
from fatdeploy.bundle import Bundle
from fatdeploy.runtimes.proof.promise import promise_of
from tests.support.bundles import bundle_of
from tests.support.quantized import quantized_g2p

HERE = {"expected": [[1, 2], [3, 4]], "choices": [[1, 2], [3, 4]], "targets": [[1], [3]]}


def for_cpu(cpu: Any) -> Bundle:
    bundle = quantized_g2p("int8")
    assert bundle.manifest.quantization is not None
    quantization = replace(bundle.manifest.quantization, cpu=cpu)
    return replace(bundle, manifest=replace(bundle.manifest, quantization=quantization))


@pytest.mark.parametrize(
    ("cpu", "emulated", "fine", "words"),
    [
        ("any", HERE, True, "100.00% of the choices and 2 of 2 targets are the same on both"),
        ("any", {**HERE, "choices": [[1, 2], [3, 9]], "targets": [[1], [9]]}, False, "75.00% emulated (bar {bar:.2%})"),
        ("any", {"refusal": "overflows"}, False, "refused although it is for --cpu any: overflows"),
        ("x86-vnni", {"refusal": "overflows"}, True, "for x86-vnni: refused, as it must be"),
        ("x86-vnni", HERE, False, "for x86-vnni: NOT refused"),
    ],
)
def test_a_bundle_keeps_its_promise_or_is_refused(cpu: str, emulated: dict[str, Any], fine: bool, words: str) -> None:
    judged = run.judgement(for_cpu(cpu), HERE, emulated)
    assert judged[0] is fine
    assert words.format(bar=promise_of(for_cpu(cpu)).bar) in judged[1]


def test_floats_have_no_gate() -> None:
    with pytest.raises(SystemExit, match="is in fp32; expected a quantized bundle"):
        run.judgement(bundle_of("transformer-tiny"), HERE, HERE)


def test_answers_follow_the_references_tokens() -> None:
    found = answers(str(quantized_g2p("int8").path), 3)
    assert [len(row) for row in found["choices"]] == [len(row) for row in found["expected"]]
    assert len(found["targets"]) == 3
    assert run.equal_share(found["choices"], found["expected"]) > 0.9


def test_every_bundle_is_compared_and_one_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def answered(prefix: list[str], bundle: str, rows: int) -> dict[str, Any]:
        calls.append((prefix, rows))
        return {"refusal": "no"} if prefix else HERE

    monkeypatch.setattr(run, "answers_under", answered)
    monkeypatch.setattr(run.shutil, "which", lambda name: name)
    path = str(quantized_g2p("int8").path)
    result = CliRunner().invoke(run.main, [path, "--rows", "7", "--cpu", "Broadwell"])
    assert result.exit_code == 1
    assert "FAILED: refused although it is for --cpu any: no" in result.output
    assert calls == [([], 7), (["qemu-x86_64", "-cpu", "Broadwell"], 7)]


def test_without_the_emulator_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    result = CliRunner().invoke(run.main, [str(quantized_g2p("int8").path)])
    assert result.exit_code == 1
    assert "qemu-x86_64 is not available here: apt-get install qemu-user" in result.output


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(SystemExit, match=r"benchmarks.emulated.answers failed with exit code 1: .*BundleError"):
        run.answers_under([], "nowhere", 1)
