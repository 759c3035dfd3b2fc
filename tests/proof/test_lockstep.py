"""Two engines side by side: ties, misses, and that one wrong token does not hide the next."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fatdeploy.cli import main
from fatdeploy.errors import ParityFailed
from fatdeploy.export.reference.checkpoint import save_checkpoint
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.engines.ort.engine import OrtEngine, OrtState
from fatdeploy.runtimes.engines.protocol import Capacity, StepOut, Want
from fatdeploy.runtimes.proof.lockstep import Comparison, compared, logit_agreement
from fatdeploy.runtimes.proof.probes import read_probes, verified
from fatdeploy.spec import Mask, Tokens
from tests.support.bundles import bundle_of
from tests.support.engines.scripted import ScriptedEngine

TINY = "transformer-tiny"
ROOT = Path(__file__).parents[2]
SCRIPTS = {3: [4, 5, 6, 7], 4: [8, 9, 8, 9]}
SOURCE = np.array([[3], [4]])

Logits = np.ndarray
Change = Callable[[int, Logits], None]


class ChangedEngine(ScriptedEngine):
    """Follows its script, then changes each step's logits, which are 1 for the scripted token and 0 elsewhere."""

    def __init__(self, change: Change) -> None:
        super().__init__(SCRIPTS)
        self.change = change

    def step(self, tokens: Tokens, state: list[list[int]], want: Want) -> StepOut:
        out = super().step(tokens, state, want)
        assert out.logits is not None
        self.change(len(self.fed) - 1, out.logits)
        return out


def comparison(change: Change, of_reference: Change = lambda step, logits: None) -> Comparison:
    mask = np.ones_like(SOURCE, bool)
    return compared(ChangedEngine(change), ChangedEngine(of_reference), SOURCE, mask, steps=4)


def at(step: int, row: int, token: int, value: float) -> Change:
    """Set one logit of one row at one step."""

    def change(now: int, logits: Logits) -> None:
        if now == step:
            logits[row, 0, token] = value

    return change


def test_engines_with_the_same_tokens_agree_on_every_logit() -> None:
    result = comparison(at(1, 0, 5, 1 + 4e-6))
    assert result.first_miss is None
    assert result.expected.tolist() == result.found.tolist() == [[4, 5, 6, 7], [8, 9, 8, 9]]
    agreement = logit_agreement([result, result])
    assert (agreement.rows, agreement.tokens, agreement.ties, agreement.smallest_margin) == (4, 16, 0, 1)
    assert agreement.largest_difference == pytest.approx(4e-6, rel=0.1)
    assert agreement.largest_of_bound == pytest.approx(0.4, rel=0.1)


def test_another_token_within_twice_the_noise_is_a_tie_and_counted_apart() -> None:
    # The reference prefers 6 to 2 by 1.6e-5; both logits are moved by less than the bound of 1e-5, against each other.
    def turned(step: int, logits: Logits) -> None:
        at(2, 0, 6, 1 - 9e-6)(step, logits)
        at(2, 0, 2, 1 - 7e-6)(step, logits)

    result = comparison(turned, at(2, 0, 2, 1 - 1.6e-5))
    assert (result.expected[0, 2], result.found[0, 2]) == (6, 2)
    assert result.first_miss is None
    assert result.ties.tolist() == [[False, False, True, False], [False] * 4]
    assert logit_agreement([result]).ties == 1


def test_another_token_beyond_twice_the_noise_is_a_miss_with_its_row_and_step() -> None:
    result = comparison(at(2, 1, 5, 1.1), at(2, 1, 5, 1 - 3e-5))
    assert result.first_miss == (1, 2)
    assert not result.ties.any()
    with pytest.raises(
        ParityFailed,
        match=r"^batch 1, row 1, step 2: the reference says token 8 \(margin 3\.0e-05\), the engine 5; "
        r"logits differ by 1\.0e-01, bound 1\.0e-05$",
    ):
        logit_agreement([comparison(lambda step, logits: None), result])


def test_a_tie_does_not_excuse_a_logit_beyond_its_bound() -> None:
    result = comparison(at(2, 0, 2, 1.5), at(2, 0, 2, 1 - 1e-5))
    assert result.ties[0, 2]
    assert result.first_miss == (0, 2)


def test_a_logit_beyond_the_bound_is_a_miss_although_the_token_is_the_same() -> None:
    result = comparison(at(3, 1, 0, 2e-5))
    assert result.found.tolist() == result.expected.tolist()
    with pytest.raises(ParityFailed, match=r"^batch 0, row 1, step 3: logits differ by 2\.0e-05, bound 1\.0e-05$"):
        logit_agreement([result])


def test_a_row_whose_encoder_decides_within_the_noise_may_differ_but_lack_no_number() -> None:
    def wrong(step: int, logits: Logits) -> None:
        at(1, 0, 9, 3)(step, logits)
        at(3, 1, 9, 3)(step, logits)

    result = replace(comparison(wrong), undecided=np.array([True, False]))
    assert result.misses.tolist() == [[False] * 4, [False, False, False, True]]
    assert result.ties.tolist() == [[False, True, False, False], [False] * 4]
    excused = replace(result, undecided=np.array([True, True]))
    assert (logit_agreement([excused]).ties, logit_agreement([excused]).largest_difference) == (2, 0)
    assert replace(comparison(at(1, 0, 3, np.nan)), undecided=np.array([True, True])).first_miss == (0, 1)


