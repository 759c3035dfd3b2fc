"""The benchmark of quantized bundles: every peer has the same model, agreement is counted, targets are judged."""

import re
import shutil
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.harness.settings import DecodeSizes, ModelCache
from benchmarks.harness.timing import STEP, Phases
from benchmarks.peers.ctranslate2_model import write_ctranslate2_model
from benchmarks.peers.decoders import Stepping, Translating
from benchmarks.peers.growing_caches import write_growing_caches
from benchmarks.peers.growing_caches_decoding import GrowingCaches
from benchmarks.quantized.prepare import prepare_bundle
from benchmarks.quantized.run import QuantizedPlan
from benchmarks.quantized.targets import targets
from benchmarks.quantized.turns import QuantizedTurn, agreeing_prefix, checked
from benchmarks.readme.engine_tables import quantized_table, speed_table
from benchmarks.readme.phrases import ENGINES
from benchmarks.readme.pictures import OTHERS, OURS, speed_picture
from fatdeploy.bundle import write_manifest
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import Tokens
from tests.support.benchmark_runs import run_of
from tests.support.bundles import bundle_of, model_of

TINY = "transformer-tiny"
LENGTHS = (1, 9, 4, 30)
STEPS = 24


@pytest.fixture(scope="module")
def probe() -> Probe:
    return drawn_probe(EagerEngine(model_of(TINY)), LENGTHS, STEPS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "growing-caches"
    write_growing_caches(model_of(TINY), folder)
    return folder


def known_targets(probe: Probe) -> Tokens:
    """Return targets that no engine would choose by itself."""
    return (probe.tokens * 7 + 5) % model_of(TINY).config.vocab_size


def chosen_by_the_reference(probe: Probe, tokens: Tokens) -> Tokens:
    """Return the arg-max of one pass over the whole target, without the caches and loops of a benchmark."""
    inputs = np.concatenate([np.full((len(tokens), 1), model_of(TINY).config.bos_id), tokens[:, :-1]], 1)
    with torch.inference_mode():
        logits = model_of(TINY)(*(torch.from_numpy(array) for array in (probe.source, probe.mask, inputs)))
    return logits.argmax(-1).numpy()


@pytest.mark.parametrize("rows", [slice(3, 4), slice(0, 1), slice(None)], ids=["one row", "one token", "padded"])
def test_growing_caches_give_the_references_tokens(plain: Path, probe: Probe, rows: slice) -> None:
    longest = int(probe.mask[rows].sum(1).max())
    part = replace(probe, source=probe.source[rows, :longest], mask=probe.mask[rows, :longest])
    phases, tokens = Stepping(GrowingCaches(plain, threads=1), part).decoded(STEPS)
    assert np.array_equal(tokens, probe.tokens[rows])
    assert phases.keys() == {"encode", "first_token", "per_token", "end_to_end"}


def test_growing_caches_follow_known_tokens(plain: Path, probe: Probe) -> None:
    target_tokens = known_targets(probe)
    tokens = Stepping(GrowingCaches(plain, threads=1), probe).following(target_tokens)
    assert np.array_equal(tokens, chosen_by_the_reference(probe, target_tokens))


def test_ctranslate2_follows_known_tokens(tmp_path: Path, probe: Probe) -> None:
    write_ctranslate2_model(model_of(TINY), tmp_path / "float32")
    target_tokens = known_targets(probe)
    tokens = Translating(tmp_path / "float32", probe, threads=1).following(target_tokens)
    assert np.array_equal(tokens, chosen_by_the_reference(probe, target_tokens))


def test_quantizing_for_ctranslate2_leaves_the_reference_as_it_was(tmp_path: Path) -> None:
    model = model_from_preset(TINY)
    write_ctranslate2_model(model, tmp_path / "int8", compute_type="int8")
    expected = model_of(TINY).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_a_row_agrees_up_to_its_first_difference() -> None:
    expected = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert agreeing_prefix(expected, expected) == 1.0
    assert agreeing_prefix(np.array([[1, 2, 0, 4], [0, 6, 7, 8]]), expected) == 2 / 8


@dataclass(frozen=True)
class FixedDecoder:
    """An engine that always returns the same tokens."""

    tokens: Tokens

    def decoded(self, target: int) -> tuple[Phases, Tokens]:
        return {"end_to_end": 1.0}, self.tokens[:, :target]

    def following(self, tokens: Tokens) -> Tokens:
        return tokens


def turn_of(precision: str) -> QuantizedTurn:
    return QuantizedTurn(part="greedy", preset=TINY, engine="fatdeploy", precision=precision, batch=4, threads=1)


def test_wrong_tokens_are_an_error_only_for_exact_engines(probe: Probe) -> None:
    wrong = FixedDecoder(known_targets(probe))
    assert checked(turn_of("int8"), wrong, probe, STEPS)[0] == {"end_to_end": 1.0}
    with pytest.raises(SystemExit, match="the tokens differ from the reference's: no time was recorded"):
        checked(turn_of("fp32"), wrong, probe, STEPS)
    with pytest.raises(SystemExit, match=r"expected \(4, 24\) tokens, found \(4, 5\)"):
        checked(turn_of("int8"), FixedDecoder(probe.tokens[:, :5]), probe, STEPS)


def test_a_bundle_in_another_precision_than_requested_is_refused(tmp_path: Path) -> None:
    models = ModelCache(tmp_path, TINY)
    shutil.copytree(bundle_of(TINY).path, models.model("fatdeploy", "int8"))
    with pytest.raises(SystemExit, match="bundle-int8: expected a bundle in int8, found fp32"):
        prepare_bundle(models, "int8")


def test_ctranslate2_has_one_worker_of_all_threads_or_all_workers_of_one() -> None:
    sizes = DecodeSizes(cache="", source=4, target=4, repetitions=1)
    plan = QuantizedPlan(
        preset=TINY,
        engines=("ctranslate2", "plain"),
        precisions=(),
        compute_types=("float32", "int8"),
        batches=(1, 8),
        threads=(1, 2),
        rounds=5,
        sizes=sizes,
    )
    timed = [turn for turn in plan.turns() if turn.part != "memory"]
    pools = [(turn.batch, turn.threads, turn.workers) for turn in timed if turn.precision == "int8"]
    assert pools == [(1, 1, 1), (1, 2, 1), (1, 2, 1), (8, 1, 1), (8, 2, 1), (8, 1, 2), (8, 2, 1)]
    rounds = [(turn.part, count) for turn, count in plan.n_rounds().items() if turn.precision == "int8"]
    once = [part for part, count in rounds if count == 1]
    assert once == ["forced", *["memory"] * 2, "forced", *["memory"] * 3]
    assert {count for part, count in rounds if part == "greedy"} == {5}


def row_of(engine: str, precision: str, step: float, **rest: Any) -> dict[str, Any]:
    """Return the part of a result row that targets read."""
    ms = {STEP: step, "end_to_end": 70 * step, "load": 400.0}
    return {
        "engine": engine,
        "precision": precision,
        "batch": 1,
        "threads": 1,
        "workers": 1,
        "phases": {name: {"p50_ms": value} for name, value in ms.items()},
        "memory": {"after_load_bytes": 100e6, "peak_bytes": 120e6},
        "bytes_on_disk": 65e6,
        **rest,
    }


def judged(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [target for target in targets(rows) if name in target["target"] and target.get("batch", 1) == 1]


def test_targets_compare_the_best_settings_of_both_sides() -> None:
    rows = [
        row_of("fatdeploy", "int8", 2.5),
        row_of("fatdeploy", "int8", 2.0, threads=2),
        row_of("fatdeploy", "int4", 1.6),
        row_of("ctranslate2", "float32", 9.0),
        row_of("ctranslate2", "int8", 6.0, threads=2),
        row_of("plain", "fp32", 7.0),
    ]
    [step] = judged(rows, "int8 step, times faster than CTranslate2")
    assert (step["found"], step["at_least"], step["met"]) == (3.0, 3.0, True)
    assert step["ours"] == step["peer"] == {"precision": "int8", "threads": 2, "workers": 1}
    [best] = judged(rows, "best of int8 and int4")
    assert (best["found"], best["met"], best["ours"]["precision"]) == (3.75, False, "int4")
    assert best["said"].startswith("NOT MET: best of int8 and int4 step")
    [plain] = judged(rows, "plain torch.onnx export")
    assert (plain["found"], plain["met"]) == (3.5, False)
    [whole] = judged(rows, "from source to target")
    assert (whole["found"], whole["met"]) == (3.0, True)


def test_targets_limit_size_load_and_memory() -> None:
    light = {"after_load_bytes": 70e6, "peak_bytes": 100e6}
    rows = [row_of("fatdeploy", "int8", 2.0), row_of("ctranslate2", "int8", 6.0, memory=light)]
    [size], [load] = judged(rows, "on disk"), judged(rows, "loads")
    assert (size["found"], size["met"], load["found"], load["met"]) == (65.0, True, 0.4, True)
    assert [(target["found"], target["met"]) for target in judged(rows, "memory")] == [(100 / 70, False), (1.2, True)]


def test_a_target_with_a_side_that_was_not_measured_is_neither_met_nor_missed() -> None:
    unmeasured = targets([row_of("fatdeploy", "fp32", 2.0)])
    assert {target["met"] for target in unmeasured} == {None}
    assert (
        unmeasured[0]["said"] == "not measured: int8 step, times faster than CTranslate2's best, batch 1 (at least 3)"
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> dict[str, Any]:
    """Return a tiny run whose "int8" bundle is the fp32 bundle under another name."""
    folder = tmp_path_factory.mktemp("quantized")
    shutil.copytree(plain, ModelCache(folder, TINY).model("plain"))
    int8 = ModelCache(folder, TINY).model("fatdeploy", "int8")
    shutil.copytree(bundle_of(TINY).path, int8)
    write_manifest(int8, replace(bundle_of(TINY).manifest, precision="int8"))
    sizes = "--batch 2 --threads 1 --source 6 --target 5 --rounds 1 --repetitions 2"
    arguments = f"--preset {TINY} --precision fp32 --precision int8 {sizes}"
    return run_of("benchmarks.quantized.run", arguments, (TINY,), folder)


def test_a_run_has_every_engine_in_every_precision(result: dict[str, Any]) -> None:
    assert {"machine", "versions", "commit", "date", "tokens_checked", "compute_types"} <= result.keys()
    assert result["bundles"]["fp32"]["digest"] == bundle_of(TINY).digest != result["bundles"]["int8"]["digest"]
    ours = [("fatdeploy", "fp32"), ("fatdeploy", "int8")]
    theirs = [("ctranslate2", compute_type) for compute_type in result["compute_types"]]
    rows = {(row["engine"], row["precision"]): row for row in result["results"]}
    assert list(rows) == [*ours, *theirs, ("plain", "fp32"), ("reference", "fp32")]
    assert {"float32", "int8"} <= result["compute_types"].keys()
    assert {row["repetitions"] for row in result["results"]} == {2}


def test_a_run_has_agreement_memory_and_size_beside_every_time(result: dict[str, Any]) -> None:
    rows = {(row["engine"], row["precision"]): row for row in result["results"]}
    same = {"forced": 1.0, "prefix": 1.0}
    exact = [("fatdeploy", "int8"), ("ctranslate2", "float32"), ("plain", "fp32"), ("reference", "fp32")]
    assert all(rows[engine]["agreement"] == same for engine in exact)
    assert 0 <= rows["ctranslate2", "int8"]["agreement"]["forced"] <= 1
    for row in result["results"]:
        assert (row["memory"] is not None) == (row["engine"] in {"fatdeploy", "ctranslate2"})
        if row["memory"] is not None:
            assert 0 < row["memory"]["after_load_bytes"] <= row["memory"]["peak_bytes"]
        assert {STEP, "end_to_end", "encode_and_first_token", "encode_by_difference"} <= row["phases"].keys()
        loads = row["engine"] != "reference"
        assert ("load" in row["phases"]) == (row["bytes_on_disk"] is not None) == loads
    folder_bytes = sum(path.stat().st_size for path in bundle_of(TINY).path.iterdir())
    assert rows["fatdeploy", "fp32"]["bytes_on_disk"] == folder_bytes
    assert rows["ctranslate2", "int8"]["bytes_on_disk"] < rows["ctranslate2", "float32"]["bytes_on_disk"]


def test_the_readme_shows_each_engine_in_its_best_setting_and_what_is_missed(result: dict[str, Any]) -> None:
    shown = [row for row in result["results"] if row["best_setting"]]
    assert [row["engine"] for row in shown] == ["fatdeploy", "fatdeploy", "ctranslate2", "plain", "reference"]
    lines = quantized_table(result).splitlines()
    assert [line.split(" | ")[1].split(",")[0] for line in lines[2:7]] == [
        "fatdeploy",
        "fatdeploy",
        "CTranslate2",
        "plain `torch.onnx` export",
        "PyTorch reference",
    ]
    assert " | 1.00 | " in lines[4]
    assert lines[6].endswith(" | 100.0% | – |")
    verdicts = {verdict["target"]: verdict for verdict in result["targets"] if verdict.get("batch", 2) == 2}
    table = {line.split(" | ")[0].removeprefix("| "): line for line in lines[10:]}
    assert f" of {len(result['targets'])} targets are met | " in lines[8]
    for name, verdict in verdicts.items():
        word = "not measured" if verdict["met"] is None else "met: " if verdict["met"] else "NOT MET: "
        assert word in table[name], name
    assert "ctranslate2 4." in lines[-1]


def test_a_run_shows_where_a_step_goes_and_what_it_reads(result: dict[str, Any]) -> None:
    [profile] = result["profiles"]
    assert (profile["precision"], profile["batch"], profile["threads"]) == ("int8", 2, 1)
    assert [profile["ops"][name]["calls"] for name in ("GroupQueryAttention", "MultiHeadAttention")] == [2, 2]
    assert profile["between_ms"] + sum(op["ms"] for op in profile["ops"].values()) == pytest.approx(profile["ms"])
    # Float32 keys and values of two layers, for 6 source tokens and half of 5 steps, in 2 rows.
    assert profile["cache_bytes"] == 2 * 2 * 2 * (6 + 2) * 32 * 4
    assert 0 < profile["weight_bytes"] < rows_bytes(result)
    assert profile["bytes_a_second"] > 1e8
    table = quantized_table(result)
    # The slowest ops have rows of their own.
    slowest = max(profile["ops"], key=lambda name: profile["ops"][name]["ms"])
    assert f"| `{slowest}` | " in table
    assert (
        "| where a step goes, int8, 1 thread: ms in onnxruntime's profile, which costs time itself | batch 2 |" in table
    )


def rows_bytes(result: dict[str, Any]) -> int:
    size: int = next(row["bytes_on_disk"] for row in result["results"] if row["precision"] == "int8")
    return size


def bar_width(path: str) -> float:
    corners = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]
    return max(corners) - min(corners)


@pytest.fixture
def timed(result: dict[str, Any]) -> dict[str, Any]:
    """Return the run with step times of our own: a peer's is a difference, which noise can make negative."""
    copy = deepcopy(result)
    for index, row in enumerate(copy["results"], 1):
        row["phases"][STEP]["p50_ms"] = 0.25 * index
    return copy


def test_the_table_of_the_readme_has_one_row_per_engine(timed: dict[str, Any]) -> None:
    rows = [row for row in timed["results"] if row["best_setting"]]
    lines = speed_table(timed, batch=2).splitlines()
    assert [re.findall(r"\d+\.\d\d", line)[0] for line in lines[2:7]] == [
        f"{row['phases'][STEP]['p50_ms']:.2f}" for row in rows
    ]
    assert lines[7] == ""
    first, times = rows[0], rows[0]["times_faster"][STEP]
    share = f"{first['agreement']['forced']:.1%} of the tokens"
    assert f"speed being 1: fatdeploy {first['precision']} {times:.2f}× with {share}, " in lines[8]
    assert f" of {len(timed['targets'])} targets are met (" in lines[8]
    assert lines[9].startswith("Measured on ")


def test_the_picture_has_a_bar_for_each_engine_as_long_as_its_step(timed: dict[str, Any]) -> None:
    rows = [row for row in timed["results"] if row["best_setting"]]
    picture = speed_picture(rows, ENGINES, STEP)
    assert picture == speed_picture(rows, ENGINES, STEP)
    drawn = ElementTree.fromstring(picture)
    bars = [
        bar_width(path.get("d", ""))
        for path in drawn.iter("{http://www.w3.org/2000/svg}path")
        if any(f"fill: {colour}" in path.get("style", "") for colour in (OURS, OTHERS))
    ]
    steps = [row["phases"][STEP]["p50_ms"] for row in rows]
    longest = max(zip(steps, bars, strict=True))
    assert bars == pytest.approx([step / longest[0] * longest[1] for step in steps], abs=0.1)
    texts = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "CTranslate2, int8" in texts or "CTranslate2, float32" in texts
