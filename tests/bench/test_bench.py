"""``fatdeploy bench``: what it measures, the fidelity it shows, and what it refuses. No time is asserted."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from fatdeploy._version import VERSION
from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.certificate import HalfParity, read_certificate
from fatdeploy.cli import main
from fatdeploy.errors import BenchFailed, BundleError, ConfigError, ParityFailed
from fatdeploy.export.graph_files import graphs_of
from fatdeploy.machine import this_machine, usable_cores
from fatdeploy.manifest import DECODER, GATE, PARITY, PROBES
from fatdeploy.runtimes.bench import processes as bench_processes
from fatdeploy.runtimes.bench import turn as bench_turn
from fatdeploy.runtimes.bench.drawing import Scale
from fatdeploy.runtimes.bench.page import html_from_report
from fatdeploy.runtimes.bench.plan import BenchPlan, BenchRequest, Setting, fitting_threads, plans_for
from fatdeploy.runtimes.bench.processes import measured_in_process, turns_of
from fatdeploy.runtimes.bench.report import percentile_summary, rows_of
from fatdeploy.runtimes.bench.table import milliseconds, percent, report_lines
from fatdeploy.runtimes.bench.timing import Endless, Times, peak_bytes, random_sources, read_bandwidth, timed_decode
from fatdeploy.runtimes.bench.weight_bytes import bytes_a_step_reads
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.proof import promise
from fatdeploy.runtimes.proof.fidelity import Fidelity
from fatdeploy.runtimes.proof.gate import read_material, write_material
from fatdeploy.runtimes.proof.probes import read_probes, write_probes
from tests.support.bundles import bundle_of, half_of
from tests.support.engines.scripted import SPEC, ScriptedEngine
from tests.support.quantized import quantized_of
from tests.support.terminal import on_a_terminal

TINY, NAT = "transformer-tiny", "transformer-nat-tiny"
SMALL = ("--source", "5", "--target", "4", "--threads", "1")
QUICK = (*SMALL, "--batch", "1", "--beams", "1", "--repetitions", "1")
REQUEST = BenchRequest(batch=(8, 1), source=32, target=64, beams=(1, 4), threads=(1, 2), repetitions=6)
DEFAULTS = frozenset({"source", "target", "beams", "threads"})


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measure two bundles once; return the report, the page and the output."""
    folder = tmp_path_factory.mktemp("bench")
    files = ("--json", folder / "out.json", "--html", folder / "out.html")
    options = (*SMALL, "--batch", "1,3", "--repetitions", "5", *files)
    result = bench(bundle_of(TINY).path, bundle_of(NAT).path, *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads((folder / "out.json").read_text())
    return {"report": report, "html": (folder / "out.html").read_text(), "result": result}


def rows_named(run: dict[str, Any], preset: str) -> list[dict[str, Any]]:
    return [row for row in run["report"]["rows"] if row["bundle"] == f"{preset}-ort"]


def test_each_setting_has_a_row_with_the_samples_of_every_phase(run: dict[str, Any]) -> None:
    rows = rows_named(run, TINY)
    assert [(row["batch"], row["beams"], row["tokens"]) for row in rows] == [
        (1, 1, 4),
        (3, 1, 12),
        (1, 4, 4),
        (3, 4, 12),
    ]
    for row in rows:
        # Five repetitions in four processes; the first of four steps is counted separately.
        counts = {name: phase["n"] for name, phase in row["phases"].items()}
        assert counts == {"load": 4, "encode": 5, "first_token": 5, "per_token": 15, "end_to_end": 5}
        assert all(
            0 < phase["min_ms"] <= phase["p50_ms"] <= phase["p95_ms"] <= phase["p99_ms"]
            for phase in row["phases"].values()
        )
        assert {name: len(samples) for name, samples in row["samples_ms"].items()} == {
            "load": 4,
            "encode": 5,
            "first_token": 5,
            "end_to_end": 5,
        }
        assert [len(row["positions_ms"][name]) for name in ("min", "p50")] == [4, 4]
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] * 1000 / row["phases"]["end_to_end"]["p50_ms"])
        assert (row["source"], row["target"], row["threads"]) == (5, 4, 1)


