"""The bundled model: its data, its checkpoint, and its graphs on every word of the test part."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fatdeploy
from fatdeploy.bundle import Bundle, Dialect
from fatdeploy.export.contract import Choices
from fatdeploy.export.eager import EagerEngine
from fatdeploy.export.g2p import CHECKPOINT, NAME
from fatdeploy.export.g2p.data import dictionary_file, entries_from_text, parts_of
from fatdeploy.export.pipeline import write_bundle
from fatdeploy.export.sources import model_from_source
from fatdeploy.export.training.run import REPORT
from fatdeploy.runtimes.decode import decode, padded
from fatdeploy.runtimes.engine import Engine
from fatdeploy.runtimes.hypothesis import Hypothesis
from fatdeploy.runtimes.lockstep import agreement_of, compared
from fatdeploy.runtimes.metrics import sequence_error_rate, token_error_rate
from fatdeploy.runtimes.options import DecodeOptions
from fatdeploy.runtimes.ort import OrtEngine
from fatdeploy.runtimes.text import tokenizer_from_file
from tests.bundles import shared_bundle

ROOT = Path(__file__).parent.parent
BATCH = 100
# Two scores of beams that are this near are a tie: sums of log-probabilities of up to 21 tokens in fp32.
SCORE_NOISE = 1e-4


@cache
def parts() -> dict[str, list[tuple[str, str]]]:
    return parts_of(entries_from_text(dictionary_file().read_text(encoding="utf-8")))


@cache
def references() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word, phonemes in parts()["test"]:
        found.setdefault(word, []).append(phonemes)
    return found


@cache
def g2p_bundle(dialect: Dialect = "ort") -> Bundle:
    model, origin = model_from_source(NAME)
    choices = Choices(attention_layer=0)
    return shared_bundle(
        f"{NAME}-{dialect}",
        lambda folder: write_bundle(model, folder, origin=origin, dialect=dialect, choices=choices),
    )


@cache
def reference() -> EagerEngine:
    return EagerEngine(model_from_source(NAME)[0])


@cache
def ids_of_test_words() -> list[list[int]]:
    tokenizer = tokenizer_from_file(CHECKPOINT / "tokenizer.json")
    # By length, as generate would do it: no batch is mostly padding.
    return [tokenizer.encoded(word).ids.tolist() for word in sorted(references(), key=len)]


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


@pytest.mark.parametrize(("beams", "slack"), [(1, 0.0), (5, 0.3)])
def test_words_that_it_never_saw_are_pronounced_well(beams: int, slack: float) -> None:
    with fatdeploy.load(g2p_bundle().path, threads=1) as model:
        said = [one.text or "" for one in model.generate(list(references()), DecodeOptions(num_beams=beams))]
    accepted = list(references().values())
    assert sequence_error_rate(said, accepted).value <= 36.0 + slack
    assert token_error_rate(said, accepted).value <= 8.5 + slack
    bare = [re.sub("[0-2]", "", text) for text in said]
    assert sequence_error_rate(bare, [[re.sub("[0-2]", "", one) for one in each] for each in accepted]).value <= 31.0


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
