"""Measure the bundled grapheme-to-phoneme model: errors on words that it never saw, and words per second; writes JSON.

The peer is the neural model of the g2p-en package, in an environment of its own, on the same words; it was probably
trained on them. Every engine has a process of one thread, processes take turns (A B A B …). An interrupted run
continues where it stopped.
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
from benchmarks.harness.provenance import RESULTS, ROOT, code_digest
from benchmarks.harness.recording import Recording, file_options, round_options
from benchmarks.harness.rounds import module_result
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
class G2pTurn:
    """Which engine pronounces the words, how many at once, with how many beams and in which precision."""

    engine: str
    batch: int
    beams: int = 1
    precision: str = "fp32"


TURNS = (
    *(G2pTurn(NAME, batch, precision=precision) for precision in ("int8", "fp32") for batch in (1, 32)),
    G2pTurn(PEER_NAME, 1),
    G2pTurn(NAME, 1, beams=5),
)
# A model of another preset, trained on the same pairs for the same time.
COMPARED = "transformer"


def peer_python(cache: Path) -> Path:
    """Return the interpreter of the peer's environment, which is created unless it exists."""
    folder = cache / PEER_NAME
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
        (folder / "ready").touch()
    return python


def exported(name: str, source: str, precision: str, cache: Path) -> Path:
    """Return the bundle of a model, which is exported unless this code has exported these weights."""
    checkpoint = CHECKPOINT if source == NAME else Path(source)
    made_of = f"{checkpoint_digest(checkpoint)}-{code_digest('fatdeploy', 'export')}"
    folder = cache / f"{name}-{made_of}.{precision}.bundle"
    if not folder.exists():
        command = ["export", source, "--precision", precision, "--out", folder]
        subprocess.run([sys.executable, "-m", "fatdeploy", *command], check=True)
    return folder.resolve()


def checkpoint_digest(folder: Path) -> str:
    """Return a hash of the files of a checkpoint that an export reads."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS, TOKENIZER, CALIBRATION.name, PROBES.name):
        data = (folder / name).read_bytes() if (folder / name).exists() else b""
        digest.update(f"{name} {len(data)}\0".encode() + data)
    return digest.hexdigest()[:12]


def measure_turn(turn: G2pTurn, words: Path, bundle: Path | None, cache: Path, repetitions: int) -> Any:
    """Return the phonemes and the seconds of a turn; the peer has no bundle."""
    if bundle is None:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [
            peer_python(cache),
            ROOT / "benchmarks" / "peers" / "pronounced_by_g2p_en.py",
            words,
            str(repetitions),
        ]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)
    described = {**asdict(turn), "words": str(words), "bundle": str(bundle), "threads": 1, "repetitions": repetitions}
    return module_result("benchmarks.g2p.turns", json.dumps(described), blas_threads=1)


def errors(phonemes: list[str], references: list[list[str]]) -> dict[str, float]:
    """Return error rates in percent, with and without stress."""
    bare = [STRESS.sub("", text) for text in phonemes]
    bare_references = [[STRESS.sub("", text) for text in accepted] for accepted in references]
    return {
        "wer": sequence_error_rate(phonemes, references).value,
        "per": token_error_rate(phonemes, references).value,
        "wer_without_stress": sequence_error_rate(bare, bare_references).value,
        "per_without_stress": token_error_rate(bare, bare_references).value,
    }


def skipped_share(phonemes: list[str], checkpoint: Path) -> float | None:
    """Return the share of decoder steps, word by word, that skip the cross-attention; None without a hybrid pass."""
    config = ModelConfig.from_json((checkpoint / CONFIG).read_text())
    if not config.hybrid:
        return None
    coder = loaded_tokenizer(checkpoint / TOKENIZER)
    inputs = [token for text in phonemes for token in (coder.bos_id, *coder.target_ids(text))]
    kept = config.hybrid_threshold * config.vocab_size
    return sum(token >= kept for token in inputs) / len(inputs)


def row(turn: G2pTurn, rounds: list[Any], references: list[list[str]]) -> dict[str, Any]:
    """Return the words per second and the errors of a turn's rounds."""
    rates = np.array([len(references) / seconds for result in rounds for seconds in result["seconds"]])
    return {
        **asdict(turn),
        "words_per_second": {"p50": float(np.median(rates)), "max": float(rates.max())},
        "errors": errors(rounds[0]["said"], references),
    }


def references_by_word() -> dict[str, list[str]]:
    """Return the pronunciations of each word of the dictionary's test part."""
    references: dict[str, list[str]] = {}
    for word, phonemes in parts_of(entries_from_text(dictionary_file().read_text(encoding="utf-8")))["test"]:
        references.setdefault(word, []).append(phonemes)
    return references


def bundles_of(compared: Path | None, cache: Path) -> dict[tuple[str, str], Path]:
    """Return the exported bundles by name and precision."""
    bundles = {(NAME, precision): exported(NAME, NAME, precision, cache) for precision in ("int8", "fp32")}
    if compared is not None:
        bundles[COMPARED, "fp32"] = exported(COMPARED, str(compared), "fp32", cache)
    return bundles


def with_speed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its speed relative to the peer's."""
    [peer] = [row["words_per_second"]["p50"] for row in rows if row["engine"] == PEER_NAME]
    return [{**row, "times_peer": row["words_per_second"]["p50"] / peer} for row in rows]


def training_report(checkpoint: Path | None) -> Any:
    """Return how a model was trained; None without a checkpoint."""
    return None if checkpoint is None else json.loads((checkpoint / REPORT).read_text())


@click.command()
@click.option("--compared", type=click.Path(path_type=Path, exists=True), help="Checkpoint of the other preset.")
@round_options(rounds=4, repetitions=3)
@file_options(OUT)
def main(compared: Path | None, rounds: int, repetitions: int, cache: Path, out: Path) -> None:
    """Measure errors and words per second of the bundled model, and of its peer."""
    run = Recording(cache, out, ("fatdeploy", "onnxruntime", "numpy"))
    bundles = bundles_of(compared, run.cache)
    turns = TURNS if compared is None else (*TURNS, G2pTurn(COMPARED, 1), G2pTurn(COMPARED, 32))
    if compared is None:
        click.echo("no transformer to compare with: train one as the README says, and pass it as --compared", err=True)
    facts = {
        f"{name} {precision}": {"digest": (bundle := read_bundle(path)).digest, "bytes": bundle.total_bytes}
        for (name, precision), path in bundles.items()
    }
    references = references_by_word()
    words = run.cache / "g2p-words.txt"
    words.write_text("\n".join(references))

    def measure(turn: G2pTurn) -> Any:
        return measure_turn(turn, words, bundles.get((turn.engine, turn.precision)), run.cache, repetitions)

    results = run.measured(dict.fromkeys(turns, rounds), measure, {"bundles": facts, "repetitions": repetitions})
    rows = with_speed([row(turn, results[turn], list(references.values())) for turn in turns])
    run.write(
        {
            "peer": PEER,
            "words": len(references),
            "references": sum(map(len, references.values())),
            "threads": 1,
            "bundles": facts,
            "targets": targets(rows),
            "results": rows,
            "training": training_report(CHECKPOINT),
            "compared_training": training_report(compared),
            "skipped_steps": skipped_share(results[G2pTurn(NAME, 1)][0]["said"], CHECKPOINT),
        }
    )


if __name__ == "__main__":
    main()
