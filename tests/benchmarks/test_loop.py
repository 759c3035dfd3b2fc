"""The decode loop over an engine that costs nothing: what steps allocate and how it is judged. No time is asserted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import click.testing
import numpy as np
import pytest

from benchmarks.loop import run as loop_overhead
from benchmarks.loop.turns import BEAMS, CHECKS, CaseName, CostlessEngine, LoopSizes, LoopTurn, allocated, overhead
from benchmarks.readme.other_tables import loop_table
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.spec import ModelSpec, Tokens

SIZES = LoopSizes(steps=320, repetitions=1, positions=(20, 300))


@pytest.mark.parametrize("case", get_args(CaseName))
def test_a_step_allocates_nothing_that_grows_with_the_vocabulary_or_the_position(case: CaseName) -> None:
    plan = loop_overhead.LoopPlan(cases=(case,), vocab_sizes=(1_000, 8_000), rounds=1, sizes=SIZES)
    turns = [turn for turn in plan.turns() if turn.batch == 1]
    rows = [loop_overhead.row_of(turn, [overhead(turn, SIZES)]) for turn in turns]
    growth = loop_overhead.growth_of(plan, rows, case, 1)
    assert not growth["grows"], growth


class LeavingEngine(CostlessEngine):
    """Ends all targets but the first at once, so that their rows leave."""

    def __init__(self, batch: int, spec: ModelSpec) -> None:
        super().__init__(batch, 1, spec)
        ending = self.log_probs.copy()
        ending[1:, :, spec.eos_id] = 1
        self.scores = {batch: ending, 1: self.log_probs[:1]}
        self.outs = {rows: StepOut(logits=scores.copy()) for rows, scores in self.scores.items()}

    def step(self, tokens: Tokens, state: None, want: Want) -> StepOut:
        out = self.outs[len(tokens)]
        np.copyto(out.logits, self.scores[len(tokens)])
        return out


@pytest.mark.parametrize("beams", [1, BEAMS, "rows leave"])
def test_stops_and_controls_allocate_nothing_that_grows_with_the_position(beams: int | str) -> None:
    steps = SIZES.steps
    spec = ModelSpec(vocab_size=1_000, max_source=8, max_target=steps, pad_id=0, bos_id=1, eos_id=2)
    options = DecodeOptions(max_new_tokens=steps, stop=[(5, 6, 7), (9,)], repetition_penalty=1.2)
    if isinstance(beams, int):
        options = replace(options, num_beams=beams)
        allocations = allocated(CostlessEngine(1, beams, spec, fresh=True), 1, options, SIZES.positions)
    else:
        allocations = allocated(LeavingEngine(8, spec), 8, options, SIZES.positions)
    # Half the size of one more copy of the tokens so far.
    assert allocations["position_300"] - allocations["position_20"] < 8 * 280 / 2, allocations


def test_an_array_of_the_vocabulary_or_of_the_tokens_so_far_is_growth() -> None:
    plan = loop_overhead.LoopPlan(cases=("greedy",), vocab_sizes=(1_000, 32_000), rounds=1, sizes=SIZES)

    def growth(early: int, late: int) -> dict[str, object]:
        counts = {
            1_000: {"position_20": 3000, "position_300": 3010},
            32_000: {"position_20": early, "position_300": late},
        }
        rows = [
            {"case": "greedy", "batch": 1, "vocab_size": size, "bytes": positions} for size, positions in counts.items()
        ]
        return loop_overhead.growth_of(plan, rows, "greedy", 1)

    same = {"case": "greedy", "batch": 1}
    assert growth(3000, 3100) == {**same, "with_vocabulary": 90, "with_position": 100, "grows": False}
    assert growth(131_000, 131_000) == {**same, "with_vocabulary": 128_000, "with_position": 10, "grows": True}
    assert growth(3000, 5240) == {**same, "with_vocabulary": 2230, "with_position": 2240, "grows": True}


@pytest.mark.parametrize("case", get_args(CaseName))
def test_wrong_tokens_are_noticed_before_anything_is_timed(case: CaseName) -> None:
    spec = ModelSpec(vocab_size=100, max_source=8, max_target=12, pad_id=0, bos_id=1, eos_id=2)
    engine = CostlessEngine(1, BEAMS, spec)
    worst = int(engine.log_probs[0, 0].argmin())
    with pytest.raises(SystemExit, match="do not follow from the scores"):
        CHECKS[case]([Hypothesis((worst,) * 12, "length")], engine, 12)


def test_a_step_of_every_search_is_timed_but_for_the_first_and_the_last() -> None:
    sizes = LoopSizes(steps=40, repetitions=2, positions=(10, 30))
    result = overhead(LoopTurn(case="beams", batch=3, vocab_size=100), sizes)
    assert len(result["seconds"]) == 2 * (40 - 8 - 1)
    assert min(result["seconds"]) > 0
    assert np.array([*result["bytes"].values()]).min() > 0


def test_a_run_writes_what_the_readme_reads(tmp_path: Path) -> None:
    sizes = "--case top_p --vocab-size 64 --vocab-size 200 --steps 40 --positions 10 30 --rounds 1 --repetitions 1"
    arguments = [*sizes.split(), "--cache", str(tmp_path), "--out", str(tmp_path / "result.json")]
    run = click.testing.CliRunner().invoke(loop_overhead.main, arguments)
    assert run.exit_code == 0, run.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(row["case"], row["vocab_size"], row["target_us"]) for row in result["results"]] == [
        ("top_p", 64, None),
        ("top_p", 200, None),
    ]
    assert {"machine", "versions", "commit", "date", "tokens_checked", "threads"} <= result.keys()
    assert loop_table(result).splitlines()[2].startswith("| samples, top-p | 1 | ")


def test_positions_must_be_within_the_decode() -> None:
    run = click.testing.CliRunner().invoke(loop_overhead.main, ["--steps", "60"])
    assert run.exit_code == 2
    assert "--positions must lie 5 steps before the last" in run.output
