"""The bundled model and its test words, for tests."""

from functools import cache

from fatdeploy.bundle import Bundle
from fatdeploy.export.g2p import CHECKPOINT, NAME
from fatdeploy.export.g2p.data import dictionary_file, entries_from_text, parts_of
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.models.loading import model_from_source
from fatdeploy.export.pipeline import write_bundle
from fatdeploy.runtimes.text.tokenizer import tokenizer_from_file
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS, shared_bundle


@cache
def parts() -> dict[str, list[tuple[str, str]]]:
    """Return the entries of the dictionary by part."""
    return parts_of(entries_from_text(dictionary_file().read_text(encoding="utf-8")))


@cache
def references() -> dict[str, list[str]]:
    """Return the words of the test part with their pronunciations."""
    pronunciations: dict[str, list[str]] = {}
    for word, phonemes in parts()["test"]:
        pronunciations.setdefault(word, []).append(phonemes)
    return pronunciations


@cache
def g2p_bundle(dialect: Dialect = "ort") -> Bundle:
    """Return the exported bundled model, with alignments."""
    model, origin = model_from_source(NAME)
    exportable = exportable_model(model, Choices(attention_layer=0))
    return shared_bundle(
        f"{NAME}-{dialect}",
        lambda folder: write_bundle(exportable, folder, origin=origin, target=TARGETS[dialect]),
    )


@cache
def reference() -> EagerEngine:
    """Return the bundled model in PyTorch."""
    return EagerEngine(model_from_source(NAME)[0])


@cache
def ids_of_test_words() -> list[list[int]]:
    """Return the words of the test part as tokens."""
    tokenizer = tokenizer_from_file(CHECKPOINT / "tokenizer.json")
    # By length, as generate would do it: no batch is mostly padding.
    return [tokenizer.encoded(word).ids.tolist() for word in sorted(references(), key=len)]
