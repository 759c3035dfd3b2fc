"""A bundle's shortlist in the form that CTranslate2 reads, so that both engines choose from the same tokens."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from fatdeploy.runtimes.shortlist.table import LexicalTable

FILE = "vmap.txt"


def vocabulary_map(table: LexicalTable, tokens: Sequence[str]) -> str:
    """Return the lines of CTranslate2's vmap.txt: a source token, TAB, and target tokens separated by blanks.

    The line without a source token has the tokens of every source. CTranslate2 adds EOS and the unknown token itself.
    A token with a blank in it cannot be written and is left out.
    """
    writable = [bool(token) and not set(token) & set(" \t\r\n") for token in tokens]

    def line(source: str, targets: Sequence[int]) -> str:
        return f"{source}\t{' '.join(tokens[target] for target in targets if writable[target])}\n"

    lines = [line("", table.frequent.tolist())]
    for source, token in enumerate(tokens):
        targets = table.entries_of(source)
        if writable[source] and len(targets):
            lines.append(line(token, targets.tolist()))
    return "".join(lines)


def write_mapped_model(model: Path, folder: Path, table: LexicalTable, tokens: Sequence[str]) -> None:
    """Write a folder with CTranslate2's model, linked, and the map; ``translate_batch(use_vmap=True)`` reads it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    (folder / FILE).write_text(vocabulary_map(table, tokens), encoding="utf-8")
