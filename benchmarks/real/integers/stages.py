"""The stages of a run: outputs of every engine, choices after fp32's tokens, the peer's best settings, and times.

A stage's results are kept as they come, so that an interrupted run continues where it stopped.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.noise import NoiseProbe
from benchmarks.harness.recording import Recording
from benchmarks.harness.rounds import turn_result
from benchmarks.real.folders.packages import sha256_of
from benchmarks.real.integers.fidelity import changed
from benchmarks.real.integers.settings import BEST, PARTS, SHORTLIST, IntegerSizes, IntegerTurn
from benchmarks.real.integers.turns import rows_of
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes.bench.report import percentile_summary
from fatdeploy.runtimes.proof.gate import ROW_BOUNDS, row_kind

Ids = list[list[int]]
Row = dict[str, Any]
MODULE = "benchmarks.real.integers.turns"
LEAST_EQUAL = 0.99  # of the sentences: both engines in fp32, whose ties fall either way


@dataclass
class Stages:
    """One run with its sizes; ``outputs`` are those of each engine and form with as many beams."""

    run: Recording
    sizes: IntegerSizes
    probe: NoiseProbe = field(default_factory=NoiseProbe)
    outputs: dict[tuple[str, str, int], Ids] = field(default_factory=dict)
    turn_result: Callable[..., Any] = turn_result

    def __post_init__(self) -> None:
        digests = {form: read_bundle(folder).digest for form, folder in self.sizes.bundles.items()}
        # The same for all stages: results of another make are dropped.
        self.made_by = {
            "sizes": asdict(self.sizes),
            "bundles": digests,
            "sources": sha256_of(Path(self.sizes.prepared)),
            "ctranslate2": version("ctranslate2"),
        }
        self.exact = {form for form, folder in self.sizes.bundles.items() if _rows_are_exact(folder)}

    def ask_outputs(self, turns: Iterable[IntegerTurn]) -> None:
        """Translate every sentence once with each engine and form, without a clock."""
        results = self.run.measured(dict.fromkeys(turns, 1), self._result, self.made_by)
        for turn, [result] in results.items():
            self.outputs[case_of(turn)] = result["outputs"]

    def forced(self, turns: Iterable[IntegerTurn]) -> dict[tuple[str, str], dict[str, Any]]:
        """Return how many of fp32's tokens each engine chooses after fp32's own."""
        self._write_forced()
        results = self.run.measured(dict.fromkeys(turns, 1), self._result, self.made_by)
        return {
            (turn.engine, turn.form): {**result, "share": result["same"] / result["tokens"]}
            for turn, [result] in results.items()
        }

    def survey(self, turns: Iterable[IntegerTurn]) -> list[Row]:
        """Return a row of every setting after one quick pass."""
        results = self.run.measured(dict.fromkeys(turns, 1), self._result, self.made_by)
        return [self.row(turn, found) for turn, found in results.items()]

    def timed(self, turns: Iterable[IntegerTurn], rounds: int) -> tuple[list[Row], dict[str, Any]]:
        """Return a row per turn over all rounds, and how noisy the machine was."""
        results = self.run.measured(dict.fromkeys(turns, rounds), self._quiet_result, self.made_by)
        rows = [self.row(turn, [round_["result"] for round_ in found]) for turn, found in results.items()]
        return rows, self.probe.facts([round_ for found in results.values() for round_ in found])

    def row(self, turn: IntegerTurn, results: list[dict[str, Any]]) -> Row:
        """Return the setting of a turn, its speed, and how many of its outputs differ from those of ``ask_outputs``."""
        seconds = np.array([taken for result in results for taken in result["seconds"]])
        setting = {name: value for name, value in asdict(turn).items() if name != "kind"}
        row = {
            **setting,
            "load_s": float(np.median([result["load"] for result in results])),
            "sentences": len(results[0]["outputs"]),
            "changed": max(self._changed(turn, result["outputs"]) for result in results),
            "repeatable": all(result["repeatable"] for result in results),
        }
        if PARTS[turn.part].alone:
            return {**row, "sentence": percentile_summary(seconds * 1e3)}
        rates = results[0]["tokens"] / seconds
        return {**row, "tokens_per_second": {"p50": float(np.median(rates)), "max": float(rates.max())}}

    def _result(self, turn: IntegerTurn) -> Any:
        return self.turn_result(MODULE, turn, self.sizes)

    def _quiet_result(self, turn: IntegerTurn) -> Any:
        return self.probe.measured(lambda: self._checked(turn, self._result(turn)))

    def _checked(self, turn: IntegerTurn, result: Any) -> Any:
        """Refuse outputs that depend on their batch where the bundle promises that none does."""
        if turn.engine == "fatdeploy" and turn.form in self.exact:
            different = self._changed(turn, result["outputs"])
            if different or not result["repeatable"]:
                raise SystemExit(
                    f"{turn.part}, {turn.form}: {different} of {len(result['outputs'])} outputs depend on their batch "
                    "although the bundle promises that none does: nothing was recorded"
                )
        return result

    def _changed(self, turn: IntegerTurn, outputs: Ids) -> int:
        expected = self.outputs[case_of(turn)]
        return changed(outputs, [expected[row] for row in rows_of(turn, self.sizes, len(expected))])

    def _write_forced(self) -> None:
        """Write the sources and fp32's targets; those that the limit ended have no end that a model chose."""
        sources = json.loads(Path(self.sizes.prepared).read_text())["sources"]
        targets = self.outputs["fatdeploy", "fp32", 1]
        kept = [row for row, target in enumerate(targets) if len(target) < self.sizes.max_new_tokens - 1]
        chosen = {"sources": [sources[row] for row in kept], "targets": [targets[row] for row in kept]}
        Path(self.sizes.forced).write_text(json.dumps(chosen))


