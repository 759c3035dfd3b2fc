"""The quantized real model: settings, the choice of the peer's best, checks of outputs, targets and tables."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.noise import NoiseProbe
from benchmarks.harness.recording import Recording
from benchmarks.readme.integer_tables import agreement_table, integer_fidelity_table, integer_speed_table
from benchmarks.real.exports import FP32, Recipe
from benchmarks.real.folders.pairs import pairs_of
from benchmarks.real.integers import settings
from benchmarks.real.integers.agreement import facts_of, levels
from benchmarks.real.integers.fidelity import closeness, quality, read_references, texts_of
from benchmarks.real.integers.run import outputs_turn
from benchmarks.real.integers.settings import IntegerSizes, IntegerTurn, cpu_here, peer_settings, recipes
from benchmarks.real.integers.shortlists import unmeasured
from benchmarks.real.integers.stages import Stages, best_settings, bundle_row, check_fp32
from benchmarks.real.integers.targets import integer_targets
from benchmarks.real.integers.turns import material_from, measured, timed
from benchmarks.real.sources import evenly
from fatdeploy.machine import Machine
from tests.support.bundles import bundle_of, model_of
from tests.support.quantized import quantized_of

PIECES = {2: "▁a", 3: "▁good", 4: "▁day", 5: "s", 6: "▁bad"}
TURN = IntegerTurn(kind="timed", part="greedy-bulk", engine="fatdeploy", form="int8-latency", threads=2)


def test_recipes_become_options_of_the_command_line() -> None:
    made = recipes("x86-vnni")
    assert made["fp32"] == FP32
    assert made["int8-latency"].arguments() == ["--precision", "int8", "--for", "latency", "--cpu", "x86-vnni"]
    assert Recipe("int4", None, 0.98).arguments() == ["--precision", "int4", "--min-agreement", "0.98"]
    assert made["int8-throughput"].name == "int8.throughput.0.98.x86-vnni"
    assert Recipe("int8", "throughput", 0.0).name == "int8.throughput.0"


@pytest.mark.parametrize(("features", "cpu"), [(("avx2", "avx512_vnni"), "x86-vnni"), (("avx2",), None)])
def test_weights_of_eight_bits_are_for_a_cpu_that_adds_them_exactly(
    features: tuple[str, ...], cpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(None, None, "x86_64", features, 2, None, "Linux", "3.11")
    monkeypatch.setattr(settings, "this_machine", lambda: machine)
    assert cpu_here() == cpu


def test_every_setting_of_the_peer_is_tried() -> None:
    tried = peer_settings("greedy-bulk", ("float32", "int8_float32"))
    assert len({(turn.form, turn.workers, turn.threads, turn.batch) for turn in tried}) == 12
    assert {turn.batch for turn in peer_settings("beams-bulk", ("float32",))} == {16, 32, 64}
    assert [(turn.workers, turn.threads, turn.batch) for turn in peer_settings("greedy-alone", ("float32",))] == [
        (1, 2, 1),
        (2, 1, 1),
    ]


def bulk_row(engine: str, form: str, rate: float, part: str = "greedy-bulk", **setting: Any) -> dict[str, Any]:
    row = {"part": part, "engine": engine, "form": form, "threads": 2, "workers": 1, "batch": 32, "changed": 0}
    return {**row, "tokens_per_second": {"p50": rate, "max": rate}, **setting}


def alone_row(engine: str, form: str, milliseconds: float, part: str = "greedy-alone") -> dict[str, Any]:
    row = {"part": part, "engine": engine, "form": form, "threads": 2, "workers": 1, "batch": 1, "changed": 0}
    return {**row, "sentence": {"p50_ms": milliseconds}}


def test_the_fastest_settings_of_a_part_are_the_best() -> None:
    rows = [bulk_row("ctranslate2", "float32", rate, batch=batch) for batch, rate in ((32, 5.0), (64, 9.0), (128, 7.0))]
    others = [bulk_row("fatdeploy", "fp32", 99.0), bulk_row("ctranslate2", "float32", 99.0, "beams-bulk")]
    assert [row["batch"] for row in best_settings([*rows, *others], "greedy-bulk")] == [64, 128]
    alone = [alone_row("ctranslate2", form, ms) for form, ms in (("slow", 20.0), ("fast", 10.0))]
    assert [row["form"] for row in best_settings(alone, "greedy-alone", count=1)] == ["fast"]
    assert best_settings([], "greedy-alone") == []


def test_rows_are_evenly_spread_and_never_more_than_there_are() -> None:
    assert evenly(9, 3) == [0, 4, 8]
    assert evenly(2, 5) == [0, 1]


class Echo:
    """Translates by copying; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def targets(self, sources: list[list[int]]) -> list[list[int]]:
        self.calls.append(len(sources))
        return sources

    def same_tokens(self, sources: list[list[int]], targets: list[list[int]]) -> tuple[int, int]:
        raise AssertionError


