"""The benchmarks: CTranslate2 gets the same model, and a run writes what the docs read. No time is asserted."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.beams.prepare import MarginEngine, UnsafeSource
from benchmarks.harness.rounds import PartialResults
from benchmarks.peers.ctranslate2_decoding import Translation
from benchmarks.peers.ctranslate2_model import write_ctranslate2_model
from benchmarks.readme.engine_tables import beams_table, engines_table
from benchmarks.readme.other_tables import export_lines
from fatdeploy.errors import ConfigError
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.benchmark_runs import run_of
from tests.support.bundles import bundle_of, model_of

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 9, 4, 30, 9, 2, 17)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ctranslate2") / "tiny"
    write_ctranslate2_model(model_of("transformer-tiny"), folder)
    return folder


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("lengths", [LENGTHS[3:4], LENGTHS, LENGTHS * 4])
def test_ctranslate2_gives_the_references_tokens_on_padded_batches(
    tiny: Path, lengths: tuple[int, ...], workers: int
) -> None:
    probe = drawn_probe(EagerEngine(model_of("transformer-tiny")), lengths, steps=48)
    translation = Translation(tiny, threads=1, workers=workers)
    tokens = translation.tokens(translation.results(translation.sources(probe.source, probe.mask), 48))
    assert np.array_equal(tokens, probe.tokens)


def test_ctranslate2_runs_on_past_eos_as_the_reference_does(tiny: Path) -> None:
    engine, translation = EagerEngine(model_of("transformer-tiny")), Translation(tiny, threads=1)
    probe = drawn_probe(engine, [8] * 32, steps=48)
    ended = (probe.tokens[:, :-1] == engine.spec.eos_id).any(1)
    assert ended.any()
    sources = translation.sources(probe.source[ended], probe.mask[ended])
    assert np.array_equal(translation.tokens(translation.results(sources, 48)), probe.tokens[ended])


def test_a_model_that_ctranslate2_cannot_express_is_refused_with_every_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"norm must be 'post', found 'pre'.*hybrid must be False, found True"):
        write_ctranslate2_model(model_of("fat-tiny"), tmp_path / "fat")


def test_partial_results_are_read_again_only_by_what_made_them(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "partial.json"
    PartialResults(path, {"code": "a", "batches": (1, 8)}).add("0 turn", [1.5])
    assert PartialResults(path, {"code": "a", "batches": (1, 8)}).results == {"0 turn": [1.5]}
    assert PartialResults(path, {"code": "b", "batches": (1, 8)}).results == {}
    PartialResults(path, {}).forget()
    assert not path.exists()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = "--batch 2 --threads 1 --source 6 --target 5 --positions 4 12 --rounds 1 --repetitions 2"
    parts = "--part greedy --part positions --part memory"
    presets = "--preset transformer-tiny --steady-preset fat-tiny"
    folder = tmp_path_factory.mktemp("greedy")
    bundles = ("transformer-tiny", "fat-tiny")
    return run_of("benchmarks.greedy.run", f"{presets} {parts} {sizes}", bundles, folder)


def test_a_run_records_what_was_measured_and_where(result: dict[str, Any]) -> None:
    assert {"machine", "versions", "commit", "date", "tokens_checked"} <= result.keys()
    assert {"onnxruntime", "ctranslate2", "torch"} <= result["versions"].keys()
    assert result["bundles"]["transformer-tiny"]["digest"] == bundle_of("transformer-tiny").digest
    settings = [(row["engine"], row["workers"]) for row in result["results"]]
    assert settings == [("fatdeploy", 1), ("ctranslate2", 1), ("ctranslate2", 2), ("reference", 1)]
    assert [row["repetitions"] for row in result["results"]] == [2, 2, 2, 2]
    assert sum(row["best_ctranslate2"] for row in result["results"]) == 1


def test_a_run_separates_phases_where_the_engine_does(result: dict[str, Any]) -> None:
    ours, peer, _, reference = (set(row["phases"]) for row in result["results"])
    common = {"end_to_end", "encode_and_first_token", "per_token_by_difference", "encode_by_difference"}
    shown = {"encode", "first_token", "per_token"}
    assert (ours, peer, reference) == (common | shown | {"load"}, common | {"load"}, common | shown)
    assert [set(row["phases"]) for row in result["positions"]] == [{"position_4", "position_12"}]
    assert [row["samples"] for row in result["positions"]] == [18]
    [memory] = result["memory"]
    assert memory["limit_bytes"] == round(1.75 * memory["weights_bytes"] + 150e6)
    assert memory["after_load_bytes"] > memory["after_import_bytes"] > 0


def test_the_docs_show_the_peer_once_in_its_best_setting(result: dict[str, Any]) -> None:
    lines = engines_table(result).splitlines()
    assert [line.split(" | ")[1].split(",")[0] for line in lines[2:5]] == [
        "fatdeploy",
        "CTranslate2",
        "PyTorch reference",
    ]
    assert " | 1.00 / 1.00 | " in lines[3]
    export = export_lines({**result, "export": [{"preset": "fat-tiny", "seconds": 61.2}]})
    assert export.startswith("`fat-tiny` is exported and certified in 61 s. Measured on ")
    assert "ctranslate2 4." in lines[8]


@pytest.fixture(scope="module")
def beams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = "--batch 2 --threads 1 --beams 2 --most-beams 3 --source 6 --target 4 --rounds 1 --repetitions 2"
    arguments = f"--preset transformer-tiny --shortlist 24 {sizes}"
    return run_of("benchmarks.beams.run", arguments, ("transformer-tiny",), tmp_path_factory.mktemp("beams"))


def test_beams_are_compared_with_the_peers_best_setting_from_source_to_target(beams: dict[str, Any]) -> None:
    assert beams["bundles"]["transformer-tiny"]["digest"] == bundle_of("transformer-tiny").digest
    rows = beams["results"]
    assert [(row["engine"], row["workers"]) for row in rows] == [
        ("fatdeploy", 1),
        ("ctranslate2", 1),
        ("ctranslate2", 2),
    ]
    assert {"end_to_end", "per_token_by_difference", "load"} <= rows[1]["phases"].keys() < rows[0]["phases"].keys()
    [best] = [row for row in rows if row["best_ctranslate2"]]
    assert best["phases"]["end_to_end"]["p50_ms"] == min(row["phases"]["end_to_end"]["p50_ms"] for row in rows[1:])
    ratio = rows[0]["phases"]["end_to_end"]["p50_ms"] / best["phases"]["end_to_end"]["p50_ms"]
    assert rows[0]["ratio_to_ctranslate2"]["end_to_end"]["p50"] == ratio
    assert rows[0]["within_target"] == (ratio <= 0.8)


def test_beams_share_what_belongs_to_the_source(beams: dict[str, Any]) -> None:
    single, many = beams["memory"]
    config = model_of("transformer-tiny").config
    keys_and_values = 2 * config.decoder_layers * config.width * np.dtype(np.float32).itemsize
    assert single["memory_bytes"] == many["memory_bytes"] == 2 * 6 * keys_and_values
    assert (single["state_bytes"], many["state_bytes"]) == (2 * 4 * keys_and_values, 3 * 2 * 4 * keys_and_values)
    assert many["peak_bytes"] >= many["after_decode_bytes"] > 0


def test_a_shortlist_is_compared_with_the_whole_vocabulary(beams: dict[str, Any]) -> None:
    full, listed = beams["shortlist"]
    assert (full["shortlist"], listed["shortlist"]) == (0, 24)
    assert full["ratio_to_full"]["per_token_by_difference"] == {"min": 1, "p50": 1}
    step = [row["phases"]["per_token_by_difference"]["min_ms"] for row in (full, listed)]
    assert listed["ratio_to_full"]["per_token_by_difference"]["min"] == step[1] / step[0]


def test_the_docs_show_beams_memory_and_shortlists(beams: dict[str, Any]) -> None:
    lines = beams_table(beams).splitlines()
    assert [line.split(" | ")[1].split(",")[0] for line in lines[2:4]] == ["fatdeploy", "CTranslate2"]
    assert " | 1.00 / 1.00 | " in lines[3]
    assert re.match(r"Also measured: with 1 beam the process .* with 3 beams .* a shortlist of 24 tokens", lines[5])


@pytest.mark.parametrize("beams", [1, 3])
def test_sources_whose_beams_may_end_or_are_decided_by_noise_are_refused(beams: int) -> None:
    engine = EagerEngine(model_of("transformer-tiny"))
    options = DecodeOptions(max_new_tokens=8, num_beams=beams, num_return_sequences=beams)
    draw, safe = np.random.default_rng(0), 0
    for _ in range(40):
        source = draw.integers(3, 64, 6)
        expected = decode(engine, [source], options)
        try:
            watched = decode(MarginEngine(engine, beams, 8), [source], options)
        except UnsafeSource:
            continue
        safe += 1
        assert [hypothesis.tokens for hypothesis in watched] == [hypothesis.tokens for hypothesis in expected]
        assert all(best.finish == "length" and engine.spec.eos_id not in best.tokens for best in expected)
    assert 0 < safe < 40
