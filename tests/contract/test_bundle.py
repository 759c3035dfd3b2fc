"""Bundles: they are read back as written, and any damage is one clear error before anything else reads it."""

import contextlib
import copy
import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fatdeploy import bundle as bundles
from fatdeploy._version import VERSION
from fatdeploy.bundle import Bundle, digest_of, read_bundle, write_manifest
from fatdeploy.errors import BundleError
from fatdeploy.manifest import FORMAT, MANIFEST, PARITY, REQUIRED, FileRecord, Manifest, OutputMatrix, Provenance
from fatdeploy.records import json_from_record
from fatdeploy.spec import ModelSpec, cache_specs

SPEC = ModelSpec(
    vocab_size=97, width=32, max_source=64, max_target=48, pad_id=0, bos_id=1, eos_id=2, state=cache_specs(0, 4, 8)
)
PLAIN = Manifest(
    spec=SPEC,
    target="ort-cpu",
    precision="fp32",
    dialect="ort",
    opset=24,
    versions={"fatdeploy": VERSION, "torch": "2.13.0"},
    source=Provenance("transformer-tiny", "ab" * 32, None),
    onnxruntime=("1.31.0", "1.31.2"),
    settings={"top_k": 16, "attention_layer": None, "threads": [1, 2]},
    histograms={"decoder": {"before": {"MatMul": 30}, "after": {"MatMul": 24}}},
    output_matrix=OutputMatrix(64, "float32", transposed=True),
)
FILES = (*REQUIRED, "engines/sm_87/plan", PARITY)
ROOM = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def drawn_files(folder: Path, *, seed: int = 0) -> Path:
    draw = random.Random(seed)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(draw.randbytes(50 + len(name)))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_manifest(drawn_files(tmp_path / "model"), PLAIN)
    return tmp_path / "model"


def values_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    return values


def sealed(folder: Path, values: dict[str, Any]) -> None:
    """Write an edited manifest with a matching digest, so that only the check of its content can refuse it."""
    (folder / MANIFEST).write_text(json.dumps({**values, "digest": digest_of(values)}))


def refusal(folder: Path, **options: bool) -> str:
    with pytest.raises(BundleError) as caught:
        read_bundle(folder, **options)
    message = str(caught.value)
    assert message.startswith(f"bundle {folder} refused: ")
    assert message.isprintable()
    assert len(message) < 5000
    return message


# What is written comes back.


def test_a_bundle_comes_back_with_its_whole_manifest(folder: Path) -> None:
    bundle = read_bundle(folder)
    assert replace(bundle.manifest, files={}) == PLAIN
    assert bundle.spec == SPEC
    assert bundle.manifest.files == {
        name: FileRecord(50 + len(name), hashlib.sha256((folder / name).read_bytes()).hexdigest()) for name in FILES
    }
    assert bundle.total_bytes == sum(50 + len(name) for name in FILES)
    assert bundle.file("engines/sm_87/plan").read_bytes() == (folder / "engines/sm_87/plan").read_bytes()
    assert bundle == write_manifest(folder, PLAIN)


def test_absent_values_come_back_absent(tmp_path: Path) -> None:
    bare = replace(PLAIN, onnxruntime=None, settings={}, histograms={}, source=Provenance("x", "", "Apache-2.0"))
    bundle = write_manifest(drawn_files(tmp_path), bare)
    assert replace(bundle.manifest, files={}) == bare


def test_the_same_content_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    shuffled = replace(PLAIN, versions=dict(reversed(PLAIN.versions.items())), settings={**PLAIN.settings})
    write_manifest(drawn_files(tmp_path / "again"), shuffled)
    first, again = (folder / MANIFEST).read_bytes(), (tmp_path / "again" / MANIFEST).read_bytes()
    assert first == again
    assert first.endswith(b"}\n")
    assert list(values_of(folder)) == sorted(values_of(folder))
    write_manifest(folder, PLAIN)
    assert (folder / MANIFEST).read_bytes() == first


def test_the_digest_covers_every_file_but_the_certificate(folder: Path) -> None:
    digest = read_bundle(folder).digest
    (folder / PARITY).write_text("on another machine")
    assert write_manifest(folder, PLAIN).digest == digest
    (folder / PARITY).unlink()
    assert write_manifest(folder, PLAIN).digest == digest
    assert write_manifest(folder, replace(PLAIN, opset=23)).digest != digest
    (folder / "weights.bin").write_text("others")
    assert write_manifest(folder, PLAIN).digest != digest