def case_of(turn: IntegerTurn) -> tuple[str, str, int]:
    """Return what the outputs of a turn depend on: engine, form with or without a shortlist, and beams."""
    part = PARTS[turn.part]
    return turn.engine, f"{turn.form.removesuffix(SHORTLIST)}{SHORTLIST if part.shortlist else ''}", part.beams


def check_fp32(ours: Ids, peer: Ids) -> float:
    """Return the share of sentences that both engines translate in the same way in fp32; too few end the run."""
    share = 1 - changed(ours, peer) / len(ours)
    if share < LEAST_EQUAL:
        raise SystemExit(
            f"in fp32 only {share:.1%} of the outputs are CTranslate2's (expected {LEAST_EQUAL:.0%}): "
            "nothing was recorded"
        )
    return share


def best_settings(rows: list[Row], part: str, engine: str = "ctranslate2", count: int = BEST) -> list[Row]:
    """Return an engine's fastest rows of a part, the fastest first."""
    return sorted((row for row in rows if (row["part"], row["engine"]) == (part, engine)), key=speed, reverse=True)[
        :count
    ]


def speed(row: Row) -> float:
    """Return what is larger the faster an engine is: tokens, or sentences alone, per second."""
    return float(1e3 / row["sentence"]["p50_ms"] if PARTS[row["part"]].alone else row["tokens_per_second"]["p50"])


def bundle_row(form: str, folder: str) -> Row:
    """Return the size of a bundle, and what identifies it."""
    bundle = read_bundle(folder)
    files = bundle.manifest.files
    return {
        "form": form,
        "digest": bundle.digest,
        "weights_bytes": files[WEIGHTS].size,
        "bytes": sum(file.size for file in files.values()),
    }


def _rows_are_exact(folder: str) -> bool:
    manifest = read_bundle(folder).manifest
    return ROW_BOUNDS.get(row_kind(manifest.precision, manifest.quantization)) == 0.0