def sizes_of(folder: Path, **bundles: str) -> IntegerSizes:
    prepared = folder / "prepared.json"
    prepared.write_text(json.dumps({"sources": [[n + 1] * (n + 1) for n in range(5)]}))
    files = {"prepared": str(prepared), "forced": str(folder / "forced.json")}
    return IntegerSizes(real="", peer="", bundles=bundles, **files, max_new_tokens=4, alone=2, survey=3, repetitions=2)


@pytest.mark.parametrize(
    ("kind", "part", "calls", "tokens", "times"),
    [
        ("timed", "greedy-bulk", [5, 5, 5], 15, 2),  # one to warm up
        ("timed", "beams-bulk", [5, 5], 15, 1),
        ("survey", "greedy-bulk", [3, 3], 9, 1),
        ("timed", "greedy-alone", [1] * 6, 6, 4),
        ("survey", "beams-alone", [1] * 4, 6, 2),
    ],
)
def test_turns_translate_alone_or_in_bulk(
    tmp_path: Path, kind: Any, part: str, calls: list[int], tokens: int, times: int
) -> None:
    sizes, engine = sizes_of(tmp_path), Echo()
    sources = json.loads(Path(sizes.prepared).read_text())["sources"]
    result = timed(engine, replace(TURN, kind=kind, part=part), sources, sizes)
    assert (engine.calls, result["tokens"], len(result["seconds"])) == (calls, tokens, times)
    assert result["repeatable"] is True


def test_the_material_of_the_gate_ends_with_the_end_token() -> None:
    spec = model_of("transformer-tiny").spec
    end, pad = spec.eos_id, spec.pad_id
    material = material_from([[7, 8, end], [9, end]], [[5, 6], [4]], spec)
    assert material.source.tolist() == [[9, end, pad], [7, 8, end]]
    assert material.tokens.tolist() == [[4, end, pad], [5, 6, end]]
    assert (material.lengths.tolist(), material.mask.sum(1).tolist()) == ([2, 3], [2, 3])


def test_a_bundle_translates_and_follows_its_own_targets(tmp_path: Path) -> None:
    bundle = bundle_of("transformer-tiny")
    sizes = sizes_of(tmp_path, fp32=str(bundle.path))
    turn = outputs_turn("fatdeploy", "fp32", "greedy-bulk", 1)
    outputs = measured(turn, sizes)["outputs"]
    assert [len(tokens) for tokens in outputs] == [4, 1, 4, 4, 4]
    sources = json.loads(Path(sizes.prepared).read_text())["sources"]
    Path(sizes.forced).write_text(json.dumps({"sources": sources, "targets": outputs}))
    forced = measured(replace(turn, kind="forced"), sizes)
    assert forced["tokens"] == 17 + 5
    assert 17 <= forced["same"] <= 22  # the end after the limit was nobody's choice


