"""One lexical table on both sides: in a copy of our bundle, and as CTranslate2's ``vmap.txt``."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.harness.provenance import ROOT
from benchmarks.real.integers.settings import SHORTLIST
from benchmarks.real.sources import EVERY, MODEL, PEER, REAL, Vocabulary, all_sentences
from fatdeploy.bundle import read_bundle
from fatdeploy.cli import COMMANDS
from fatdeploy.folders import replaced_folder

FORM = "int8-throughput"
VMAP = "vmap.txt"


class SourceTable(Protocol):
    """Which target tokens go with which source tokens."""

    frequent: np.ndarray

    def targets_of(self, source: np.ndarray) -> np.ndarray:
        """Return the target tokens of a source's tokens, beyond the frequent ones."""
        ...


def has_shortlists() -> bool:
    """Return whether this version makes shortlists."""
    return "shortlist" in COMMANDS


def add_shortlist(bundles: dict[str, str], cache: Path) -> tuple[dict[str, str], Path]:
    """Return our bundles and one more that has a shortlist, and CTranslate2's folder with the same table.

    The table is built from sentences that are not measured, and from the model's own outputs.
    """
    digest = read_bundle(bundles[FORM]).digest[:12]
    ours, peer = cache / f"{FORM}{SHORTLIST}-{digest}.bundle", cache / f"{PEER}{SHORTLIST}-{digest}"
    if not ours.exists():
        lines = cache / "real-shortlist-sentences.txt"
        lines.write_text("".join(f"{line}\n" for line in unmeasured(all_sentences())), encoding="utf-8")
        with replaced_folder(ours, force=True) as new:
            shutil.copytree(bundles[FORM], new, dirs_exist_ok=True)
            subprocess.run([sys.executable, "-m", "fatdeploy", "shortlist", new, lines], cwd=ROOT, check=True)
    if not peer.exists():
        from fatdeploy.runtimes.shortlist.table import read_table

        pieces = {index: piece for piece, index in Vocabulary.of(REAL / MODEL).ids.items()}
        with replaced_folder(peer, force=True) as new:
            shutil.copytree(REAL / PEER, new, dirs_exist_ok=True)
            (new / VMAP).write_text(vmap_text(read_table(read_bundle(ours)), pieces), encoding="utf-8")
    return {**bundles, f"{FORM}{SHORTLIST}": str(ours)}, peer


def unmeasured(lines: list[str]) -> list[str]:
    """Return the sentences that engines are not compared on."""
    return [line for row, line in enumerate(lines) if row % EVERY]


def vmap_text(table: SourceTable, pieces: dict[int, str]) -> str:
    """Return a table as CTranslate2 reads it: a source piece, a tab, target pieces; an empty source means any."""
    known = {
        index: piece for index, piece in pieces.items() if piece != "<pad>"
    }  # our padding is not in its vocabulary

    def line(source: str, targets: np.ndarray) -> str:
        return f"{source}\t{' '.join(known[index] for index in targets.tolist() if index in known)}\n"

    rows = {piece: np.unique(table.targets_of(np.array([index]))) for index, piece in known.items()}
    return line("", table.frequent) + "".join(line(piece, targets) for piece, targets in rows.items() if targets.size)
