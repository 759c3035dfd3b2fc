"""Translate real sentences with a trained OPUS-MT, ours against CTranslate2 in its best fp32 setting; writes JSON.

Needs the folders that ``make real-models`` writes. Every engine has its own process, processes take turns (A B A B …),
targets are those of ``generate`` before a time is recorded, and a turn on a noisy machine is repeated. An interrupted
run continues where it stopped.
"""

import json
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from benchmarks.harness.noise import NoiseProbe
from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.recording import Recording, file_options, round_options
from benchmarks.harness.rounds import turn_result
from benchmarks.harness.rows import bundle_facts
from benchmarks.harness.targets import verdict
from benchmarks.real.answers import MAX_NEW_TOKENS, NOISE, Answer, answers
from benchmarks.real.exports import CALIBRATION, FP32, PROBES, Recipe, export_real, kept_bundle
from benchmarks.real.sources import MODEL, PEER, REAL, sentences, source_ids
from benchmarks.real.targets import best, export_targets, speed_targets
from benchmarks.real.turns import RealPart, RealSizes, RealTurn
from fatdeploy.bundle import read_bundle
from fatdeploy.runtimes.bench.report import percentile_summary

OUT = RESULTS / "real_models.json"
PACKAGES = ("fatdeploy", "onnxruntime", "ctranslate2", "torch", "transformers", "numpy")
PARTS: tuple[RealPart, ...] = ("alone", "bulk")
SPLITS = ((1, 2), (2, 1))  # CTranslate2's workers, and the threads of each
BATCHES = (16, 32, 64)
EXPORT_ATTEMPTS = 2
CLEAR = 10  # margins of the sentences in noise bounds: equality has no excuse


def turns_of(part: RealPart, threads: int) -> list[RealTurn]:
    """Return ours, and every setting of the peer that may be its best."""
    ours = RealTurn(part=part, engine="fatdeploy", threads=threads)
    batches = BATCHES if part == "bulk" else (1,)
    return [
        ours,
        *(
            RealTurn(part=part, engine="ctranslate2", threads=each, workers=workers, batch=batch)
            for workers, each in SPLITS
            for batch in batches
        ),
    ]


def is_clear(answer: Answer) -> bool:
    """Return whether fp32 noise cannot change a greedy target."""
    return min(answer.margins or [0.0]) >= CLEAR * NOISE * max(1.0, answer.largest)


def prepare(path: Path, count: int) -> dict[str, Any]:
    """Write sources and their greedy targets, evenly from all clear sentences; return their sizes."""
    rows = list(zip(source_ids(sentences()), answers("transformers-greedy"), strict=True))
    clear = [(ids, answer.tokens) for ids, answer in rows if is_clear(answer)]
    chosen = [clear[index] for index in np.linspace(0, len(clear) - 1, count).astype(int)]
    path.write_text(json.dumps({"sources": [ids for ids, _ in chosen], "targets": [tokens for _, tokens in chosen]}))
    return {
        "sentences": count,
        "source_tokens": float(np.mean([len(ids) for ids, _ in chosen])),
        "target_tokens": float(np.mean([len(tokens) for _, tokens in chosen])),
    }


def row_of(turn: RealTurn, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the setting of a turn and its speed over the repetitions of all rounds."""
    results = [round_["result"] for round_ in rounds]
    seconds = np.array([taken for result in results for taken in result["seconds"]])
    row = {**asdict(turn), "load_s": float(np.median([result["load"] for result in results]))}
    if turn.part == "alone":
        return {**row, "sentence": percentile_summary(seconds * 1e3)}
    rates = results[0]["tokens"] / seconds
    return {**row, "tokens_per_second": {"p50": float(np.median(rates)), "max": float(rates.max())}}


def export_result(run: Recording) -> dict[str, Any]:
    """Return the seconds of exports in fp32 and int8, and what their certificates say."""
    probe = NoiseProbe(attempts=EXPORT_ATTEMPTS)
    turns = [FP32, Recipe("int8")]

    def measure(turn: Recipe) -> Any:
        with tempfile.TemporaryDirectory(dir=run.cache) as folder:
            return export_real(turn, Path(folder, "bundle"))

    results = run.measured(dict.fromkeys(turns, 1), lambda turn: probe.measured(lambda: measure(turn)), {})
    rows = [results[turn][0] for turn in turns]
    exports = [row["result"] for row in rows]
    return {
        "model": MODEL,
        "calibration": CALIBRATION,
        "probes": PROBES,
        "noise": probe.facts(rows),
        "targets": export_targets(exports),
        "export": exports,
    }


@click.command()
@click.option("--part", type=click.Choice(["speed", "export"]), default="speed", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads of our engine.")
@click.option("--sentences", "count", type=click.IntRange(1), default=200, show_default=True)
@click.option("--alone", type=click.IntRange(1), default=40, show_default=True, help="Sentences one at a time.")
@round_options(rounds=5, repetitions=2)
@file_options(OUT)
def main(part: Literal["speed", "export"], out: Path, cache: Path, **sizes: int) -> None:
    """Measure a sentence alone and many in bulk, or the export of the real model."""
    if not (REAL / MODEL).exists():
        raise SystemExit(f"build/real/{MODEL} does not exist: run make real-models")
    run = Recording(cache, out, PACKAGES)
    result = speed_result(run, **sizes) if part == "speed" else export_result(run)
    run.write(result)
    for target in result["targets"]:
        click.echo(f"{target['target']}: {verdict(target)}")


def speed_result(run: Recording, threads: int, count: int, alone: int, rounds: int, repetitions: int) -> dict[str, Any]:
    """Return the rows of both engines, and what they were measured on."""
    prepared = run.cache / "real-sentences.json"
    facts = prepare(prepared, count)
    bundle = kept_bundle(FP32)
    plan = RealSizes(
        real=str(REAL),
        bundle=str(bundle),
        prepared=str(prepared),
        max_new_tokens=MAX_NEW_TOKENS,
        alone=alone,
        repetitions=repetitions,
    )
    probe = NoiseProbe()
    turns = [turn for part in PARTS for turn in turns_of(part, threads)]
    made_by = {"sizes": asdict(plan), "bundle": read_bundle(bundle).digest, "ctranslate2": version("ctranslate2")}
    results = run.measured(
        dict.fromkeys(turns, rounds),
        lambda turn: probe.measured(lambda: turn_result("benchmarks.real.turns", turn, plan)),
        made_by,
    )
    rows = [row_of(turn, results[turn]) for turn in turns]
    fastest = [best(rows, part, engine) for part in PARTS for engine in ("fatdeploy", "ctranslate2")]
    return {
        "model": MODEL,
        "peer": PEER,
        **facts,
        "alone": alone,
        "rounds": rounds,
        "tokens_checked": True,
        "bundle": bundle_facts(read_bundle(bundle)),
        "noise": probe.facts([round_ for turn in turns for round_ in results[turn]]),
        "targets": speed_targets(rows),
        "results": [{**row, "best_setting": row in fastest} for row in rows],
    }


if __name__ == "__main__":
    main()
