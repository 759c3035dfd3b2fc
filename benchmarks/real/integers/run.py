"""Translate real sentences with the quantized OPUS-MT, ours against CTranslate2 at its best; writes JSON.

Needs the folders that ``make real-models`` writes. Bundles are exported once and kept in build/real. First every engine
translates all sentences, which gives its distance from its own fp32. One quick pass over all settings of CTranslate2
(precision, workers, batch) then chooses its best per part, and only those are timed, in rounds that alternate with
ours. Every turn has its own process, and a turn on a noisy machine is repeated. An interrupted run continues where it
stopped.
"""

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.recording import Recording, file_options, popped, round_options
from benchmarks.harness.targets import verdict
from benchmarks.real.answers import MAX_NEW_TOKENS
from benchmarks.real.exports import kept_bundle
from benchmarks.real.integers.fidelity import closeness
from benchmarks.real.integers.settings import (
    BEAMS,
    PARTS,
    PEER_FP32,
    PEER_INT8,
    SHORTLIST,
    IntegerSizes,
    IntegerTurn,
    cpu_here,
    peer_settings,
    recipes,
)
from benchmarks.real.integers.shortlists import add_shortlist, has_shortlists
from benchmarks.real.integers.stages import Row, Stages, best_settings, bundle_row, check_fp32
from benchmarks.real.integers.targets import integer_targets
from benchmarks.real.sources import MODEL, PEER, REAL, Vocabulary, evenly, sentences, source_ids

OUT = RESULTS / "real_quantized.json"
PACKAGES = ("fatdeploy", "onnxruntime", "ctranslate2", "sacrebleu", "numpy")
SEARCH_PARTS = {1: "greedy-bulk", BEAMS: "beams-bulk"}
SHORTLIST_PART = "shortlist-bulk"


def compute_types() -> tuple[str, ...]:
    """Return the precisions that CTranslate2 has on this CPU; "int8" is another name of one of them."""
    import ctranslate2

    return tuple(sorted(ctranslate2.get_supported_compute_types("cpu") - {"int8"}))


def outputs_turn(engine: Any, form: str, part: str, threads: int, kind: Any = "outputs") -> IntegerTurn:
    """Return a turn that translates everything; on CTranslate2 in the setting that is usually its best."""
    split = {"threads": 1, "workers": threads, "batch": 64} if engine == "ctranslate2" else {"threads": threads}
    return IntegerTurn(kind=kind, part=part, engine=engine, form=form, **split)


def bundles_here(given: dict[str, str]) -> dict[str, str]:
    """Return the folder of every form of ours: as given, or exported."""
    return {form: given.get(form) or str(kept_bundle(recipe)) for form, recipe in recipes(cpu_here()).items()}


def prepare(path: Path, count: int) -> dict[str, Any]:
    """Write the sources, evenly from all sentences; return their sizes."""
    everything = source_ids(sentences())
    sources = [everything[row] for row in evenly(len(everything), count)]
    path.write_text(json.dumps({"sources": sources}))
    return {"sentences": len(sources), "source_tokens": sum(map(len, sources)) / len(sources)}


def fidelity_rows(stages: Stages, forced: dict[tuple[str, str], dict[str, Any]]) -> list[Row]:
    """Return how close each form is to the fp32 of its own engine."""
    pieces = {index: piece for piece, index in Vocabulary.of(REAL / MODEL).ids.items()}
    fp32 = {"fatdeploy": "fp32", "ctranslate2": PEER_FP32}
    return [
        {
            "engine": engine,
            "form": form,
            "beams": beams,
            **closeness(outputs, stages.outputs[engine, fp32[engine], beams], pieces),
            **({"forced": forced[engine, form]} if beams == 1 and (engine, form) in forced else {}),
        }
        for (engine, form, beams), outputs in stages.outputs.items()
        if form.removesuffix(SHORTLIST) != fp32[engine]
    ]


