"""The bundled model: its data, its checkpoint, and its graphs on every word of the test part."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fatdeploy
from benchmarks.g2p.run import errors
from benchmarks.g2p.targets import targets
from fatdeploy.export.g2p import CHECKPOINT
from fatdeploy.export.g2p.data import entries_from_text
from fatdeploy.export.quantize.request import Integers
from fatdeploy.export.training.run import REPORT
from fatdeploy.manifest import PARITY
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sources import padded
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.lockstep import TIE_MARGINS, compared, logit_agreement
from fatdeploy.targets import Dialect
from tests.support.quantized import quantized_g2p
from tests.support.words import g2p_bundle, ids_of_test_words, parts, reference, references

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "results" / "g2p.json"
BATCH, STEPS = 100, 12  # short words run as many steps, past their end
# Two beam scores this close are a tie: means of log-probabilities in fp32, measured at most 2e-6 apart.
SCORE_NOISE = 1e-5
# Not reached yet; the README says so. A worse checkpoint misses others.
MISSED = {
    "words a second, 1 at once, times g2p-en's: the faster precision",
    "words a second, 32 at once, times g2p-en's: the faster precision",
}


def searched(engine: Engine[Any], options: DecodeOptions, every: int = 1) -> list[Hypothesis]:
    ids = ids_of_test_words()[::every]
    return [
        hypothesis
        for start in range(0, len(ids), BATCH)
        for hypothesis in decode(engine, ids[start : start + BATCH], options)
    ]


@cache
def expected(beams: int) -> list[Hypothesis]:
    """Return the reference's pronunciation of every test word."""
    return searched(reference(), DecodeOptions(num_beams=beams))


def steps_of(words: Sequence[str]) -> int:
    """Return how many steps the longest pronunciation of these words takes, EOS included."""
    return 1 + max(len(phonemes.split()) for word in words for phonemes in references()[word])


def margin_of_bound(ids: list[int], tokens: tuple[int, ...], expected_tokens: tuple[int, ...]) -> float:
    """Return the reference's margin, relative to the noise, where a word's tokens first differ from the reference's."""
    assert reference().spec.target_order == "left_to_right"
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected_tokens, strict=False))
    step = len(list(same))
    comparison = compared(reference(), reference(), *padded([ids], reference().spec), steps=step + 1)
    return float(comparison.margins[0, step] / comparison.bounds[0])


def test_a_dictionary_line_is_a_word_and_its_phonemes() -> None:
    text = "aalto AA1 L T OW2\naaron(2) AA1 R AH0 N # a comment\nb-52 B IY1\na AH0\n" + "abc " + "B " * 21 + "\n"
    assert entries_from_text(text) == [("aalto", "AA1 L T OW2"), ("aaron", "AA1 R AH0 N")]


def test_no_word_is_in_two_parts() -> None:
    words = {name: {word for word, _ in entries} for name, entries in parts().items()}
    assert {name: len(part) for name, part in words.items()} == {"test": 2000, "validation": 2000, "train": 120898}
    assert sum(map(len, words.values())) == len(set.union(*words.values()))
    assert {name: len(entries) for name, entries in parts().items()}["train"] == 129679


def test_the_checkpoint_is_small_and_comes_with_the_notice_of_its_data() -> None:
    files = {path.name: path for path in CHECKPOINT.iterdir()}
    assert sum(path.stat().st_size for path in files.values()) <= 8e6
    assert "Carnegie Mellon University" in files["NOTICE"].read_text()
    report = json.loads(files[REPORT].read_text())
    assert report["pairs"] == {"train": 129679, "validation": 2140}


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_every_logit_of_every_test_word_is_the_references(dialect: Dialect) -> None:
    engine, ids, words = (
        OrtEngine(g2p_bundle(dialect), OrtOptions(threads=1)),
        ids_of_test_words(),
        sorted(references(), key=len),
    )
    comparisons = []
    for start in range(0, len(ids), BATCH):
        source, mask = padded(ids[start : start + BATCH], engine.spec)
        steps = max(STEPS, steps_of(words[start : start + BATCH]))
        comparisons.append(compared(engine, reference(), source, mask, steps=steps))
    # Raises if a difference is not a tie by the reference's margin.
    agreement = logit_agreement(comparisons)
    assert agreement.rows == 2000
    assert max(comparison.expected.shape[1] for comparison in comparisons) == steps_of(words) > STEPS
    print("ties:", [float(margin) for comparison in comparisons for margin in comparison.margins[comparison.ties]])


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_greedy_pronunciations_are_the_references(dialect: Dialect) -> None:
    hypotheses = searched(OrtEngine(g2p_bundle(dialect), OrtOptions(threads=1)), DecodeOptions())
    other = [
        (ids, mine.tokens, theirs.tokens)
        for ids, mine, theirs in zip(ids_of_test_words(), hypotheses, expected(1), strict=True)
        if mine != theirs
    ]
    ties = {str(theirs): margin_of_bound(ids, mine, theirs) for ids, mine, theirs in other}
    print(f"ties: {ties}")
    assert len(hypotheses) == 2000
    assert all(margin <= TIE_MARGINS for margin in ties.values()), f"margins, in bounds of the noise: {ties}"