def stages_of(tmp_path: Path, results: dict[str, Any]) -> Stages:
    """Return stages of a small model in int8, whose turns have results by kind."""
    sizes = sizes_of(tmp_path, **{"int8-latency": str(quantized_of("transformer-tiny", "int8").path)})
    run = Recording(tmp_path / "cache", tmp_path / "out.json", ())
    probe = NoiseProbe(attempts=1)
    return Stages(run, sizes, probe, turn_result=lambda module, turn, sizes: results[turn.kind])


OUTPUTS = [[2, 3], [4], [3], [6], [2]]


def test_outputs_that_depend_on_the_batch_are_refused_where_none_may(tmp_path: Path) -> None:
    times = {"load": 0.5, "seconds": [0.1, 0.2], "tokens": 6, "repeatable": True}
    results = {"outputs": {"outputs": OUTPUTS}, "timed": {**times, "outputs": OUTPUTS}}
    stages = stages_of(tmp_path, results)
    stages.ask_outputs([replace(TURN, kind="outputs")])
    [row], noise = stages.timed([TURN], 1)
    assert (row["tokens_per_second"]["p50"], row["changed"], row["load_s"]) == (45.0, 0, 0.5)
    assert noise["repeated"] == 0
    results["timed"] = {**times, "outputs": [[9], *OUTPUTS[1:]]}
    with pytest.raises(SystemExit, match=r"greedy-bulk, int8-latency: 1 of 5 outputs depend on their batch"):
        stages.timed([replace(TURN, threads=1)], 1)
    results["timed"] = {**times, "outputs": OUTPUTS, "repeatable": False}
    with pytest.raises(SystemExit, match=r"0 of 5 outputs depend on their batch"):
        stages.timed([replace(TURN, threads=1)], 1)


@pytest.mark.parametrize(("precision", "exact"), [("int8", {"form"}), ("int4", set())])
def test_only_sums_of_integers_promise_outputs_that_no_batch_changes(
    tmp_path: Path, precision: Any, exact: set[str]
) -> None:
    sizes = sizes_of(tmp_path, form=str(quantized_of("transformer-tiny", precision).path))
    assert Stages(Recording(tmp_path / "cache", tmp_path / "out.json", ()), sizes).exact == exact


def test_an_interrupted_run_asks_for_nothing_twice(tmp_path: Path) -> None:
    turn = replace(TURN, kind="outputs")
    stages_of(tmp_path, {"outputs": {"outputs": OUTPUTS}}).ask_outputs([turn])
    again = stages_of(tmp_path, {})
    again.ask_outputs([turn])
    assert again.outputs == {("fatdeploy", "int8-latency", 1): OUTPUTS}


def test_targets_that_the_limit_ended_are_not_followed(tmp_path: Path) -> None:
    stages = stages_of(tmp_path, {"forced": {"tokens": 50, "same": 49}})
    stages.outputs["fatdeploy", "fp32", 1] = [[2], [3, 3, 3], [4], [5], [6]]
    forced = stages.forced([replace(TURN, kind="forced")])
    assert forced == {("fatdeploy", "int8-latency"): {"tokens": 50, "same": 49, "share": 0.98}}
    written = json.loads(Path(stages.sizes.forced).read_text())
    assert written["targets"] == [[2], [4], [5], [6]]
    assert written["sources"][1] == [3, 3, 3]


def test_both_engines_must_agree_in_fp32() -> None:
    assert check_fp32([[1]] * 100, [[1]] * 99 + [[2]]) == pytest.approx(0.99)
    with pytest.raises(SystemExit, match=r"in fp32 only 98.0% of the outputs are CTranslate2's \(expected 99%\)"):
        check_fp32([[1]] * 100, [[1]] * 98 + [[2]] * 2)