def speed_rows(stages: Stages, parts: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Return a row per engine and setting, and the survey that chose CTranslate2's settings."""
    types = compute_types()
    survey = stages.survey([turn for part in parts for turn in peer_settings(part, types)])
    setting = ("part", "engine", "form", "threads", "workers", "batch")
    turns = []
    for part in parts:
        ours = [{"part": part, "engine": "fatdeploy", "form": form, "threads": threads} for form in PARTS[part].forms]
        peers = [{name: row[name] for name in setting} for row in best_settings(survey, part)]
        turns += [IntegerTurn(kind="timed", **turn) for turn in (*ours, *peers)]
    rows, noise = stages.timed(turns, rounds)
    return {"noise": noise, "results": rows, "survey": survey}


def quantized_result(stages: Stages, parts: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Return all that is measured."""
    ours = [form for form in recipes(None) if form in stages.sizes.bundles]
    cases = [*(("fatdeploy", form) for form in ours), *(("ctranslate2", form) for form in compute_types())]
    turns = [outputs_turn(*case, part, threads) for case in cases for part in SEARCH_PARTS.values()]
    if SHORTLIST_PART in parts:
        peers = [("ctranslate2", form) for form in compute_types()]
        listed = [*(("fatdeploy", form) for form in PARTS[SHORTLIST_PART].forms), *peers]
        turns += [outputs_turn(*case, SHORTLIST_PART, threads) for case in listed]
    stages.ask_outputs(turns)
    equal = {
        beams: check_fp32(stages.outputs["fatdeploy", "fp32", beams], stages.outputs["ctranslate2", PEER_FP32, beams])
        for beams in SEARCH_PARTS
    }
    quantized = [case for case in cases if case[1] not in ("fp32", PEER_FP32)]
    forced = stages.forced(outputs_turn(*case, SEARCH_PARTS[1], threads, "forced") for case in quantized)
    speeds = speed_rows(stages, parts, threads, rounds)
    fidelity = fidelity_rows(stages, forced)
    bundles = [bundle_row(form, folder) for form, folder in stages.sizes.bundles.items()]
    targets = stages.outputs["fatdeploy", "fp32", 1]
    return {
        "target_tokens": sum(map(len, targets)) / len(targets),
        "fp32_outputs_are_the_peers": {str(beams): share for beams, share in equal.items()},
        "peer_int8": PEER_INT8,
        "bundles": bundles,
        "fidelity": fidelity,
        "targets": integer_targets(speeds["results"], fidelity, bundles),
        **speeds,
    }


@click.command()
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads of our engine.")
@click.option("--sentences", "count", type=click.IntRange(2), default=583, show_default=True)
@click.option("--alone", type=click.IntRange(1), default=60, show_default=True, help="Sentences one at a time.")
@click.option("--survey", type=click.IntRange(1), default=256, show_default=True, help="Sentences per tried setting.")
@click.option("--bundle", "given", multiple=True, metavar="FORM=FOLDER", help="Use this bundle, do not export one.")
@round_options(rounds=3, repetitions=2)
@file_options(OUT)
def main(out: Path, cache: Path, given: tuple[str, ...], **options: int) -> None:
    """Measure how fast and how faithful int8 and int4 are, ours against CTranslate2."""
    if not (REAL / MODEL).exists():
        raise SystemExit(f"build/real/{MODEL} does not exist: run make real-models")
    run = Recording(cache, out, PACKAGES)
    bundles = bundles_here(dict(item.split("=", 1) for item in given))
    peer, parts = REAL / PEER, [*PARTS]
    if has_shortlists():
        bundles, peer = add_shortlist(bundles, run.cache)
    else:
        parts.remove(SHORTLIST_PART)
    prepared = run.cache / "real-quantized-sentences.json"
    facts = prepare(prepared, options.pop("count"))
    sizes = IntegerSizes(
        real=str(REAL),
        peer=str(peer),
        bundles=bundles,
        prepared=str(prepared),
        forced=str(run.cache / "real-quantized-forced.json"),
        max_new_tokens=MAX_NEW_TOKENS,
        **popped(options, "alone", "survey", "repetitions"),
    )
    result = quantized_result(Stages(run, sizes), parts, **options)
    run.write({"model": MODEL, "peer": PEER, **facts, "alone": sizes.alone, **options, **result})
    for target in result["targets"]:
        click.echo(f"{target['target']}: {verdict(target)}")


if __name__ == "__main__":
    main()
