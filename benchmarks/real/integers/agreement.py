"""What a share of fp32's tokens means for a translation: bundles of different agreement, their BLEU and chrF.

Needs the folders that ``make real-models`` writes. Bundles of lower bars show where quality begins to suffer, so they
are exported for this alone; CTranslate2's int8 is one more point. Nothing is timed. An interrupted run continues where
it stopped.
"""

from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.recording import Recording, file_options
from benchmarks.real.answers import MAX_NEW_TOKENS
from benchmarks.real.exports import Recipe, kept_bundle
from benchmarks.real.integers.fidelity import closeness, quality, read_references
from benchmarks.real.integers.run import PACKAGES, SEARCH_PARTS, outputs_turn, prepare
from benchmarks.real.integers.settings import PEER_FP32, PEER_INT8, IntegerSizes, cpu_here, recipes
from benchmarks.real.integers.stages import Row, Stages, check_fp32
from benchmarks.real.sources import MODEL, PEER, REAL, Vocabulary, evenly, sentences
from fatdeploy.targets import CpuClass

OUT = RESULTS / "real_agreement.json"
BARS = (0.97, 0.95, 0.0)
LEVELS = (97.0, 98.0, 99.0)  # percent of tokens
LEAST_ON_LINE = 94.0  # quality falls faster below: such points say nothing about these levels
COLUMNS = ("unchanged_share", "chrf", "bleu", "chrf_lost", "bleu_lost")


def recipes_of_bars(cpu: CpuClass | None) -> dict[str, Recipe]:
    """Return the bundles of the benchmark, and cheaper ones that may lose more."""
    cheaper = {
        **{f"int8-throughput-{bar:g}": Recipe("int8", "throughput", bar, cpu) for bar in BARS},
        **{f"int4-{bar:g}": Recipe("int4", None, bar, cpu) for bar in BARS},
    }
    return {**recipes(cpu), **cheaper}


def points(stages: Stages, count: int, threads: int) -> list[Row]:
    """Return every quantized form: its agreement with fp32, its outputs against fp32's and against the originals."""
    ours = [("fatdeploy", form) for form in stages.sizes.bundles]
    cases = [*ours, ("ctranslate2", PEER_FP32), ("ctranslate2", PEER_INT8)]
    stages.ask_outputs(outputs_turn(*case, SEARCH_PARTS[1], threads) for case in cases)
    fp32 = {"fatdeploy": "fp32", "ctranslate2": PEER_FP32}
    check_fp32(*(stages.outputs[engine, form, 1] for engine, form in fp32.items()))
    quantized = [case for case in cases if case[1] not in fp32.values()]
    forced = stages.forced(outputs_turn(*case, SEARCH_PARTS[1], threads, "forced") for case in quantized)
    pieces = {index: piece for piece, index in Vocabulary.of(REAL / MODEL).ids.items()}
    texts = sentences()
    references = read_references([texts[row] for row in evenly(len(texts), count)])
    rows = []
    for engine, form in quantized:
        exact = stages.outputs[engine, fp32[engine], 1]
        outputs = stages.outputs[engine, form, 1]
        row = {"engine": engine, "form": form, "forced": forced[engine, form], **closeness(outputs, exact, pieces)}
        scores = {"fp32": quality(exact, references, pieces), "quantized": quality(outputs, references, pieces)}
        rows.append({**row, "references": scores})
    return sorted(rows, key=lambda row: -row["forced"]["share"])


def facts_of(row: Row) -> dict[str, float]:
    """Return the numbers of a point: agreement and unchanged sentences in percent, scores, and points lost."""
    scores = row["references"]
    return {
        "agreement": 100 * row["forced"]["share"],
        "unchanged_share": 100 * row["unchanged"] / row["sentences"],
        "chrf": row["chrf"],
        "bleu": row["bleu"],
        "chrf_lost": scores["fp32"]["chrf"] - scores["quantized"]["chrf"],
        "bleu_lost": scores["fp32"]["bleu"] - scores["quantized"]["bleu"],
    }


def levels(rows: list[Row]) -> list[dict[str, float]]:
    """Return what each level of agreement means, by a straight line through the points near it; none beyond them."""
    facts = [facts for facts in map(facts_of, rows) if facts["agreement"] >= LEAST_ON_LINE]
    agreements = [fact["agreement"] for fact in facts]
    if len(set(agreements)) < 2:
        return []
    lines = {name: np.polyfit(agreements, [fact[name] for fact in facts], 1) for name in COLUMNS}
    inside = [level for level in LEVELS if min(agreements) <= level <= max(agreements)]
    return [
        {"agreement": level, **{name: float(np.polyval(line, level)) for name, line in lines.items()}}
        for level in inside
    ]


@click.command()
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads of our engine.")
@click.option("--sentences", "count", type=click.IntRange(2), default=583, show_default=True)
@click.option("--bundle", "given", multiple=True, metavar="FORM=FOLDER", help="Use these bundles, do not export any.")
@file_options(OUT)
def main(out: Path, cache: Path, given: tuple[str, ...], count: int, threads: int) -> None:
    """Measure what shares of equal tokens mean for BLEU and chrF."""
    if not (REAL / MODEL).exists():
        raise SystemExit(f"build/real/{MODEL} does not exist: run make real-models")
    run = Recording(cache, out, PACKAGES)
    bundles = dict(item.split("=", 1) for item in given) or {
        form: str(kept_bundle(recipe)) for form, recipe in recipes_of_bars(cpu_here()).items()
    }
    prepared = run.cache / "real-agreement-sentences.json"
    facts: dict[str, Any] = prepare(prepared, count)
    sizes = IntegerSizes(
        real=str(REAL),
        peer=str(REAL / PEER),
        bundles=bundles,
        prepared=str(prepared),
        forced=str(run.cache / "real-agreement-forced.json"),
        max_new_tokens=MAX_NEW_TOKENS,
        alone=1,
        survey=1,
        repetitions=1,
    )
    rows = points(Stages(run, sizes), count, threads)
    run.write({"model": MODEL, **facts, "results": rows, "levels": levels(rows)})
    for row in rows:
        values = ", ".join(f"{name} {value:.2f}" for name, value in facts_of(row).items())
        click.echo(f"{row['engine']} {row['form']}: {values}")


if __name__ == "__main__":
    main()
