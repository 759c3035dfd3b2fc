"""Measure the bundled grapheme-to-phoneme model: errors on the words that it never saw, words a second; writes JSON.

Beside it the neural model of the g2p-en package, in an environment of its own, on the same words; it was probably
trained on them. One process an engine, turns alternate, one thread each. An interrupted run goes on where it was.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.g2p.targets import targets
from benchmarks.harness.measuring import (
    CACHE,
    MEASURED,
    RESULTS,
    ROOT,
    Kept,
    code_digest,
    provenance,
    result_apart,
    write_result,
)
from fatdeploy.bundle import read_bundle
from fatdeploy.export.g2p import CALIBRATION, CHECKPOINT, NAME, PROBES
from fatdeploy.export.g2p.data import dictionary_file, entries_from_text, parts_of
from fatdeploy.export.reference.checkpoint import CONFIG, TOKENIZER, WEIGHTS
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.training.run import REPORT
from fatdeploy.export.training.tokenizers import loaded_tokenizer
from fatdeploy.runtimes.evaluation.metrics import sequence_error_rate, token_error_rate

OUT = RESULTS / "g2p.json"
PEER = "g2p-en==2.1.0"
PEER_NAME = "g2p-en"
STRESS = re.compile("[0-2]")


@dataclass(frozen=True)
class Turn:
    """Who pronounces the words, how many at once, with how many beams and in which precision."""

    engine: str
    batch: int
    beams: int = 1
    precision: str = "fp32"


TURNS = (
    *(Turn(NAME, batch, precision=precision) for precision in ("int8", "fp32") for batch in (1, 32)),
    Turn(PEER_NAME, 1),
    Turn(NAME, 1, beams=5),
)
# A model of another preset, trained on the same pairs for the same time.
COMPARED = "transformer"


def peer_python(cache: Path) -> Path:
    """Return the interpreter of an environment with the peer in it, which is made where there is none."""
    folder = cache / PEER_NAME
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
        (folder / "ready").touch()
    return python


def exported(name: str, source: str, precision: str, cache: Path) -> Path:
    """Return the bundle of a model, which is exported unless these weights were by this code."""
    checkpoint = CHECKPOINT if source == NAME else Path(source)
    made_of = f"{checkpoint_digest(checkpoint)}-{code_digest('fatdeploy', 'export')}"
    folder = cache / f"{name}-{made_of}.{precision}.bundle"
    if not folder.exists():
        command = ["export", source, "--precision", precision, "--out", folder]
        subprocess.run([sys.executable, "-m", "fatdeploy", *command], check=True)
    return folder.resolve()


def checkpoint_digest(folder: Path) -> str:
    """Return a hash of all files of a checkpoint that an export reads."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS, TOKENIZER, CALIBRATION.name, PROBES.name):
        data = (folder / name).read_bytes() if (folder / name).exists() else b""
        digest.update(f"{name} {len(data)}\0".encode() + data)
    return digest.hexdigest()[:12]


def taken(turn: Turn, words: Path, bundle: Path | None, cache: Path, repetitions: int) -> Any:
    """Return what one turn said and its seconds; the peer has no bundle."""
    if bundle is None:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [
            peer_python(cache),
            ROOT / "benchmarks" / "peers" / "pronounced_by_g2p_en.py",
            words,
            str(repetitions),
        ]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)
    asked = {**asdict(turn), "words": str(words), "bundle": str(bundle), "threads": 1, "repetitions": repetitions}
    return result_apart("benchmarks.g2p.turns", json.dumps(asked), blas_threads=1)


def errors(said: list[str], references: list[list[str]]) -> dict[str, float]:
    """Return error rates in percent, with and without stress."""
    bare = [STRESS.sub("", text) for text in said]
    bare_references = [[STRESS.sub("", text) for text in accepted] for accepted in references]
    return {
        "wer": sequence_error_rate(said, references).value,
        "per": token_error_rate(said, references).value,
        "wer_without_stress": sequence_error_rate(bare, bare_references).value,
        "per_without_stress": token_error_rate(bare, bare_references).value,
    }


