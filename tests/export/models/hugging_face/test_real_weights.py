"""A trained BART from a folder as it was published: words become the phonemes that ``generate`` gives."""

from pathlib import Path

import pytest
from transformers import BartForConditionalGeneration

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.hugging_face.folder import model_from_folder
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.hugging_face_folders import GeneratedTarget, generated
from tests.support.words import references

FOLDER = Path(__file__).parents[5] / "shared" / "reference" / "bart-g2p"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the folder bart-g2p is not beside the repository")
# Batches of this many words, short ones first, so that no batch is mostly padding.
BATCH = 250


def words_of(graphemes: str, count: int) -> list[list[int]]:
    """Return words as ids: begin, characters, end."""
    known = set(graphemes) - {"_"}
    words = [word for word in sorted(references()) if set(word) <= known]
    chosen = sorted(words[:: len(words) // count][:count], key=len)
    return [[1, *(graphemes.index(character) for character in word), 2] for word in chosen]


@pytest.mark.parametrize("beams", [1, 4])
def test_two_thousand_words_are_pronounced_as_transformers_does(beams: int) -> None:
    model, folder = model_from_folder(FOLDER)
    engine, theirs = EagerEngine(model), BartForConditionalGeneration.from_pretrained(FOLDER).eval()
    options = DecodeOptions(num_beams=beams, max_new_tokens=40, scores=True)
    words = words_of(folder.config["grapheme_chars"], 2000)
    assert len(words) == 2000
    expected: list[GeneratedTarget] = []
    for start in range(0, len(words), BATCH):
        expected += generated(theirs, words[start : start + BATCH], options, engine.spec, cached=True)
    results = decode(engine, words, options)
    assert [result.tokens for result in results] == [target.tokens for target in expected]
    assert [result.score for result in results] == pytest.approx([target.score for target in expected], abs=1e-4)


def test_a_word_is_spoken_as_it_should_be() -> None:
    model, folder = model_from_folder(FOLDER)
    graphemes, phonemes = (folder.config[f"{kind}_chars"] for kind in ("grapheme", "phoneme"))
    words = [[1, *map(graphemes.index, word), 2] for word in ("knight", "transformer")]
    targets = decode(EagerEngine(model), words)
    # The ids of begin, end and padding are spelled "_".
    spoken = ["".join(phonemes[token] for token in target.tokens).strip("_") for target in targets]
    assert spoken == ["nˈIt", "tɹænsfˈɔɹməɹ"]
