"""One lexical table on both sides: in a copy of our bundle, and as CTranslate2's ``vmap.txt``."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.provenance import ROOT
from benchmarks.real.integers.settings import SHORTLIST
from benchmarks.real.sources import EVERY, MODEL, PEER, REAL, Vocabulary, all_sentences
from fatdeploy.bundle import read_bundle
from fatdeploy.cli import COMMANDS
from fatdeploy.folders import replaced_folder

FORM = "int8-throughput"


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
        from benchmarks.peers.vocabulary_map import write_mapped_model
        from fatdeploy.runtimes.shortlist.table import read_table

        ids = Vocabulary.of(REAL / MODEL).ids
        write_mapped_model(REAL / PEER, peer, read_table(read_bundle(ours)), sorted(ids, key=ids.__getitem__))
    return {**bundles, f"{FORM}{SHORTLIST}": str(ours)}, peer


def unmeasured(lines: list[str]) -> list[str]:
    """Return the sentences that engines are not compared on."""
    return [line for row, line in enumerate(lines) if row % EVERY]
