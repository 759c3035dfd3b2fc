"""The benchmark of long targets and sources: what a small run records, and what the docs say of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.family.run import crossover
from benchmarks.readme.family_tables import family_tables
from benchmarks.readme.pictures import lengths_picture

ROOT = Path(__file__).parents[2]
SMALL = (
    "--decoder fat-tiny --decoder transformer-tiny --encoder scaled_dot --encoder local --batch 2 --target 8 "
    "--target 24 --source 6 --source 12 --decoded-source 5 --rounds 1 --repetitions 1 --threads 1"
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("family")
    command = [sys.executable, "-m", "benchmarks.family.run", *SMALL.split()]
    run = subprocess.run(
        [*command, "--cache", folder, "--out", folder / "result.json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    written: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return written


def test_caches_grow_with_the_target_and_a_recurrent_state_does_not(result: dict[str, Any]) -> None:
    rows = {row["model"]: row for row in result["decoders"]}
    # Two layers of 2 heads of 16: keys and values of 2 rows, or sums and their normaliser.
    assert rows["transformer-tiny"]["state_bytes"] == [2 * 2 * 2 * length * 32 * 4 for length in (8, 24)]
    assert rows["fat-tiny"]["state_bytes"] == [2 * 2 * 2 * (16 * 16 + 16) * 4] * 2
    assert all(ms > 0 for row in rows.values() for ms in (*row["mean_ms"], *row["step_ms"]))


def test_every_encoder_has_a_time_per_length(result: dict[str, Any]) -> None:
    assert [row["model"] for row in result["encoders"]] == ["scaled_dot", "local"]
    assert all(len(row["ms"]) == len(row["grown_bytes"]) == 2 and min(row["ms"]) > 0 for row in result["encoders"])


def test_models_cross_where_one_is_cheaper_from_then_on() -> None:
    rows = [
        {"model": "transformer-base", "batch": 1, "mean_ms": [1.0, 2.0, 4.0, 8.0]},
        {"model": "fat-base", "batch": 1, "mean_ms": [0.9, 3.0, 3.0, 3.0]},
        {"model": "at-base", "batch": 1, "mean_ms": [9.0, 9.0, 9.0, 9.0]},
    ]
    targets = (32, 64, 128, 256)
    assert crossover(rows, 1, "fat-base", "transformer-base", targets) == 128
    assert crossover(rows, 1, "at-base", "transformer-base", targets) is None
    assert crossover(rows, 8, "fat-base", "transformer-base", targets) is None


def test_the_docs_show_every_model_and_where_they_cross(result: dict[str, Any]) -> None:
    tables = family_tables(result)
    assert "| `fat-tiny` | 2 | " in tables
    assert "| local | " in tables
    rows = [{"batch": 1, "model": "fat-base", "other": "transformer-base", "target": target} for target in (512, None)]
    tables = family_tables({**result, "crossovers": rows})
    assert "- `fat-base`, batch 1: cheaper than `transformer-base` from targets of 512 tokens on.\n" in tables
    assert "- `fat-base`, batch 1: at no measured length cheaper than `transformer-base`.\n" in tables
    assert "fat" in lengths_picture(result["decoders"], result["targets"])
