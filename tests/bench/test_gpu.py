"""``fatdeploy bench`` for GPU targets on a counting device: facts are read or absent, tokens checked before timing."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BackendUnavailable, ParityFailed
from fatdeploy.runtimes.bench import turn as bench_turn
from fatdeploy.runtimes.bench.page import html_from_report
from fatdeploy.runtimes.bench.plan import BenchRequest, Turn, plans_for
from fatdeploy.runtimes.bench.report import report_of
from fatdeploy.runtimes.bench.table import device_line, report_lines
from fatdeploy.runtimes.bench.timing import stopwatch_of
from fatdeploy.runtimes.bench.turn import measure_turn, opened_for
from fatdeploy.runtimes.doctor.cuda_driver import Cuda, CudaDevice
from fatdeploy.runtimes.doctor.gpu_clocks import FIELDS, Gpus, gpus_here, records_from_csv
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.proof.fidelity import Fidelity
from fatdeploy.targets import Target
from tests.support.bundles import bundle_of
from tests.support.cuda_half import half
from tests.support.devices.counting import on_device

OPTIONS = BenchRequest(
    batch=(1, 2), source=5, target=4, beams=(1,), threads=(1, 2), repetitions=2, defaults=frozenset({"threads"})
)
LINE = "NVIDIA RTX A2000, GPU-1f, 550.54.15, 1200, 2100, 6001, 70.00, 35.52, 51, 812\n"
FACTS = Gpus("NVIDIA RTX A2000", "12.8", records_from_csv(LINE), None)


class Ticking:
    """A device clock on which every step takes twice as long as the one before."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def seconds(self) -> list[float]:
        marks, self.marks = self.marks, 0
        return [1e-3 * 2**index for index in range(marks - 1)]


class ClockedEngine(OrtEngine):
    def stopwatch(self) -> Ticking:
        return Ticking()


def targeted(target: Target, bundle: Bundle | None = None) -> Bundle:
    bundle = bundle or bundle_of("transformer-tiny")
    return replace(bundle, manifest=replace(bundle.manifest, target=target))


