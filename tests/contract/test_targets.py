"""Targets: one record each, which all code uses."""

import subprocess
import sys
from typing import get_args

import pytest

from fatdeploy.runtimes.doctor.packages import PACKAGES
from fatdeploy.targets import (
    DEFAULT_TARGET,
    TARGETS,
    Flavour,
    FloatPrecision,
    HalfPrecision,
    IntegerPrecision,
    Precision,
    Provider,
    Target,
    TargetRecord,
    either,
    engine_targets,
    precision_help,
    target_help,
    targets_with,
)

RECORDS = pytest.mark.parametrize("record", TARGETS.values(), ids=lambda record: record.name)


def test_every_target_has_a_record_under_its_name() -> None:
    assert tuple(TARGETS) == get_args(Target)
    assert all(record.name == name for name, record in TARGETS.items())
    assert DEFAULT_TARGET == "ort-cpu"


def test_precisions_are_floats_and_integers() -> None:
    assert get_args(Precision) == (*get_args(FloatPrecision), *get_args(IntegerPrecision))
    assert get_args(FloatPrecision) == ("fp32", *get_args(HalfPrecision))


@RECORDS
def test_a_record_fits_together(record: TargetRecord) -> None:
    assert "fp32" in record.precisions
    assert set(record.precisions) <= set(get_args(Precision))
    assert (record.engine == "tensorrt") == (record.flavour is not None) == bool(record.build_packages)
    assert (record.engine == "onnxruntime") == bool(record.providers)
    assert set(record.providers) <= set(get_args(Provider))
    graphs = TARGETS[record.graph_target]
    assert graphs.graph_target == graphs.name
    assert (graphs.dialect, graphs.precisions) == (record.dialect, record.precisions)
    assert record.needs_gpu or not record.captures_steps
    assert {*record.run_packages, *record.build_packages} <= {package.name for package in PACKAGES}


def test_flavours_are_targets_of_the_same_name() -> None:
    assert engine_targets() == get_args(Flavour)
    assert all(TARGETS[name].flavour == name for name in engine_targets())


@RECORDS
def test_a_precision_is_accepted_or_refused_with_the_targets_that_accept_it(record: TargetRecord) -> None:
    for precision in get_args(Precision):
        if precision in record.precisions:
            assert record.refusal(precision) == ""
            continue
        refusal = record.refusal(precision)
        assert refusal.startswith(f"{record.name} takes {either(record.precisions)}, found {precision}: ")
        assert refusal.endswith(f"For {precision} export with --target {either(targets_with(precision))}")


def test_the_help_names_every_target_and_precision() -> None:
    assert all(f"{record.name}: {record.summary}" in target_help() for record in TARGETS.values())
    assert "int4 (ort-cpu)" in precision_help()
    assert "fp16 (ort-cuda, onnx, tensorrt, tensorrt-rtx)" in precision_help()


def test_choices_are_written_in_words() -> None:
    assert [either("a"), either("ab"), either("abc")] == ["a", "a or b", "a, b or c"]


def test_targets_need_the_standard_library_alone() -> None:
    code = "import sys, fatdeploy.targets; print(sorted({'numpy', 'click', 'fatdeploy.spec'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "[]\n", run.stderr