def test_fidelity_and_size_are_next_to_every_latency(run: dict[str, Any]) -> None:
    for preset, count in ((TINY, 4), (NAT, 2)):
        rows, bundle = rows_named(run, preset), bundle_of(preset)
        assert [row["fidelity"] for row in rows] == [{"tokens": 832, "same": 832, "share": 1.0}] * count
        assert [row["certified_share"] for row in rows] == [1.0] * count
        assert {(row["digest"], row["bundle_bytes"]) for row in rows} == {(bundle.digest, bundle.total_bytes)}
    parities = [bundle["parity"]["tokens"] for bundle in run["report"]["bundles"]]
    assert parities == [832, 832]


def test_memory_does_not_shrink_from_setting_to_setting(run: dict[str, Any]) -> None:
    peaks = [row["peak_bytes"] for row in rows_named(run, TINY)]
    assert peaks == sorted(peaks)
    assert peaks[0] > 10e6


def test_parallel_models_have_only_load_encode_and_end_to_end(run: dict[str, Any]) -> None:
    rows = rows_named(run, NAT)
    assert [(row["batch"], row["beams"]) for row in rows] == [(1, 1), (3, 1)]
    assert all(list(row["phases"]) == ["load", "encode", "end_to_end"] for row in rows)
    assert all(row["floor"] is row["positions_ms"] is None for row in rows)
    note = f"{NAT}-ort: --beams 1,4 lowered to 1 (it generates all tokens at once)"
    assert run["report"]["notes"] == [note]
    assert run["result"].stderr == f"WARNING {note}\n"


def test_the_report_records_machine_versions_and_settings(run: dict[str, Any]) -> None:
    report = run["report"]
    assert report["machine"] == json.loads(json.dumps(this_machine().as_dict()))
    assert report["versions"]["fatdeploy"] == VERSION
    assert report["versions"]["numpy"] == np.__version__
    assert report["settings"] == {
        "batch": [1, 3],
        "source": 5,
        "target": 4,
        "beams": [1, 4],
        "threads": [1],
        "spinning": True,
        "repetitions": 5,
        "rounds": 4,
        "warm_up": 1,
    }
    assert {json.dumps(row["device"]) for row in report["rows"]} == {
        json.dumps({"kind": "cpu", "name": this_machine().cpu, "clocks": None})
    }


def test_the_floor_is_the_time_to_read_what_a_step_reads(run: dict[str, Any]) -> None:
    for row in rows_named(run, TINY):
        floor = row["floor"]
        assert floor["decoder_bytes"] == bytes_a_step_reads(bundle_of(TINY).file(DECODER))
        assert floor["ms"] == pytest.approx(floor["decoder_bytes"] / floor["read_bytes_per_s"] * 1000)
        assert floor["times"] == pytest.approx(row["phases"]["per_token"]["p50_ms"] / floor["ms"])


def test_the_table_shows_each_phase_with_its_agreement(run: dict[str, Any]) -> None:
    lines = run["result"].stdout.splitlines()
    size = bundle_of(TINY).total_bytes / 1e6
    assert lines[0] == (
        f"{TINY}-ort, 1 thread: {size:.1f} MB, source 5, target 4; 832 of 832 tokens are the reference's (100 %, "
        "certified 100 %)"
    )
    cells = "batch beams phase p50 ms p95 ms p99 ms min ms samples tokens/s peak MB agreement certified"
    assert " ".join(lines[1].split()) == cells
    # Load once, then four phases of four settings.
    section = lines[2 : lines.index("")]
    assert len(section) == 1 + 4 * 4
    assert all(line.split()[-4:] == ["100", "%", "100", "%"] for line in section)
    row = rows_named(run, TINY)[0]["phases"]["per_token"]
    times = " ".join(milliseconds(row[name]) for name in ("p50_ms", "p95_ms", "p99_ms", "min_ms"))
    assert " ".join(section[3].split()) == f"1 1 per token {times} 15 100 % 100 %"
    assert lines[-1].endswith("; 5 repetitions in 4 rounds after a warm-up.")
    assert list(report_lines(run["report"])) == lines


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def test_the_page_is_well_formed_and_loads_nothing(run: dict[str, Any]) -> None:
    page = parsed(run["html"])
    assert "http" not in run["html"]
    assert "url(" not in run["html"]
    assert not [element.tag for element in page.iter() if element.tag in ("script", "link", "img", "iframe", "object")]
    assert not [element for element in page.iter() if {"src", "href", "onload"} & set(element.attrib)]
    assert "prefers-color-scheme: dark" in run["html"]
    assert [element.get("name") for element in page.iter("meta")] == [None, "viewport"]