def test_closeness_counts_sentences_and_compares_texts() -> None:
    assert texts_of([[2, 3, 4, 5]], PIECES) == ["a good days"]
    same = closeness([[2, 3], [4]], [[2, 3], [4]], PIECES)
    assert (same["sentences"], same["unchanged"], same["chrf"]) == (2, 2, 100.0)
    other = closeness([[2, 3, 4], [4]], [[2, 6, 4], [4]], PIECES)
    assert other["unchanged"] == 1
    assert other["chrf"] < 90


def test_sentences_find_their_originals_whatever_their_blanks(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"zh-en-pairs.tsv does not exist: run make real-models"):
        read_references(["一"], tmp_path)
    (tmp_path / "zh-en-pairs.tsv").write_text("好 天。\ta good day\n", encoding="utf-8")
    references = read_references(["坏天。", "好天。"], tmp_path)
    assert references == {1: "a good day"}
    assert quality([[6], [2, 3, 4]], references, PIECES)["chrf"] == 100.0


def test_paragraphs_with_as_many_sentences_are_aligned() -> None:
    chinese = "<p>这是一个很好的例子。这是第二个很好的句子。</p><p class='x'>这一段只有一个长句子。</p>"
    english = "<p>This is a good example. This is a <b>second</b>\n good one.</p><p>Only one. But two here.</p>"
    assert pairs_of(chinese, english) == [
        ("这是一个很好的例子。", "This is a good example."),
        ("这是第二个很好的句子。", "This is a second good one."),
    ]
    assert pairs_of(chinese, english + "<p>More.</p>") == []


def test_a_shortlist_is_built_from_sentences_that_are_not_measured() -> None:
    assert unmeasured(["a", "b", "c", "d", "e", "f"]) == ["b", "c", "d", "f"]


def fidelity_row(engine: str, form: str, beams: int, unchanged: int, chrf: float, share: float) -> dict[str, Any]:
    row = {"engine": engine, "form": form, "beams": beams, "sentences": 583, "unchanged": unchanged}
    forced = {"forced": {"tokens": 100, "same": round(100 * share), "share": share}} if beams == 1 else {}
    return {**row, "chrf": chrf, "bleu": chrf - 1, **forced}