def test_settings_with_numbers_as_keys_are_written_as_json_has_them(folder: Path) -> None:
    bundle = write_manifest(folder, replace(PLAIN, settings={"by_layer": {2: "a", 10: "b"}, "pair": (1, 2)}))
    assert bundle.manifest.settings == {"by_layer": {"2": "a", "10": "b"}, "pair": [1, 2]}


def test_a_bundle_is_found_through_a_link_to_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert read_bundle(str(tmp_path / "link")).path == folder.resolve()


# What cannot be written.


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_a_setting_that_is_not_json_is_refused_before_the_old_manifest_is_touched(folder: Path, value: object) -> None:
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(BundleError, match=r"manifest\.json cannot be written as JSON: .*JSON"):
        write_manifest(folder, replace(PLAIN, settings={"top_k": value}))
    assert (folder / MANIFEST).read_bytes() == before


def test_a_mistyped_manifest_is_noticed_by_its_writer(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json: opset: expected int, found '24'"):
        write_manifest(folder, replace(PLAIN, opset="24"))  # type: ignore[arg-type]


def test_a_folder_without_its_graphs_gets_no_valid_manifest(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(BundleError, match=r"encoder\.onnx: manifest\.json does not list it; decoder\.onnx: manifest"):
        write_manifest(tmp_path, PLAIN)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("weights.bin"), os.mkfifo], ids=["link", "pipe"])
def test_a_link_or_a_pipe_is_not_written_into_a_bundle(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / "tokenizer.json")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a regular file; a bundle contains copies"):
        write_manifest(folder, PLAIN)


# What cannot be read: the folder and the manifest.


