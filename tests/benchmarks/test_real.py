"""Real models: packages are checked and read, folders are made once, turns and targets say what was measured."""

import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.harness import noise
from benchmarks.harness.noise import NoiseProbe, fixed_work
from benchmarks.readme.real_tables import real_export_lines, real_speed_table
from benchmarks.real import fetch
from benchmarks.real.answers import Answer
from benchmarks.real.fetch import Product, make_product
from benchmarks.real.folders import packages, whisper
from benchmarks.real.folders.ctranslate2_file import read_weights
from benchmarks.real.folders.packages import Package, fetched, member
from benchmarks.real.folders.sentences import sentences_of
from benchmarks.real.run import is_clear, row_of, turns_of
from benchmarks.real.targets import export_targets, speed_targets
from benchmarks.real.turns import RealTurn
from fatdeploy.errors import BackendUnavailable, DataError

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # sha256 of b"hello"
PACKAGE = Package("deb", "greeting", "1.0", "greeting_1.0_all.deb", HELLO)


def downloads(content: bytes | None) -> Callable[[Package, Path], None]:
    """Return a download that brings these bytes; without any, it must not be called."""

    def download(package: Package, place: Path) -> None:
        assert content is not None, "fetched although it is there"
        (place / package.file).write_bytes(content)

    return download


def tar_of(files: dict[str, bytes], kind: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=kind) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def test_a_package_is_fetched_once_and_kept_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_download", downloads(b"hello"))
    path = fetched(PACKAGE, tmp_path / "packages")
    assert path.read_bytes() == b"hello"
    monkeypatch.setattr(packages, "_download", downloads(None))
    assert fetched(PACKAGE, tmp_path / "packages") == path
    assert [file.name for file in path.parent.iterdir()] == [PACKAGE.file]


