"""The bundled model: its data, its checkpoint, and its graphs on every word of the test part."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fatdeploy
from benchmarks.g2p import errors
from fatdeploy.bundle import PARITY, Dialect
from fatdeploy.export.g2p import CHECKPOINT
from fatdeploy.export.g2p.data import entries_from_text
from fatdeploy.export.precision import Integers
from fatdeploy.export.training.run import REPORT
from fatdeploy.runtimes.decode import decode, padded
from fatdeploy.runtimes.engine import Engine
from fatdeploy.runtimes.hypothesis import Hypothesis
from fatdeploy.runtimes.lockstep import agreement_of, compared
from fatdeploy.runtimes.options import DecodeOptions
from fatdeploy.runtimes.ort import OrtEngine
from tests.quantized import quantized_g2p
from tests.words import g2p_bundle, ids_of_test_words, parts, reference, references

ROOT = Path(__file__).parent.parent
BATCH = 100
# Two scores of beams that are this near are a tie: sums of log-probabilities of up to 21 tokens in fp32.
SCORE_NOISE = 1e-4


def searched(engine: Engine[Any], options: DecodeOptions) -> list[Hypothesis]:
    ids = ids_of_test_words()
    return [one for start in range(0, len(ids), BATCH) for one in decode(engine, ids[start : start + BATCH], options)]


def test_a_dictionary_line_is_a_word_and_its_phonemes() -> None:
    text = "aalto AA1 L T OW2\naaron(2) AA1 R AH0 N # a comment\nb-52 B IY1\na AH0\n" + "abc " + "B " * 21 + "\n"
    assert entries_from_text(text) == [("aalto", "AA1 L T OW2"), ("aaron", "AA1 R AH0 N")]


def test_no_word_is_in_two_parts() -> None:
    words = {name: {word for word, _ in entries} for name, entries in parts().items()}
    assert {name: len(found) for name, found in words.items()} == {"test": 2000, "validation": 2000, "train": 120898}
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
    engine, ids = OrtEngine(g2p_bundle(dialect), threads=1), ids_of_test_words()
    comparisons = []
    for start in range(0, len(ids), BATCH):
        source, mask = padded(ids[start : start + BATCH], engine.spec)
        comparisons.append(compared(engine, reference(), source, mask, steps=12))
    agreement = agreement_of(comparisons)
    assert agreement.rows == 2000
    assert agreement.ties == 0


def test_greedy_pronunciations_are_the_references() -> None:
    engine = OrtEngine(g2p_bundle(), threads=1)
    assert searched(engine, DecodeOptions()) == searched(reference(), DecodeOptions())


def test_beams_are_the_references() -> None:
    options = DecodeOptions(num_beams=5)
    found, expected = (searched(engine, options) for engine in (OrtEngine(g2p_bundle(), threads=1), reference()))
    other = [(one, two) for one, two in zip(found, expected, strict=True) if one.tokens != two.tokens]
    for one, two in other:  # only as a tie
        assert one.score is not None
        assert one.score == pytest.approx(two.score, abs=SCORE_NOISE)
    assert len(other) <= 2
    scores = np.array([(one.score, two.score) for one, two in zip(found, expected, strict=True)])
    assert np.abs(scores[:, 0] - scores[:, 1]).max() < SCORE_NOISE


@pytest.mark.parametrize("beams", [1, 5])
def test_words_that_it_never_saw_are_pronounced_as_well_as_the_results_say(beams: int) -> None:
    with fatdeploy.load(g2p_bundle().path, threads=1) as model:
        said = [one.text or "" for one in model.generate(list(references()), DecodeOptions(num_beams=beams))]
    result = json.loads((ROOT / "benchmarks" / "results" / "g2p.json").read_text())
    mine = {"engine": "g2p", "precision": "fp32", "batch": 1, "beams": beams}
    [expected] = [row for row in result["results"] if mine.items() <= row.items()]
    assert errors(said, list(references().values())) == pytest.approx(expected["errors"], abs=0.051)


@pytest.mark.parametrize(("precision", "points"), [("int8", 0.3), ("int4", 1.0)])
def test_integers_cost_few_wrong_phonemes(precision: Integers, points: float) -> None:
    bundle, accepted = quantized_g2p(precision), list(references().values())
    gate = json.loads(bundle.file(PARITY).read_text())["gate"]
    assert gate["enforced"]
    assert gate["agreement"]["share"] >= 0.99
    assert gate["row_difference"] == 0
    rates = []
    for one in (bundle, g2p_bundle()):
        with fatdeploy.load(one.path, threads=1) as model:
            rates.append(errors([found.text or "" for found in model.generate(list(references()))], accepted)["per"])
    assert rates[0] - rates[1] <= points


def test_the_readme_says_what_words_become() -> None:
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if "run g2p.bundle knight" in line)
    words, _, said = line.partition("g2p.bundle ")[2].partition("#")
    with fatdeploy.load(g2p_bundle().path, threads=1) as model:
        found = [one.text for one in model.generate(words.split())]
    assert ", ".join(map(str, found)) == said.partition(";")[0].strip()


def test_the_example_of_the_readme_pronounces_without_torch() -> None:
    example = ROOT / "examples" / "pronounce.py"
    assert example.read_text().partition("\n\n")[2] in (ROOT / "README.md").read_text()
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'tokenizers', 'safetensors']));"
    code = f"{blocked} import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    words = ["nation", "kit"]
    run = subprocess.run(
        [sys.executable, "-c", code, example, g2p_bundle().path, *words], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first.startswith("nation: N EY1 SH AH0 N (-0.")
    assert second.startswith("kit: K IH1 T (-0.")