def test_missing_folders_files_and_folders_without_a_bundle_have_different_errors(tmp_path: Path) -> None:
    advice = "A bundle is a folder with a manifest.json; write one: fatdeploy export SOURCE --out DIR"
    (tmp_path / "file").write_text("x")
    (tmp_path / "circle").symlink_to("circle")
    for name, reason in (
        ("nowhere", "No such file"),
        ("file", "it is a file"),
        ("circle", "loop"),
        ("n" * 999, "too long"),
        (".", "manifest.json: missing"),
    ):
        message = refusal(tmp_path / name)
        assert reason in message
        # Never advise replacing an unknown folder by force.
        assert message.endswith(advice)


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(BundleError, match="null"):
        read_bundle("a\0b")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "manifest.json cannot be read: Expecting value"),
        (b"{", "manifest.json cannot be read: Expecting property name"),
        (b"\x80\x04K*.", "manifest.json cannot be read: 'utf-8' codec can't decode"),
        (b"[1]", "manifest.json cannot be read: expected an object, found [1]"),
        (b'{"a": NaN}', "manifest.json cannot be read: NaN is not JSON"),
        (b'{"a": 1e999}', "manifest.json cannot be read: Out of range float values"),
        (b'{"a": ' + b"9" * 5000 + b"}", "manifest.json cannot be read: Exceeds the limit"),
        (b'{"a": 1, "b": 2, "b": 3}', "manifest.json cannot be read: b occurs more than once"),
        (b"[" * 100_000, "manifest.json cannot be read: maximum recursion depth"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "manifest.json"),
        (b"{}", f"manifest.json: format: expected {list(FORMAT)}, found None"),
        (b" " * (16 << 20) + b"{}", "manifest.json cannot be read: expected at most 16777216 bytes, found more"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_manifest_that_is_not_a_json_object_is_refused(folder: Path, text: bytes, reason: str) -> None:
    (folder / MANIFEST).write_bytes(text)
    assert reason in refusal(folder)


@pytest.mark.parametrize("form", [None, 1, "1.0", [1], [1, 0, 0], [True, 0], [1.0, 0], [1, -1], {}, [[1], 0]])
def test_a_format_that_is_not_a_pair_of_numbers_is_refused(folder: Path, form: object) -> None:
    sealed(folder, {**values_of(folder), "format": form})
    assert f"manifest.json: format: expected {list(FORMAT)}, found " in refusal(folder)


def test_a_newer_major_is_refused_with_the_version_to_install_whatever_else_it_says(folder: Path) -> None:
    text = json.dumps({"format": [2, 1], "versions": {"fatdeploy": "3.4.0"}, "elsewhere": []})
    (folder / MANIFEST).write_text(text)
    message = refusal(folder)
    assert "format: expected 1.x, found 2.1" in message
    assert message.endswith(f"It needs fatdeploy 3.4.0, this is {VERSION}: pip install -U fatdeploy")
    for versions in (None, {}, {"fatdeploy": 3}):
        (folder / MANIFEST).write_text(json.dumps({"format": [2, 0], "versions": versions}))
        assert "needs a newer fatdeploy" in refusal(folder)


def test_an_unknown_older_major_is_refused_with_advice_to_export_again(folder: Path) -> None:
    sealed(folder, {**values_of(folder), "format": [0, 9]})
    message = refusal(folder)
    assert "format: expected 1.x, found 0.9" in message
    assert message.endswith(f"or export it again: fatdeploy export SOURCE --out {folder} --force")


def test_a_newer_minor_is_read_and_may_have_new_keys_at_the_top_only(folder: Path) -> None:
    values = {**values_of(folder), "format": [FORMAT[0], FORMAT[1] + 2], "invented": {"later": [1]}}
    sealed(folder, values)
    bundle = read_bundle(folder)
    assert replace(bundle.manifest, files={}) == replace(PLAIN, format=(FORMAT[0], FORMAT[1] + 2))
    values["source"]["invented"] = 1
    sealed(folder, values)
    message = refusal(folder)
    assert "manifest.json: source.invented: unknown" in message
    assert message.endswith("pip install -U fatdeploy")
    (folder / MANIFEST).write_text(json.dumps({**values, "opset": 1}))
    assert "Copy the folder again" in refusal(folder)


def test_a_new_key_needs_a_newer_minor(folder: Path) -> None:
    sealed(folder, {**values_of(folder), "invented": 1})
    assert "manifest.json: invented: unknown" in refusal(folder)


def test_an_older_minor_may_lack_fields_that_have_a_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(folder)
    del values["histograms"], values["spec"]["decoding"]
    sealed(folder, values)
    message = refusal(folder)
    assert "histograms: missing" in message
    assert "spec.decoding: missing" in message
    monkeypatch.setattr(bundles, "FORMAT", (FORMAT[0], FORMAT[1] + 1))
    assert replace(read_bundle(folder).manifest, files={}) == replace(PLAIN, histograms={})
    del values["opset"]
    sealed(folder, values)
    assert "manifest.json: opset: missing" in refusal(folder)


def test_all_problems_of_a_manifest_are_reported_at_once(folder: Path) -> None:
    values = values_of(folder)
    del values["precision"]
    values |= {"target": "tpu", "opset": True, "onnxruntime": ["1.31"], "versions": {"torch": 2}}
    values["spec"]["state"][0] |= {"kind": "tape", "start": "memory.keys.0"}
    values["histograms"]["decoder"]["before"]["MatMul"] = 0.5
    values["output_matrix"]["offset"] = -1
    values["files"]["weights.bin"]["size"] = "64"
    (folder / MANIFEST).write_text(json.dumps(values))
    message = refusal(folder)
    for reason in (
        "expected digest ",
        "precision: missing",
        "target: expected one of ['ort-cpu', 'ort-cuda', 'onnx', 'tensorrt', 'tensorrt-rtx'], found 'tpu'",
        "opset: expected int, found True",
        "onnxruntime: expected a list of 2, found ['1.31']",
        "versions.torch: expected str, found 2",
        "spec.state.0.kind: expected one of ['cache', 'ring', 'recurrent'], found 'tape'",
        "spec.state.0.start: expected one of ['zero', 'source'], found 'memory.keys.0'",
        "histograms.decoder.before.MatMul: expected int, found 0.5",
        "output_matrix: offset must be 0 or more, found -1",
        "files.weights.bin.size: expected int, found '64'",
    ):
        assert f"manifest.json: {reason}" in message
    assert "Copy the folder again, or export it again: fatdeploy export SOURCE --out" in message


def test_a_thousand_reasons_are_counted_instead_of_listed(folder: Path) -> None:
    sealed(folder, {**values_of(folder), "versions": dict.fromkeys(map(str, range(1000)))})
    assert "; and 980 more. Copy" in refusal(folder)


def test_a_manifest_that_was_edited_by_hand_is_noticed(folder: Path) -> None:
    values = values_of(folder)
    values["spec"]["vocab_size"] += 1
    (folder / MANIFEST).write_text(json.dumps(values))
    assert "found " + values["digest"] + ": it was changed after it was written" in refusal(folder)
    del values["digest"]
    (folder / MANIFEST).write_text(json.dumps(values))
    assert "found None: it was changed after it was written" in refusal(folder, check_hashes=False)


# What cannot be read: the files.


@pytest.mark.parametrize("name", FILES)
def test_every_listed_file_must_be_there_whole_and_unchanged(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    assert f"{name}: expected {len(whole)} bytes, found {len(whole) - 1}. Copy the folder again" in refusal(folder)
    (folder / name).write_bytes(whole + b"\0")
    assert f"{name}: expected {len(whole)} bytes, found {len(whole) + 1}" in refusal(folder, check_hashes=False)
    changed = bytes([whole[0] ^ 1]) + whole[1:]
    (folder / name).write_bytes(changed)
    damaged, expected = (hashlib.sha256(data).hexdigest() for data in (changed, whole))
    assert f"{name}: expected sha256 {expected}, found {damaged}" in refusal(folder)
    assert read_bundle(folder, check_hashes=False).manifest.files[name].sha256 == expected
    (folder / name).unlink()
    assert f"{name}: missing" in refusal(folder)
    (folder / name).mkdir()
    assert f"{name}: expected a regular file, found something else" in refusal(folder)


def test_swapped_graphs_are_both_named(folder: Path) -> None:
    (folder / "encoder.onnx").rename(folder / "aside")
    (folder / "decoder.onnx").rename(folder / "encoder.onnx")
    (folder / "aside").rename(folder / "decoder.onnx")
    message = refusal(folder)
    assert "encoder.onnx: expected sha256" in message
    assert "decoder.onnx: expected sha256" in message


def test_wrong_files_of_every_kind_are_listed_together(folder: Path) -> None:
    (folder / "encoder.onnx").unlink()
    (folder / "decoder.onnx").write_text("short")
    values = values_of(folder)
    del values["files"]["weights.bin"]
    values["files"]["../other"] = values["files"][PARITY]
    sealed(folder, values)
    message = refusal(folder)
    for reason in (
        "weights.bin: manifest.json does not list it",
        "encoder.onnx: missing",
        "decoder.onnx: expected 62 bytes, found 5",
        "../other: expected a plain relative path inside the folder",
    ):
        assert reason in message


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "/etc/hostname",
        "//server/share",
        "../weights.bin",
        "engines/../../weights.bin",
        "engines/..",
        "./weights.bin",
        "engines//sm_87/plan",
        "weights.bin/",
        "..\\weights.bin",
        "engines\\plan",
        "\\\\server\\share",
        "C:weights.bin",
        "C:\\weights.bin",
        "c:/weights.bin",
        "weights.bin:stream",
        "weights.bin\0",
        "weights\n.bin",
        "weights\ud800.bin",
        "weights\u202e.bin",
        "CON|",
        "*",
        "\x7f",
    ],
)
def test_a_name_that_may_lead_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "weights.bin").write_bytes((folder / "weights.bin").read_bytes())
    values = values_of(folder)
    values["files"][name] = values["files"]["weights.bin"]
    sealed(folder, values)
    assert "expected a plain relative path inside the folder" in refusal(folder)
    assert "expected a plain relative path inside the folder" in refusal(folder, check_hashes=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (MANIFEST, "manifest.json: manifest.json cannot list itself"),
        ("x" * 99_999, "cannot be read: File name too long"),
        ("y/" * 3000 + "x", ": missing"),
        ("weights.bin/x", "weights.bin/x: cannot be read: Not a directory"),
        ("...", "...: missing"),
    ],
    ids=lambda value: value[:20],
)
def test_a_name_that_is_not_a_file_in_the_folder_is_refused(folder: Path, name: str, reason: str) -> None:
    values = values_of(folder)
    values["files"][name] = values["files"]["weights.bin"]
    sealed(folder, values)
    assert reason in refusal(folder)


