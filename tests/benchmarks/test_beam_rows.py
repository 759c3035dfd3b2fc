"""Two ways to share caches between beams: neither is timed unless both give the same numbers."""

import json
from pathlib import Path

import click.testing
import numpy as np
import pytest

from benchmarks.beams import rows as beam_rows
from benchmarks.readme.engine_tables import beam_rows_lines


def test_a_run_writes_what_the_docs_read(tmp_path: Path) -> None:
    arguments = ["--position", "5", "--sources", "2", "--calls", "10", "--out", str(tmp_path / "result.json")]
    run = click.testing.CliRunner().invoke(beam_rows.main, arguments)
    assert run.exit_code == 0, run.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"machine", "versions", "commit", "date", "numbers_checked", "threads"} <= result.keys()
    [row] = result["results"]
    assert min(row["min_us"].values()) > 0
    assert " µs (2 sources, position 5). Measured on" in beam_rows_lines(result)


def test_indirection_that_gives_other_numbers_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = beam_rows.bound

    def disturbed(graph: bytes, arrays: dict[str, np.ndarray]) -> tuple[beam_rows.Run, np.ndarray]:
        if "holders" in arrays:
            arrays["holders"][:, 0, 0] += 1
            arrays["holders"] %= beam_rows.BEAMS
        return bound(graph, arrays)

    monkeypatch.setattr(beam_rows, "bound", disturbed)
    with pytest.raises(SystemExit, match="indirection gives other numbers than copied rows: no time was recorded"):
        beam_rows.ways(2, 5)