def test_a_pronunciation_that_ends_too_early_is_not_a_tie() -> None:
    for ids, hypothesis in list(zip(ids_of_test_words(), expected(1), strict=True))[::200]:
        assert margin_of_bound(ids, hypothesis.tokens[:-1], hypothesis.tokens) > 100 * TIE_MARGINS


@pytest.mark.parametrize(("dialect", "every"), [("ort", 1), ("standard", 4)])
def test_beams_are_the_references(dialect: Dialect, every: int) -> None:
    hypotheses = searched(OrtEngine(g2p_bundle(dialect), OrtOptions(threads=1)), DecodeOptions(num_beams=5), every)
    pairs = list(zip(hypotheses, expected(5)[::every], strict=True))
    scores = np.array([(mine.score, theirs.score) for mine, theirs in pairs])
    apart = np.abs(scores[:, 0] - scores[:, 1])
    assert len(apart) == 2000 // every
    ties = {
        str(theirs.tokens): margin
        for (mine, theirs), margin in zip(pairs, apart, strict=True)
        if mine.tokens != theirs.tokens
    }
    print(f"ties: {ties}")
    # Also for words pronounced differently: another pronunciation with an equal score is a tie, any other is a miss.
    assert apart.max() < SCORE_NOISE, f"scores are up to {apart.max():.1e} apart, said otherwise: {ties}"


@pytest.mark.parametrize("beams", [1, 5])
def test_unseen_words_are_pronounced_as_well_as_the_results_say(beams: int) -> None:
    with fatdeploy.load(g2p_bundle().path, threads=1) as model:
        texts = [
            hypothesis.text or "" for hypothesis in model.generate(list(references()), DecodeOptions(num_beams=beams))
        ]
    result = json.loads(RESULT.read_text())
    mine = {"engine": "g2p", "precision": "fp32", "batch": 1, "beams": beams}
    [row] = [row for row in result["results"] if mine.items() <= row.items()]
    assert errors(texts, list(references().values())) == pytest.approx(row["errors"], abs=0.051)


def test_the_results_miss_no_more_targets_than_is_known() -> None:
    outcomes = {row["target"]: row["met"] for row in targets(json.loads(RESULT.read_text())["results"])}
    assert outcomes.keys() > MISSED
    assert {name for name, met in outcomes.items() if not met} <= MISSED


@pytest.mark.parametrize(("precision", "points"), [("int8", 0.3), ("int4", 1.0)])
def test_integers_cost_few_wrong_phonemes(precision: Integers, points: float) -> None:
    bundle, accepted = quantized_g2p(precision), list(references().values())
    gate = json.loads(bundle.file(PARITY).read_text())["gate"]
    assert gate["enforced"]
    assert gate["agreement"]["share"] >= 0.99
    assert gate["row_difference"] == 0
    rates = []
    for compared_bundle in (bundle, g2p_bundle()):
        with fatdeploy.load(compared_bundle.path, threads=1) as model:
            rates.append(
                errors([hypothesis.text or "" for hypothesis in model.generate(list(references()))], accepted)["per"]
            )
    assert rates[0] - rates[1] <= points


def test_the_readme_says_what_words_become() -> None:
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if "run g2p.bundle knight" in line)
    words, _, comment = line.partition("g2p.bundle ")[2].partition("#")
    with fatdeploy.load(g2p_bundle().path, threads=1) as model:
        texts = [hypothesis.text for hypothesis in model.generate(words.split())]
    assert ", ".join(map(str, texts)) == comment.partition(";")[0].strip()


def test_the_example_of_the_readme_pronounces_without_torch() -> None:
    example = ROOT / "examples" / "pronounce.py"
    assert example.read_text().partition("\n\n")[2] in (ROOT / "README.md").read_text()
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'tokenizers', 'safetensors']));"
    code = f"{blocked} import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    words = ["station", "kit"]
    run = subprocess.run(
        [sys.executable, "-c", code, example, g2p_bundle().path, *words], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first.startswith("station: S T EY1 SH AH0 N (-0.")
    assert second.startswith("kit: K IH1 T (-0.")