def test_a_link_that_leaves_the_folder_is_refused_even_to_the_right_bytes(folder: Path) -> None:
    (folder / "weights.bin").rename(folder.parent / "weights.bin")
    (folder / "weights.bin").symlink_to("../weights.bin")
    assert "weights.bin: expected a file inside the folder, found a link that leaves it" in refusal(folder)
    (folder / "weights.bin").unlink()
    (folder / "engines").rename(folder.parent / "engines")
    (folder / "engines").symlink_to(folder.parent / "engines")
    assert "engines/sm_87/plan: expected a file inside the folder, found a link that leaves it" in refusal(folder)


def test_a_manifest_that_is_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / MANIFEST).rename(folder.parent / "elsewhere")
    (folder / MANIFEST).symlink_to(folder.parent / "elsewhere")
    assert "manifest.json: expected a file inside the folder, found a link that leaves it" in refusal(folder)


def test_a_link_inside_the_folder_is_a_file_and_one_in_a_circle_is_not(folder: Path) -> None:
    (folder / "weights.bin").rename(folder / "real")
    (folder / "weights.bin").symlink_to("real")
    assert read_bundle(folder).file("weights.bin").read_bytes() == (folder / "real").read_bytes()
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").symlink_to("weights.bin")
    assert "weights.bin: cannot be read: " in refusal(folder)