def test_every_picture_of_the_page_has_its_text(run: dict[str, Any]) -> None:
    pictures = [svg for svg in parsed(run["html"]).iter("svg") if svg.get("aria-hidden") is None]
    # Spreads of steps (1) and targets (2), batch (2), position (1), size (1), floor (1).
    assert len(pictures) == 8
    for picture in pictures:
        assert picture.get("role") == "img"
        title, text = picture.findtext("title"), picture.findtext("desc")
        assert title
        assert text
        assert picture.get("aria-label") == f"{title}. {text}"
    row = rows_named(run, TINY)[0]
    floor = next(picture for picture in pictures if "GB/s" in (picture.findtext("title") or ""))
    assert f"batch 1, greedy: {milliseconds(row['phases']['per_token']['p50_ms'])} ms" in (floor.findtext("desc") or "")


def test_the_page_has_all_numbers_in_tables(run: dict[str, Any]) -> None:
    tables = list(parsed(run["html"]).iter("table"))
    rows = [[cell.text or "" for cell in row.iter("td")] for table in tables for row in table.iter("tr")]
    assert len([row for row in rows if row]) == (1 + 4 * 4) + (1 + 2 * 2)
    assert {tuple(row[-2:]) for row in rows if row} == {("100 %", "100 %")}


def test_a_name_cannot_write_into_the_page(run: dict[str, Any]) -> None:
    report = json.loads(json.dumps(run["report"]).replace(f"{TINY}-ort", "<script>&amp;'x"))
    page = parsed(html_from_report(report))
    assert not list(page.iter("script"))
    assert "<script>&amp;'x" in (page.findtext("body/main/h1") or "")