def test_a_package_of_another_hash_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_download", downloads(b"other"))
    with pytest.raises(DataError, match=f"greeting_1.0_all.deb: expected sha256 {HELLO}, found d9298a10d1b0735837dc4"):
        fetched(PACKAGE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_apt_a_debian_package_is_asked_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(
        BackendUnavailable, match=r"apt-get is not available here; put greeting_1.0_all.deb into .* by hand"
    ):
        fetched(PACKAGE, tmp_path)


def test_a_failed_fetch_says_what_the_tool_said_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sh", "-c", "echo first >&2; echo 'E: no such version' >&2; exit 100"]
    monkeypatch.setattr(packages, "_apt_command", lambda package: command)
    monkeypatch.setattr(packages.shutil, "which", lambda name: name)
    with pytest.raises(
        DataError, match=r"greeting 1.0 could not be fetched \(E: no such version\); run apt-get update"
    ):
        fetched(PACKAGE, tmp_path)


def test_pip_compares_the_hash_before_it_reads_an_archive(tmp_path: Path) -> None:
    package = Package("sdist", "greeting", "1.0", "greeting-1.0.tar.gz", HELLO)
    command = packages._pip_command(package, tmp_path)
    assert (tmp_path / "requirements.txt").read_text() == f"greeting==1.0 --hash=sha256:{HELLO}\n"
    assert {"--no-deps", "--no-binary", "--require-hashes"} <= set(command)


def test_files_are_read_from_every_kind_of_archive(tmp_path: Path) -> None:
    files = {"a/b.txt": b"content"}
    (tmp_path / "some.tar.gz").write_bytes(tar_of(files))
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("a/b.txt", b"content")
    parts = {"debian-binary": b"2.0", "data.tar.xz": tar_of(files, "w:xz")}
    heads = {name: f"{name:16}{'0':12}{'0':6}{'0':6}{'100644':8}{len(data):<10}`\n" for name, data in parts.items()}
    deb = b"".join(heads[name].encode() + data + b"\n" * (len(data) % 2) for name, data in parts.items())
    (tmp_path / "some.deb").write_bytes(b"!<arch>\n" + deb)
    for name in ("some.tar.gz", "some.whl", "some.deb"):
        assert member(tmp_path / name, "a/b.txt") == b"content", name
    (tmp_path / "empty.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(DataError, match="a Debian package without data"):
        member(tmp_path / "empty.deb", "a/b.txt")


def test_a_product_is_made_once_and_again_when_it_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_download", downloads(b"hello"))
    product = Product("folder", (PACKAGE,), lambda paths, folder: write_copy(paths[PACKAGE], folder / "copy"))
    assert [make_product(product, tmp_path) for _ in range(2)] == [True, False]
    (tmp_path / "folder" / "copy").write_bytes(b"changed")
    assert [make_product(product, tmp_path) for _ in range(2)] == [True, False]
    assert (tmp_path / "folder" / "copy").read_bytes() == b"hello"


def write_copy(path: Path, copy: Path) -> None:
    copy.write_bytes(path.read_bytes())


def test_a_product_that_fails_leaves_the_old_one_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(paths: dict[Package, Path], folder: Path) -> None:
        (folder / "half").touch()
        raise DataError("cannot be made")

    monkeypatch.setattr(packages, "_download", downloads(b"hello"))
    (tmp_path / "bad").mkdir()
    good = Product("good.txt", (PACKAGE,), lambda paths, file: write_copy(paths[PACKAGE], file), is_folder=False)
    monkeypatch.setattr(fetch, "PRODUCTS", (Product("bad", (PACKAGE,), fail), good))
    result = CliRunner().invoke(fetch.main, ["--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "bad: cannot be made" in result.output
    assert "good.txt: written" in result.output
    assert (list((tmp_path / "bad").iterdir()), (tmp_path / "good.txt").read_bytes()) == ([], b"hello")


def text_bytes(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def variable(name: str, array: np.ndarray, kind: int) -> bytes:
    head = struct.pack(f"<B{array.ndim}IBI", array.ndim, *array.shape, kind, array.nbytes)
    return text_bytes(name) + head + array.tobytes()


def test_a_file_of_ctranslate2_gives_floats_scalars_and_aliases() -> None:
    matrix = np.array([[1, -2], [3, 4]], np.int8)
    scale = np.array([2, 4], np.float32)
    variables = [variable("x", matrix, 1), variable("x_scale", scale, 0), variable("heads", np.array(8, np.int16), 2)]
    data = struct.pack("<I", 6) + text_bytes("spec") + struct.pack("<II", 7, 3) + b"".join(variables)
    weights = read_weights(data + struct.pack("<I", 1) + text_bytes("y") + text_bytes("x"))
    assert weights["x"].tolist() == weights["y"].tolist() == [[0.5, -1.0], [0.75, 1.0]]
    assert int(weights["heads"]) == 8
    with pytest.raises(DataError, match=r"model.bin has version 5, expected 6"):
        read_weights(struct.pack("<I", 5))


def test_sentences_are_of_some_length_chinese_and_different() -> None:
    foreign, long, good = "This is not Chinese", "长" * 60, "这是一个 \n 有八个字的句子"
    text = "。".join(["太短", good, foreign, long, good, "没有句号的一句话在这里"])
    assert sentences_of(text) == ["这是一个 有八个字的句子。"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("encoder.blocks.0.attn.query.weight", "model.encoder.layers.0.self_attn.q_proj.weight"),
        ("decoder.blocks.3.cross_attn.out.bias", "model.decoder.layers.3.encoder_attn.out_proj.bias"),
        ("decoder.blocks.3.cross_attn_ln.weight", "model.decoder.layers.3.encoder_attn_layer_norm.weight"),
        ("decoder.blocks.1.attn_ln.bias", "model.decoder.layers.1.self_attn_layer_norm.bias"),
        ("encoder.blocks.2.mlp.0.weight", "model.encoder.layers.2.fc1.weight"),
        ("encoder.blocks.2.mlp_ln.weight", "model.encoder.layers.2.final_layer_norm.weight"),
        ("encoder.ln_post.weight", "model.encoder.layer_norm.weight"),
        ("decoder.ln.bias", "model.decoder.layer_norm.bias"),
        ("decoder.positional_embedding", "model.decoder.embed_positions.weight"),
        ("encoder.conv1.weight", "model.encoder.conv1.weight"),
    ],
)
def test_tensors_of_whisper_get_the_names_of_hugging_face(theirs: str, ours: str) -> None:
    assert whisper.renamed(theirs) == ours


def test_a_turn_is_repeated_while_the_machine_is_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the first attempt, after it, and after each further one.
    loads = iter([1.0, 1.5, 1.3, 1.0, 1.0, 1.05])
    monkeypatch.setattr(noise, "fixed_work", lambda: {"arithmetic": next(loads)})
    results = iter("abc")
    probe = NoiseProbe()
    turn = probe.measured(lambda: next(results))
    assert turn == {"result": "c", "slowdown": 1.3, "attempts": 3}
    quiet = probe.measured(lambda: "d")
    assert quiet == {"result": "d", "slowdown": 1.05, "attempts": 1}
    assert probe.facts([turn, quiet]) == {
        "limit": 1.1,
        "noisy_share": 0.5,
        "repeated": 2,
        "largest_slowdown": 1.3,
    }


def test_fixed_work_takes_time_of_both_kinds() -> None:
    seconds = fixed_work()
    assert seconds.keys() == {"arithmetic", "memory"}
    assert all(0 < taken < 60 for taken in seconds.values())


def test_every_setting_of_the_peer_is_tried() -> None:
    alone, bulk = (turns_of(part, 2) for part in ("alone", "bulk"))
    assert [(turn.engine, turn.workers, turn.threads, turn.batch) for turn in alone] == [
        ("fatdeploy", 1, 2, 0),
        ("ctranslate2", 1, 2, 1),
        ("ctranslate2", 2, 1, 1),
    ]
    assert {(turn.workers, turn.threads, turn.batch) for turn in bulk[1:]} == {
        (workers, 3 - workers, batch) for workers in (1, 2) for batch in (16, 32, 64)
    }


@pytest.mark.parametrize(("margin", "clear"), [(3e-3, True), (1.9e-3, False)])
def test_only_sentences_that_noise_cannot_change_are_measured(margin: float, clear: bool) -> None:
    assert is_clear(Answer([5], margins=[1.0, margin], largest=20.0)) is clear


def test_rows_targets_and_tables_say_what_was_measured() -> None:
    ours, peer = ({"load": 0.5, "seconds": [s, s, 9.0], "tokens": 100} for s in (0.1, 0.25))
    seconds = {"fatdeploy": ours, "ctranslate2": peer}
    turns = [turn for part in ("alone", "bulk") for turn in turns_of(part, 2)]
    rows = [row_of(turn, [{"result": seconds[turn.engine]}]) for turn in turns]
    assert (rows[0]["sentence"]["p50_ms"], rows[3]["tokens_per_second"]["p50"]) == (
        pytest.approx(100),
        pytest.approx(1000),
    )
    assert [(target["found"], target["met"]) for target in speed_targets(rows)] == [(pytest.approx(2.5), True)] * 2
    assert [target["met"] for target in speed_targets(rows[:1])] == [None, None]
    table = real_speed_table({**facts(), "results": rows})
    assert "| fatdeploy, ONNX Runtime, 2 threads | 100 |  | 2.50 | `generate`'s, checked |" in table
    assert "| CTranslate2, 2 workers of 1 thread, batches of 64 |  | 400 | 1.00 | `generate`'s, checked |" in table
    assert "2 of 2 targets are met" in table


def test_an_export_is_judged_by_its_seconds() -> None:
    exports = [{"precision": "fp32", "seconds": 100.0}, {"precision": "int8", "seconds": 241.0}]
    assert [target["met"] for target in export_targets(exports)] == [True, False, False]
    assert [target["met"] for target in export_targets(exports[1:])] == [None, False, None]
    lines = real_export_lines({**facts(), "calibration": 100, "probes": 200, "export": exports})
    assert "| export in int8 with its proof, s | 241.00, NOT MET: at most 240 |" in lines


def facts() -> dict[str, Any]:
    versions = dict.fromkeys(("onnxruntime", "ctranslate2", "torch"), "1.0")
    machine = {"cpu": "some CPU", "cores": 2, "memory_bytes": 8e9}
    noise_facts = {"noisy_share": 0.25, "limit": 1.1}
    sizes = {"sentences": 200, "source_tokens": 18.6, "target_tokens": 20.4}
    return {"model": "m", "date": "2026-01-01", "machine": machine, "versions": versions, "noise": noise_facts, **sizes}


def test_a_turn_can_travel_as_json() -> None:
    turn = RealTurn(part="bulk", engine="ctranslate2", threads=1, workers=2, batch=32)
    assert RealTurn(**json.loads(json.dumps(turn.__dict__))) == turn