@pytest.mark.parametrize("name", [MANIFEST, "weights.bin"])
def test_a_pipe_is_refused_and_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name}: expected a regular file, found something else" in refusal(folder)


def test_a_file_that_may_not_be_opened_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(bundles, "_sha256", forbidden)
    assert "weights.bin: cannot be read: Permission denied" in refusal(folder)


def test_an_unlisted_file_is_neither_opened_nor_returned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "tokenizer.json")  # opening it would wait for ever
    opened = []
    whole = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args: opened.append(path.name) or whole(path, *args))
    bundle = read_bundle(folder)
    assert sorted(opened) == sorted([MANIFEST, *(Path(name).name for name in FILES)])
    for name in ("tokenizer.json", MANIFEST, "../model/weights.bin", ""):
        with pytest.raises(BundleError, match=r"does not list .*, only decoder\.onnx, encoder\.onnx, engines/sm_87/pl"):
            bundle.file(name)


# Fuzz.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value inside a JSON value, itself excluded."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, entry in inside for path in ((*place, key), *places(entry, (*place, key)))]


def edit(values: dict[str, Any], data: st.DataObject) -> None:
    """Drop, replace, or add to something, anywhere."""
    *path, key = data.draw(st.sampled_from(places(values)))
    parent: Any = values
    for name in path:
        parent = parent[name]
    match data.draw(st.sampled_from(["drop", "replace", "add", "borrow"])):
        case "drop":
            del parent[key]
        case "replace":
            parent[key] = data.draw(JSON)
        case "add" if isinstance(parent, dict):
            parent[data.draw(st.text(max_size=8) | st.sampled_from(["../x", "/etc/hostname", PARITY]))] = parent[key]
        case "add":
            parent.append(data.draw(JSON))
        case _:
            parent[key] = copy.deepcopy(data.draw(st.sampled_from([*values.values()])))


def read_or_refused(folder: Path) -> Bundle | None:
    try:
        return read_bundle(folder)
    except BundleError:
        refusal(folder)
        return None


def check_survivor(folder: Path) -> None:
    """Check that a bundle is either refused or valid: its manifest is typed, and its files are checked."""
    bundle = read_or_refused(folder)
    if bundle is None:
        return
    values = values_of(folder)
    assert bundle.digest == values["digest"] == digest_of(values)
    assert {name: values[name] for name in json_from_record(PLAIN)} == json_from_record(bundle.manifest)
    for name, record in bundle.manifest.files.items():
        assert bundle.file(name).resolve().is_relative_to(folder.resolve())
        assert hashlib.sha256(bundle.file(name).read_bytes()).hexdigest() == record.sha256
    assert set(REQUIRED) <= bundle.manifest.files.keys()


@ROOM
@given(data=st.data())
def test_a_flipped_byte_or_a_lost_end_of_any_file_is_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / data.draw(st.sampled_from([MANIFEST, *FILES]))
    whole, untouched = path.read_bytes(), read_bundle(folder)
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytes([whole[place] ^ data.draw(st.integers(1, 255))])
    damaged = whole[:place] + (flipped + whole[place + 1 :] if data.draw(st.booleans()) else b"")
    path.write_bytes(damaged)
    try:
        bundle = read_or_refused(folder)
    finally:
        path.write_bytes(whole)
    if bundle is not None:
        # Some bytes of a manifest carry no meaning: the kind of a blank, and the last newline.
        assert path.name == MANIFEST
        assert json.loads(damaged) == json.loads(whole)
        assert bundle == untouched


@ROOM
@given(data=st.data())
def test_an_edited_manifest_is_refused_or_as_good_as_any(folder: Path, data: st.DataObject) -> None:
    whole, values = (folder / MANIFEST).read_bytes(), values_of(folder)
    for _ in range(data.draw(st.integers(1, 3))):
        edit(values, data)
    try:
        (folder / MANIFEST).write_text(json.dumps(values))
        check_survivor(folder)
        with contextlib.suppress(ValueError):  # NaN and infinity have no digest
            sealed(folder, values)
        check_survivor(folder)
    finally:
        (folder / MANIFEST).write_bytes(whole)


@ROOM
@given(value=JSON)
def test_any_json_at_all_is_an_error_and_never_a_crash(folder: Path, value: Any) -> None:
    if isinstance(value, dict):
        value |= {"format": list(FORMAT)}
    (folder / MANIFEST).write_text(json.dumps(value))
    assert "refused" in refusal(folder)


def test_a_legal_edit_with_its_digest_survives(folder: Path) -> None:
    sealed(folder, {**values_of(folder), "opset": 25})
    check_survivor(folder)
    assert read_bundle(folder).manifest.opset == 25
