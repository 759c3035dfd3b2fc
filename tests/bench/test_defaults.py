"""Default options in a bench: what costs time in every step is measured, lengths and beams are the bench's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fatdeploy.cli import main
from fatdeploy.runtimes.bench.plan import BenchRequest, plans_for
from fatdeploy.runtimes.bench.timing import UNMEASURED, measured_options
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.bundles import bundle_of, bundle_with_defaults

TINY = "transformer-tiny"

DEFAULTS: dict[str, Any] = {
    "num_beams": 6,
    "num_return_sequences": 3,
    "max_new_tokens": 20,
    "min_new_tokens": 5,
    "stop": [[9]],
    "timeout_s": 1e-9,
    "suppress_tokens": [7],
    "no_repeat_ngram_size": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "eos_ids": [2, 5],
    "forced_eos_id": 2,
    "exponential_decay_length_penalty": [2, 1.5],
    "prefix": [3, 4],
}
REQUEST = BenchRequest(
    batch=(1,), source=5, target=4, beams=(1, 4), threads=(1,), repetitions=1, defaults=frozenset({"beams"})
)


def test_a_bench_measures_what_changes_scores_and_sets_its_own_lengths_and_beams(tmp_path: Path) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", DEFAULTS)
    measured = {"suppress_tokens": [7], "no_repeat_ngram_size": 2, "max_new_tokens": 4}
    for beams in (1, 3):
        options = measured_options(bundle, target=4, beams=beams, plain=False)
        assert options == DecodeOptions(**measured, num_beams=beams)
        assert measured_options(bundle, target=4, beams=beams, plain=True) == DecodeOptions(
            max_new_tokens=4, num_beams=beams
        )
    samples = {"sample": True, "temperature": 0.5, "repetition_penalty": 1.5}
    bundle = bundle_with_defaults(tmp_path / "samples", samples)
    assert measured_options(bundle, target=4, beams=2, plain=False) == DecodeOptions(
        max_new_tokens=4, num_beams=2, repetition_penalty=1.5
    )


def test_without_default_options_a_bench_decodes_as_it_always_did() -> None:
    for plain in (False, True):
        options = measured_options(bundle_of(TINY), target=64, beams=4, plain=plain)
        assert options == DecodeOptions(max_new_tokens=64, num_beams=4)


@pytest.mark.parametrize(
    ("changes", "beams", "notes"),
    [
        ({}, (1, 6), ("b: --beams 1,4 changed to 1,6 (its default options)",)),
        ({"defaults": frozenset()}, (1, 4), ()),
        ({"no_defaults": True}, (1, 4), ()),
    ],
    ids=str,
)
def test_beams_that_are_not_typed_are_the_bundles_own(
    tmp_path: Path, changes: dict, beams: tuple[int, ...], notes: tuple[str, ...]
) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", DEFAULTS)
    [plan] = plans_for({"b": bundle}, BenchRequest(**{**vars(REQUEST), **changes}))
    assert (plan.request.beams, plan.notes) == (beams, notes)
    assert plan.turn(1, 0).plain is plan.request.no_defaults
    [plan] = plans_for({"b": bundle_of(TINY)}, REQUEST)
    assert (plan.request.beams, plan.notes) == ((1, 4), ())


def test_the_report_names_the_options_that_were_measured(tmp_path: Path) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", DEFAULTS)
    sizes = ["--source", "5", "--target", "4", "--batch", "2"]
    arguments = [str(bundle.path), *sizes, "--threads", "1", "--repetitions", "1", "--json", "-"]
    report = json.loads(CliRunner().invoke(main, ["bench", *arguments]).stdout)
    measured = ("suppress_tokens", "no_repeat_ngram_size", "num_beam_groups", "diversity_penalty")
    assert [entry["options"] for entry in report["bundles"]] == [{name: DEFAULTS[name] for name in measured}]
    # All tokens were decoded: neither the stop nor the deadline of the bundle ended a target.
    assert [(row["beams"], row["tokens"]) for row in report["rows"]] == [(1, 8), (6, 8)]
    plain = json.loads(CliRunner().invoke(main, ["bench", *arguments, "--no-defaults", "--beams", "1"]).stdout)
    assert [entry["options"] for entry in plain["bundles"]] == [{}]


def test_options_that_a_bench_sets_back_are_those_that_end_a_target_or_draw_it() -> None:
    assert {"stop", "timeout_s", "eos_ids", "sample", "forced_eos_id"} < {*UNMEASURED}