def result() -> dict[str, Any]:
    forms = {"int8-latency": 0.991, "int8-throughput": 0.979, "int4": 0.985}
    fidelity = [
        *(
            fidelity_row("fatdeploy", form, beams, 400, 96.0, share)
            for form, share in forms.items()
            for beams in (1, 4)
        ),
        *(fidelity_row("ctranslate2", "int8_float32", beams, 399 + beams // 2, 95.0, 0.977) for beams in (1, 4)),
    ]
    rows = [
        alone_row("fatdeploy", "int8-latency", 30.0),
        alone_row("fatdeploy", "int4", 30.0),
        alone_row("ctranslate2", "int8_float32", 81.0),
        alone_row("ctranslate2", "float32", 100.0),
        bulk_row("fatdeploy", "int8-throughput", 2800.0),
        bulk_row("ctranslate2", "int8_float32", 2000.0, workers=2, threads=1, batch=64, changed=3),
    ]
    facts = {
        "model": "m",
        "date": "2026-01-01",
        "machine": {"cpu": "some CPU", "cores": 2, "memory_bytes": 8e9},
        "versions": dict.fromkeys(("onnxruntime", "ctranslate2", "sacrebleu"), "1.0"),
        "noise": {"noisy_share": 0.25, "limit": 1.1},
        "sentences": 583,
        "source_tokens": 22.6,
        "survey": rows[2:4],
    }
    bundles = [{"form": "int8-latency", "bytes": 80_000_000}, {"form": "int4", "bytes": 48_000_000}]
    return {**facts, "results": rows, "fidelity": fidelity, "bundles": bundles}


def test_every_row_of_the_table_is_a_target() -> None:
    measured_result = result()
    targets = integer_targets(*(measured_result[key] for key in ("results", "fidelity", "bundles")))
    found = [(target["found"], target["met"]) for target in targets]
    agreements, peers, size, speeds = found[:3], found[3:11], found[11], found[12:]
    assert agreements == [(pytest.approx(99.1), True), (pytest.approx(97.9), False), (pytest.approx(98.5), True)]
    # Unchanged sentences and chrF of both forms, greedy and then with beams.
    assert peers == [(1.0, True)] * 4 + [(-1.0, False), (1.0, True)] * 2
    assert size == (0.6, True)
    assert speeds[:3] == [(pytest.approx(2.7), True), (pytest.approx(2.7), False), (pytest.approx(1.4), True)]
    assert speeds[3:] == [(None, None)] * 3
    assert [target["at_least"] for target in targets[12:]] == [2.5, 3.0, 1.3, 1.3, 2.0, 1.2]
    assert all(target["met"] is None for target in integer_targets([], [], []))


def test_tables_show_speeds_targets_and_fidelity() -> None:
    table = integer_speed_table(result())
    ours = "| a sentence alone, greedy | fatdeploy, ONNX Runtime, int8 `--for latency`, 2 threads | 30.0 |  | 2.70 |"
    peer = "| bulk, greedy | CTranslate2, int8, 2 workers of 1 thread, batches of 64 |  | 2,000 | 1.00 |"
    assert ours in table
    assert peer in table
    assert "11 of 18 targets are met" in table
    assert "2 settings of CTranslate2 were tried" in table
    assert "at most 3 in a setting of CTranslate2, 0 in ours" in table
    fidelity = integer_fidelity_table(result())
    assert "| fatdeploy, ONNX Runtime, int4 | 98.50% | 400 of 583 | 400 of 583 | 96.0 | 96.0 | 48 |" in fidelity
    assert "| CTranslate2, int8 | 97.70% | 399 of 583 | 401 of 583 | 95.0 | 95.0 | – |" in fidelity


def point(share: float, chrf: float, lost: float) -> dict[str, Any]:
    scores = {"sentences": 318, "bleu": 28.0, "chrf": 54.0}
    quantized = {**scores, "bleu": 28.0 - lost, "chrf": 54.0 - lost}
    row = {**fidelity_row("fatdeploy", "int4", 1, 400, chrf, share)}
    return {**row, "references": {"fp32": scores, "quantized": quantized}}


def test_levels_lie_on_a_line_through_points_near_them() -> None:
    points = [point(0.985, 97.0, 0.1), point(0.965, 93.0, 0.3), point(0.80, 10.0, 9.0)]
    assert facts_of(points[0])["bleu_lost"] == pytest.approx(0.1)
    found = levels(points)
    assert [level["agreement"] for level in found] == [97.0, 98.0]  # 99 lies beyond all points
    assert [level["chrf"] for level in found] == [pytest.approx(94.0), pytest.approx(96.0)]
    assert levels(points[:1]) == []
    table = agreement_table({**result(), "results": points, "levels": found})
    assert "| 98 % | 69 % | 96.0 | 95.0 | 0.15 | 0.15 |" in table
    assert "| fatdeploy, ONNX Runtime, `int4`: 98.50 % | 69 % | 97.0 | 96.0 | 0.10 | 0.10 |" in table
    assert "318 of them have references" in table


def test_the_size_of_a_bundle_is_that_of_all_its_files() -> None:
    bundle = bundle_of("transformer-tiny")
    row = bundle_row("fp32", str(bundle.path))
    assert row["digest"] == bundle.digest
    assert row["bytes"] == sum(file.size for file in bundle.manifest.files.values()) > row["weights_bytes"] > 0


def test_turns_and_sizes_can_travel_as_json(tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, fp32="folder")
    assert IntegerTurn(**json.loads(json.dumps(asdict(TURN)))) == TURN
    assert IntegerSizes(**json.loads(json.dumps(asdict(sizes)))) == sizes