def test_the_bound_grows_with_the_rows_own_logits() -> None:
    def large(step: int, logits: Logits) -> None:
        logits[0] *= 100

    def off(step: int, logits: Logits) -> None:
        large(step, logits)
        logits[..., 0] = 5e-4

    result = comparison(off, large)
    np.testing.assert_allclose(result.bounds, [1e-3, 1e-5])
    assert result.misses.tolist() == [[False] * 4, [True] * 4]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_logit_is_a_miss(value: float) -> None:
    assert comparison(at(1, 0, 3, value)).first_miss == (0, 1)
    assert comparison(lambda step, logits: None, at(1, 0, 3, np.nan)).first_miss is not None


def test_the_earliest_step_is_named_whatever_its_row() -> None:
    def wrong(step: int, logits: Logits) -> None:
        at(3, 0, 9, 2)(step, logits)
        at(1, 1, 3, 2)(step, logits)

    assert comparison(wrong).first_miss == (1, 1)


def test_both_engines_read_the_references_tokens_after_a_difference() -> None:
    engine, reference = ChangedEngine(at(1, 0, 9, 3)), ChangedEngine(lambda step, logits: None)
    result = compared(engine, reference, SOURCE, np.ones_like(SOURCE, bool), steps=4)
    assert result.found[0].tolist() == [4, 9, 6, 7]
    assert engine.fed == reference.fed == [[[1], [1]], [[4], [8]], [[5], [9]], [[6], [8]]]
    assert (engine.released, reference.released) == (1, 1)


# verify --against


def against(source: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["verify", str(bundle_of(TINY).path), "--against", source, *options])


def test_a_bundle_agrees_with_its_model_on_fresh_sources() -> None:
    result = against(TINY, "--n", "10", "--seed", "3", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["tokens"] == 12 * 48 + 256
    assert (report["against"]["rows"], report["against"]["tokens"], report["against"]["ties"]) == (10, 480, 0)
    assert 0 < report["against"]["largest_of_bound"] <= 1
    assert report["against"]["smallest_margin"] > 0
    line = against(TINY, "--n", "1").stdout.splitlines()[1]
    assert f"against {TINY}: 48 tokens of 1 random sources agree but for 0 ties; all logits within" in line


def test_another_seed_draws_other_sources() -> None:
    margins = {
        json.loads(against(TINY, "--n", "2", "--seed", str(seed), "--json").stdout)["against"]["smallest_margin"]
        for seed in (1, 1, 2)
    }
    assert len(margins) == 2


def test_another_model_is_refused_with_what_is_different() -> None:
    result = against("fat-tiny")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "Error: fat-tiny is not the model of this bundle: state is [{'name': 'sums.0'," in result.stderr
    assert "reads_source is True, the bundle's False" in result.stderr


def test_other_weights_of_the_same_shape_are_a_miss(tmp_path: Path) -> None:
    save_checkpoint(model_from_preset(TINY, seed=1), tmp_path / "other")
    result = against(str(tmp_path / "other"), "--n", "2")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: batch 0, row ")
    assert "step 0: the reference says token" in result.stderr
    assert result.stderr.count("\n") == 1


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from fatdeploy.cli import main
main(["verify", sys.argv[1], "--against", "transformer-tiny"])
"""


def test_a_live_model_without_torch_says_what_to_install() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(bundle_of(TINY).path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "Error: needs torch, not installed here: pip install 'fatdeploy[export]'\n"


# What the probes of a bundle catch.


class LeakyEngine(OrtEngine):
    """An engine whose rows are affected by their neighbours or by earlier decodes."""

    by_neighbours = by_decodes = 0.0
    decodes = 0

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> OrtState:
        self.decodes += 1
        return super().encode(source, mask, capacity)

    def step(self, tokens: Tokens, state: OrtState, want: Want) -> StepOut:
        out = super().step(tokens, state, want)
        assert out.logits is not None
        out.logits[...] += self.by_neighbours * (len(tokens) == 1) + self.by_decodes * (self.decodes > 1)
        return out


def test_a_row_that_depends_on_its_batch_is_caught_when_it_is_decoded_alone() -> None:
    probes = read_probes(bundle_of(TINY).file(PROBES))
    engine = LeakyEngine(bundle_of(TINY))
    assert verified(engine, probes[1:2]).rows == 3
    engine.by_neighbours = 1e-3
    with pytest.raises(
        ParityFailed, match=r"^probe 0, row 0 alone, row 0, step \d+: the logit of token \d+ differs by 1"
    ):
        verified(engine, probes[1:2])


def test_a_second_decode_that_differs_is_caught_however_little() -> None:
    probes = read_probes(bundle_of(TINY).file(PROBES))
    engine = LeakyEngine(bundle_of(TINY))
    engine.by_decodes = 2e-6
    with pytest.raises(ParityFailed, match="the same batch decoded twice gave two answers"):
        verified(engine, probes[1:2])