def test_standard_output_has_only_the_json(tmp_path: Path) -> None:
    result = bench(bundle_of("fat-tiny").path, *QUICK, "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    [row] = json.loads(result.stdout)["rows"]
    assert (row["bundle"], row["batch"], row["phases"]["per_token"]["n"]) == ("fat-tiny-ort", 1, 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--batch", "0"], "'--batch': expected whole numbers from 1 up with commas between them, found '0'"),
        (["--batch", "1,x"], "'--batch': expected whole numbers from 1 up with commas between them, found '1,x'"),
        (["--batch", "9" * 5000], "'--batch': expected whole numbers from 1 up"),
        (["--beams", ""], "'--beams': expected whole numbers from 1 up"),
        (["--threads", "1.5"], "'--threads': expected whole numbers from 1 up"),
        (["--source", "0"], "'--source': 0 is not in the range x>=1"),
        (["--target", "two"], "'--target': 'two' is not a valid integer range"),
        (["--repetitions", "0"], "'--repetitions': 0 is not in the range x>=1"),
        (["--html", "-"], "--html: expected a file, found -"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_with_the_options_name(arguments: list[str], reason: str) -> None:
    result = bench(bundle_of(TINY).path, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in result.stderr


def test_all_impossible_settings_are_refused_together_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_processes, "measured_in_process", None)
    sizes = ("--source", "257", "--target", "300", "--beams", "2,33")
    result = bench(bundle_of(TINY).path, bundle_of(NAT).path, *sizes)
    assert (result.exit_code, result.stdout) == (1, "")
    for reason in (
        f"--source must lie in 1…256 for {TINY}-ort (its max_source), found 257",
        f"--target must lie in 1…256 for {TINY}-ort (its max_target), found 300",
        f"--beams must lie in 1…32 for {TINY}-ort (half its vocabulary), found 33",
        f"--beams must lie in 1…1 for {NAT}-ort (it generates all tokens at once), found 33",
    ):
        assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_more_threads_than_cores_are_refused_if_typed_and_dropped_if_default() -> None:
    result = bench(bundle_of(TINY).path, "--threads", usable_cores() + 1)
    assert result.exit_code == 1
    assert f"--threads must lie in 1…{usable_cores()} (the cores of this process)" in result.stderr
    assert fitting_threads(replace(REQUEST, defaults=DEFAULTS), 1).threads == (1,)
    assert fitting_threads(REQUEST, 2) is REQUEST


def test_a_folder_without_a_bundle_and_a_repeated_bundle_are_refused(tmp_path: Path) -> None:
    result = bench(tmp_path / "nothing", *QUICK)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(r"bundle .*nothing refused: No such file", result.stderr)
    result = bench(bundle_of(TINY).path, bundle_of(TINY).path, *QUICK)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the same bundle is given more than once" in result.stderr
    assert "Missing argument 'BUNDLE...'" in bench().stderr


def test_files_that_cannot_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    for name in ("--json", "--html"):
        result = bench(bundle_of(TINY).path, name, tmp_path / "none" / "out")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "there is no folder" in result.stderr
    result = bench(bundle_of(TINY).path, "--json", tmp_path / "out", "--html", tmp_path / "out")
    assert "both name" in result.stderr


def with_changed_probes(folder: Path) -> Bundle:
    """Return a bundle with one probe whose last token is not the reference's."""
    bundle = bundle_of(TINY)
    shutil.copytree(bundle.path, folder)
    probes = read_probes(bundle.file(PROBES))
    tokens = probes[1].tokens.copy()
    tokens[2, -1] = (tokens[2, -1] + 1) % 64
    write_probes(folder / PROBES, [probes[0], replace(probes[1], tokens=tokens), *probes[2:]])
    return write_manifest(folder, bundle.manifest)


def test_an_fp32_bundle_that_returns_another_token_is_not_measured(tmp_path: Path) -> None:
    wrong = with_changed_probes(tmp_path / "wrong")
    result = bench(wrong.path, *QUICK, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: probe 1, row 2, step 47: the reference says token")
    assert not list(tmp_path.glob("out.*"))


def test_later_rounds_of_fp32_are_checked_too(tmp_path: Path) -> None:
    [plan] = plans_for({"wrong": with_changed_probes(tmp_path / "wrong")}, replace(REQUEST, batch=(1,)))
    turn = replace(plan.turn(1, 1), source=5, target=2, settings=(Setting(1, 1),), repetitions=1)
    assert not turn.thorough
    with pytest.raises(ParityFailed, match="returns 831 of the reference's 832 tokens, and fp32 must return all"):
        bench_turn.measure_turn(turn)


def quantized_with(folder: Path, other_tokens: int, **gate: object) -> Bundle:
    """Return a copy of a quantized bundle with a number of changed reference tokens, and changes to its gate."""
    bundle = quantized_of(TINY, "int8")
    shutil.copytree(bundle.path, folder)
    material = read_material(bundle)
    tokens = material.tokens.copy()
    places = tuple(axis[:other_tokens] for axis in np.nonzero(material.counts))
    # The engine reads these tokens too, so more steps than these may differ.
    tokens[places] = (tokens[places] + 1) % 64
    write_material(folder / GATE, replace(material, tokens=tokens))
    certificate = json.loads(bundle.file(PARITY).read_text())
    certificate["gate"] |= gate
    (folder / PARITY).write_text(json.dumps(certificate))
    return write_manifest(folder, bundle.manifest)


def test_the_share_of_a_quantized_bundle_is_next_to_the_certified_share(tmp_path: Path) -> None:
    recorded = json.loads(quantized_of(TINY, "int8").file(PARITY).read_text())["gate"]["agreement"]
    # As on another CPU: one more token than here.
    certified = (recorded["same_tokens"] + 1) / recorded["tokens"]
    other = quantized_with(tmp_path / "int8", 0, agreement={**recorded, "same_tokens": recorded["same_tokens"] + 1})
    result = bench(other.path, *QUICK, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert result.exit_code == 0, result.stderr
    shares = percent(recorded["share"]), percent(certified)
    assert shares[0] != shares[1]
    counts = f"{recorded['same_tokens']} of {recorded['tokens']} tokens are the reference's"
    assert f"{counts} ({shares[0]}, certified {shares[1]})" in result.stdout
    assert " ".join(result.stdout.splitlines()[2].split()).endswith(" ".join(shares))
    report = json.loads((tmp_path / "out.json").read_text())
    expected = {"tokens": recorded["tokens"], "same": recorded["same_tokens"], "share": recorded["share"]}
    assert [(row["fidelity"], row["certified_share"]) for row in report["rows"]] == [(expected, certified)]
    assert (report["bundles"][0]["precision"], report["bundles"][0]["parity"]) == ("int8", None)
    page = (tmp_path / "out.html").read_text()
    assert f"int8 (int8): {other.total_bytes / 1e6:.1f} MB, {shares[0]}" in page
    assert f"<b>agreement {shares[0]}, certified {shares[1]}</b>" in page
    assert f">{shares[0]}</td><td >{shares[1]}</td>" in page


@pytest.mark.parametrize(
    ("bar", "other_tokens", "reason"),
    [
        (0.99, 0, r"the bar is 99\.00% and 9\d\.\d\d% were when it was exported"),
        (None, 60, r"rounding on another machine explains at most 7 tokens"),
    ],
    ids=["below its bar", "no bar, and far below what it was"],
)
def test_a_quantized_bundle_that_lost_its_tokens_here_is_not_measured(
    tmp_path: Path, bar: float | None, other_tokens: int, reason: str
) -> None:
    gate = {} if bar is None else {"bar": bar, "enforced": True}
    wrong = quantized_with(tmp_path / "wrong", other_tokens, **gate)
    result = bench(wrong.path, *QUICK, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.match(rf"Error: {re.escape(str(wrong.path))}: \d+ of 711 tokens are the reference's here ", result.stderr)
    assert re.search(reason, result.stderr)
    assert result.stderr.endswith(f": no time was recorded; fatdeploy verify {wrong.path}\n")
    assert not list(tmp_path.glob("out.*"))


def test_half_precision_below_its_bar_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, half = bundle_of(TINY), half_of(TINY)
    certificate = read_certificate(half)
    parity = certificate.parity
    assert isinstance(parity, HalfParity)
    monkeypatch.setattr(bench_turn, "token_fidelity", lambda *_: Fidelity(832, 800))
    engine = ScriptedEngine({})
    checked = bench_turn.check(half, engine, thorough=True)
    assert (checked.fidelity.same, checked.promised.share) == (800, parity.agreement)
    barred = replace(certificate, parity=replace(parity, least_agreement=0.995))
    monkeypatch.setattr(promise, "read_certificate", lambda _: barred)
    with pytest.raises(ParityFailed, match=rf"the bar is 99\.50% .*; fatdeploy verify {half.path}"):
        bench_turn.check(half, engine, thorough=True)
    monkeypatch.setattr(promise, "read_certificate", lambda _: read_certificate(bundle))
    with pytest.raises(BundleError, match=r"parity\.json is the certificate of an fp32 bundle"):
        bench_turn.check(half, engine, thorough=True)


def test_a_decode_that_differs_the_second_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(range(9))
    monkeypatch.setattr(bench_turn, "timed_decode", lambda *_: (Times(1, (1,), 2), [(next(tokens),)]))
    with pytest.raises(ParityFailed, match="the same batch of 8 decoded twice gave two results"):
        bench_turn.measure_turn(replace(a_plan().turn(1, 1), settings=(Setting(8, 1),)))


def a_plan(request: BenchRequest = REQUEST) -> BenchPlan:
    [plan] = plans_for({"tiny": bundle_of(TINY)}, request)
    return plan


def test_an_error_of_the_measuring_process_is_raised_with_its_kind_and_message(tmp_path: Path) -> None:
    turn = replace(a_plan().turn(1, 0), bundle=str(tmp_path / "gone"))
    with pytest.raises(BundleError, match="gone refused: No such file"):
        measured_in_process(turn, lambda _: None)


def test_a_measuring_process_that_ends_without_a_message_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_processes, "MODULE", "fatdeploy.errors")
    with pytest.raises(BenchFailed, match=r"process ended with exit code 0 while it measured .* with 1 thread$"):
        measured_in_process(a_plan().turn(1, 0), lambda _: None)


def test_rounds_alternate_between_bundles_and_threads_and_share_the_repetitions() -> None:
    plans = plans_for({"one": bundle_of(TINY), "two": bundle_of("fat-tiny")}, REQUEST)
    turns = list(turns_of(plans))
    assert [(number, turn.threads) for number, turn in turns] == [(0, 1), (0, 2), (1, 1), (1, 2)] * 4
    assert [turn.repetitions for _, turn in turns[::4]] == [2, 2, 1, 1]
    assert [turn.thorough for _, turn in turns[::4]] == [True, False, False, False]
    assert turns[0][1].settings == (Setting(1, 1), Setting(1, 4), Setting(8, 1), Setting(8, 4))


def test_defaults_are_lowered_to_the_limits_of_a_bundle_with_a_note() -> None:
    bundle = bundle_of(TINY)
    spec = replace(bundle.spec, max_source=16, max_target=20, vocab_size=6)
    small = replace(bundle, manifest=replace(bundle.manifest, spec=spec))
    [plan] = plans_for({"small": small}, replace(REQUEST, defaults=DEFAULTS))
    assert (plan.request.source, plan.request.target, plan.request.beams) == (16, 20, (1, 3))
    assert plan.notes == (
        "small: --source 32 lowered to 16 (its max_source)",
        "small: --target 64 lowered to 20 (its max_target)",
        "small: --beams 1,4 lowered to 1,3 (half its vocabulary)",
    )
    with pytest.raises(ConfigError, match=r"--target must lie in 1…20 for small \(its max_target\), found 64"):
        plans_for({"small": small}, replace(REQUEST, defaults=DEFAULTS - {"target"}))


def test_rows_combine_the_measurements_of_all_rounds() -> None:
    plan = a_plan(replace(REQUEST, batch=(2,), beams=(1,), target=3))
    times = {"encode": 0.001, "steps": [0.004, 0.002, 0.003], "end_to_end": 0.010}
    slow = {"encode": 0.003, "steps": [0.006, 0.004, 0.001], "end_to_end": 0.020}
    turns = [
        {
            "load": load,
            "bandwidth": speed,
            "fidelity": {"same": same, "tokens": 9, "share": same / 9},
            "certified_share": 0.99,
            "settings": [{"peak_bytes": peak, "tokens": 6, "times": [decode]}],
        }
        for load, speed, same, peak, decode in ((0.1, 1e9, 9, 70, times), (0.3, 2e9, 8, 60, slow))
    ]
    [row] = rows_of(plan, 1, turns)
    assert row["phases"]["load"]["p50_ms"] == pytest.approx(200)
    assert row["phases"]["encode"]["p50_ms"] == pytest.approx(2)
    assert row["phases"]["first_token"]["min_ms"] == pytest.approx(4)
    assert row["phases"]["per_token"] == pytest.approx(
        {"n": 4, "min_ms": 1, "p50_ms": 2.5, "p95_ms": 3.85, "p99_ms": 3.97}
    )
    assert row["tokens_per_s"] == pytest.approx(6 / 0.015)
    assert row["positions_ms"] == {"min": [4.0, 2.0, 1.0], "p50": [5.0, 3.0, 2.0]}
    assert (row["peak_bytes"], row["fidelity"]["same"], row["certified_share"]) == (70, 8, 0.99)
    assert row["floor"]["ms"] == pytest.approx(plan.decoder_bytes / 2e9 * 1000)


def test_percentiles_are_between_the_samples() -> None:
    expected = {"n": 101, "min_ms": 0.0, "p50_ms": 50.0, "p95_ms": 95.0, "p99_ms": 99.0}
    assert percentile_summary(np.arange(101.0)) == pytest.approx(expected)


def test_eos_ends_nothing_while_a_decode_is_timed() -> None:
    engine = ScriptedEngine({5: [7, 2, 2], 6: [2, 3, 4]})
    times, tokens = timed_decode(Endless(engine), [np.array([5]), np.array([6])], DecodeOptions(max_new_tokens=3))
    assert tokens == [(7, 2, 2), (2, 3, 4)]
    assert len(times.steps) == 3
    assert engine.released == 1
    assert times.end_to_end >= times.encode + sum(times.steps)


def test_a_small_batch_is_the_beginning_of_a_large_one_without_special_tokens() -> None:
    few, many = random_sources(SPEC, 2, 4), random_sources(SPEC, 40, 4)
    assert [row.tolist() for row in few] == [row.tolist() for row in many[:2]]
    assert set(np.concatenate(many).tolist()) == {3, 4, 5, 6, 7, 8, 9}


@pytest.mark.parametrize("preset", [TINY, "fat-tiny", "at-tiny"])
def test_a_step_reads_the_weights_of_the_decoder_but_not_what_it_looks_up(preset: str) -> None:
    path = bundle_of(preset).file(DECODER)
    graphs = list(graphs_of(onnx.load(path, load_external_data=False).graph))
    tensors = {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
    used = {
        name
        for graph in graphs
        for node in graph.node
        for index, name in enumerate(node.input)
        if not (node.op_type == "Gather" and index == 0)
    }
    places = {}
    for name in used & set(tensors):
        external = {entry.key: entry.value for entry in tensors[name].external_data}
        places[external.get("offset", name)] = int(external.get("length", len(tensors[name].raw_data)))
    assert bytes_a_step_reads(path) == sum(places.values()) > 30_000


@pytest.mark.parametrize("damage", [b"\x3a\x7f", b"\x3f", b"\x3a"])
def test_a_damaged_graph_is_a_bundle_error(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / DECODER).write_bytes(damage)
    with pytest.raises(BundleError, match=r"cannot read .*decoder\.onnx"):
        bytes_a_step_reads(tmp_path / DECODER)


def test_bandwidth_and_memory_are_numbers_of_this_process() -> None:
    assert read_bandwidth(1 << 20, 2) > 1e6
    most = peak_bytes()
    assert most is None or most > 10e6


def test_a_share_below_one_never_looks_like_100_percent() -> None:
    assert [percent(share) for share in (1, 0.99999, 0.5)] == ["100 %", "99.99 %", "50.00 %"]


def test_scales_have_a_few_round_numbers() -> None:
    assert Scale(0.4, 30, 0, 100, log=True).ticks() == pytest.approx([0.5, 1, 2, 5, 10, 20])
    assert Scale(0, 47, 0, 100).ticks() == [0, 10, 20, 30, 40]
    assert Scale(99, 100, 0, 100).ticks() == pytest.approx([99, 99.2, 99.4, 99.6, 99.8, 100])
    assert Scale(1, 100, 0, 200, log=True).at(10) == 100


def test_progress_is_shown_on_a_terminal_unless_quiet() -> None:
    for before, shows in (([], True), (["--quiet"], False)):
        out, shown = on_a_terminal(*before, "bench", str(bundle_of(TINY).path), *QUICK)
        assert "per token" in out
        assert ("measuring" in shown and "100%" in shown) == shows