def skipped_share(said: list[str], checkpoint: Path) -> float | None:
    """Return the share of decoder steps, each word alone, that skip the cross-attention; None without a hybrid pass."""
    config = ModelConfig.from_json((checkpoint / CONFIG).read_text())
    if not config.hybrid:
        return None
    coder = loaded_tokenizer(checkpoint / TOKENIZER)
    read = [token for text in said for token in (coder.bos_id, *coder.target_ids(text))]
    kept = config.hybrid_threshold * config.vocab_size
    return sum(token >= kept for token in read) / len(read)


def row(turn: Turn, rounds: list[Any], references: list[list[str]]) -> dict[str, Any]:
    """Return what a turn's rounds gave: words a second, and errors."""
    rates = np.array([len(references) / seconds for one in rounds for seconds in one["seconds"]])
    return {
        **asdict(turn),
        "words_per_second": {"p50": float(np.median(rates)), "max": float(rates.max())},
        "errors": errors(rounds[0]["said"], references),
    }


@click.command()
@click.option("--compared", type=click.Path(path_type=Path, exists=True), help="Checkpoint of the other preset.")
@click.option("--rounds", default=4, show_default=True, type=click.IntRange(1))
@click.option("--repetitions", default=3, show_default=True, type=click.IntRange(1), help="Of all words in a turn.")
@click.option("--cache", default=CACHE, type=click.Path(path_type=Path), show_default="build/benchmarks")
@click.option("--out", default=OUT, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
def main(compared: Path | None, rounds: int, repetitions: int, cache: Path, out: Path) -> None:
    """Measure errors and words a second of the bundled model, and of its peer."""
    cache.mkdir(parents=True, exist_ok=True)
    bundles = {(NAME, precision): exported(NAME, NAME, precision, cache) for precision in ("int8", "fp32")}
    turns = TURNS
    if compared is not None:
        bundles[COMPARED, "fp32"] = exported(COMPARED, str(compared), "fp32", cache)
        turns = (*TURNS, Turn(COMPARED, 1), Turn(COMPARED, 32))
    else:
        click.echo("no transformer beside it: train one as the README says, and name it with --compared", err=True)
    digests = {f"{name} {precision}": read_bundle(path).digest for (name, precision), path in bundles.items()}
    entries = parts_of(entries_from_text(dictionary_file().read_text(encoding="utf-8")))["test"]
    references: dict[str, list[str]] = {}
    for word, phonemes in entries:
        references.setdefault(word, []).append(phonemes)
    words = cache / "g2p-words.txt"
    words.write_text("\n".join(references))
    made_by = {"bundles": digests, "code": code_digest(*MEASURED), "repetitions": repetitions}
    kept = Kept(cache / f"{out.stem}.partial.json", made_by)
    order = [(turn, index) for index in range(rounds) for turn in turns]
    with click.progressbar(order, label="measuring", file=sys.stderr) as bar:
        for turn, index in bar:
            if (key := f"{index} {turn}") not in kept.results:
                bundle = bundles.get((turn.engine, turn.precision))
                kept.add(key, taken(turn, words.resolve(), bundle, cache, repetitions))
    rows = [
        row(turn, [kept.results[f"{index} {turn}"] for index in range(rounds)], list(references.values()))
        for turn in turns
    ]
    peer = next(one for one in rows if one["engine"] == PEER_NAME)["words_per_second"]["p50"]
    for one in rows:
        one["times_peer"] = one["words_per_second"]["p50"] / peer
    result = {
        **provenance(("fatdeploy", "onnxruntime", "numpy")),
        "peer": PEER,
        "words": len(references),
        "references": len(entries),
        "threads": 1,
        "bundles": {
            f"{name} {precision}": {"digest": read_bundle(path).digest, "bytes": read_bundle(path).total_bytes}
            for (name, precision), path in bundles.items()
        },
        "targets": targets(rows),
        "results": rows,
        "training": json.loads((CHECKPOINT / REPORT).read_text()),
        "compared_training": None if compared is None else json.loads((compared / REPORT).read_text()),
        "skipped_steps": skipped_share(kept.results[f"0 {Turn(NAME, 1)}"]["said"], CHECKPOINT),
    }
    write_result(out, result, kept)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