def script(folder: Path, body: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the report of a CUDA bundle measured on the counting device."""
    [plan] = plans_for({"half": half()}, OPTIONS)
    monkeypatch.setattr(bench_turn, "opened_engine", lambda bundle, **options: on_device(bundle))
    monkeypatch.setattr(bench_turn, "gpus_here", lambda: FACTS)
    monkeypatch.setattr(bench_turn, "stopwatch_of", lambda engine: Ticking())
    turns = [measure_turn(plan.turn(1, index)) for index in range(2)]
    return report_of([plan], {(0, 1): turns}, OPTIONS)


def test_rows_of_a_gpu_have_device_driver_clocks_power_limit_and_fidelity(measured: dict[str, Any]) -> None:
    assert [(row["batch"], row["threads"]) for row in measured["rows"]] == [(1, 1), (2, 1)]
    for row in measured["rows"]:
        device = row["device"]
        assert (device["kind"], device["name"], device["cuda"], device["absent"]) == (
            "cuda",
            "NVIDIA RTX A2000",
            "12.8",
            None,
        )
        [clocks] = device["clocks"]
        assert (clocks["driver"], clocks["sm_clock_mhz"], clocks["power_limit_w"]) == ("550.54.15", 1200, 70)
        assert row["fidelity"]["share"] > 0.98
        # The host's memory says nothing about how fast a device reads its weights.
        assert row["floor"] is None
    assert "NVIDIA RTX A2000 (driver 550.54.15, 1200 MHz, 70 W limit)" in "\n".join(report_lines(measured))
    assert "per token, device" in "\n".join(report_lines(measured))
    assert "</html>" in html_from_report(measured)


def test_times_by_the_device_clock_are_next_to_those_of_the_host(measured: dict[str, Any]) -> None:
    for row in measured["rows"]:
        phases = row["phases"]
        # Four steps of 1, 2, 4 and 8 ms, in two decodes.
        assert phases["first_token_device"] == {"n": 2, "min_ms": 1, "p50_ms": 1, "p95_ms": 1, "p99_ms": 1}
        assert (phases["per_token_device"]["n"], phases["per_token_device"]["p50_ms"]) == (6, 4)
        assert phases["per_token"]["n"] == 6


def test_an_engine_without_a_device_clock_has_no_stopwatch() -> None:
    engine = on_device(half())
    assert stopwatch_of(engine) is None
    assert isinstance(stopwatch_of(ClockedEngine(half())), Ticking)


def test_gpu_targets_have_one_number_of_threads_and_tensorrt_is_measured_with_and_without_recorded_steps() -> None:
    bundles = {name: targeted(name) for name in ("ort-cpu", "ort-cuda", "tensorrt")}
    plans = plans_for(bundles, replace(OPTIONS, threads=(1, 2)))
    assert [(plan.label, plan.request.threads, plan.cuda_graphs) for plan in plans] == [
        ("ort-cpu", (1, 2), True),
        ("ort-cuda", (1,), True),
        ("tensorrt, steps recorded", (1,), True),
        ("tensorrt, steps not recorded", (1,), False),
    ]
    assert [note for plan in plans for note in plan.notes] == [
        "ort-cuda: --threads 1,2 lowered to 1 (it is for a GPU)",
        "tensorrt: --threads 1,2 lowered to 1 (it is for a GPU)",
    ]
    assert [plan.turn(1, 0).cuda_graphs for plan in plans] == [True, True, True, False]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("ort-cuda", {"threads": 1, "spinning": True}),
        ("tensorrt", {"cuda_graphs": False}),
        ("tensorrt-rtx", {"cuda_graphs": False}),
    ],
)
def test_the_engine_of_each_target_is_opened_with_its_own_options(
    target: Target, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords: list[dict[str, Any]] = []
    monkeypatch.setattr(bench_turn, "opened_engine", lambda bundle, **options: keywords.append(options))
    turn = replace(turn_of(targeted(target)), cuda_graphs=False)
    opened_for(turn, targeted(target))
    assert keywords == [expected]


def turn_of(bundle: Bundle) -> Turn:
    return plans_for({"bundle": bundle}, OPTIONS)[0].turn(1, 0)


def test_fp32_that_returns_another_token_on_the_device_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_turn, "opened_engine", lambda bundle, **options: on_device(bundle))
    monkeypatch.setattr(bench_turn, "token_fidelity", lambda engine, probes: Fidelity(832, 831))
    monkeypatch.setattr(bench_turn, "_timed_again", lambda *arguments: pytest.fail("it was timed"))
    with pytest.raises(ParityFailed, match="returns 831 of the reference's 832 tokens"):
        measure_turn(turn_of(bundle_of("transformer-tiny")))


def test_a_bundle_for_cuda_is_not_measured_on_a_cpu() -> None:
    with pytest.raises(BackendUnavailable, match="CUDAExecutionProvider"):
        measure_turn(turn_of(half()))


def test_clocks_come_from_the_driver_s_tool_and_missing_values_are_none(tmp_path: Path) -> None:
    body = 'case "$1" in --query-gpu=name,uuid,driver_version,*) ;; *) exit 9;; esac\n'
    body += "echo 'Orin, GPU-2, 540.4.0, 1300, [N/A], [Not Supported], [N/A], [N/A], 44, [N/A]'"
    cuda = Cuda("12.6", (CudaDevice(0, "Orin", (8, 7), 1),))
    gpus = gpus_here(cuda, script(tmp_path, body))
    assert (gpus.name, gpus.cuda, gpus.absent) == ("Orin", "12.6", None)
    assert gpus.clocks is not None
    assert [list(record) for record in gpus.clocks] == [[*FIELDS]]
    assert gpus.clocks[0] == {
        **dict.fromkeys(FIELDS),
        "name": "Orin",
        "uuid": "GPU-2",
        "driver": "540.4.0",
        "sm_clock_mhz": 1300,
        "temperature_c": 44,
    }
    line = device_line({"device": gpus.as_dict()})
    assert line == "Orin (driver 540.4.0, 1300 MHz, W limit unknown)"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "nvidia-smi-absent is not here: clocks and power are unknown"),
        ("echo 'no devices' >&2; exit 6", "ended with exit code 6 (no devices): clocks and power are unknown"),
    ],
)
def test_a_tool_that_is_absent_or_fails_is_recorded_as_absent(tmp_path: Path, body: str | None, reason: str) -> None:
    tool = "nvidia-smi-absent" if body is None else script(tmp_path, body)
    gpus = gpus_here(Cuda(reason="no CUDA driver"), tool)
    assert (gpus.name, gpus.clocks) == (None, None)
    assert gpus.absent is not None
    assert gpus.absent.endswith(reason)
    assert device_line({"device": gpus.as_dict()}).startswith("a GPU of unknown name (")


def test_several_gpus_are_distinguished_by_their_names() -> None:
    lines = LINE + LINE.replace("RTX A2000", "T4").replace("1200", "585")
    gpus = Gpus("NVIDIA T4", "12.8", records_from_csv(lines), None)
    assert device_line({"device": gpus.as_dict()}) == "NVIDIA T4 (driver 550.54.15, 585 MHz, 70 W limit)"
    assert os.linesep not in device_line({"device": gpus.as_dict()})
