"""Real bundles, damaged as a disk, a network or a stranger may: refused in one line, never half-loaded."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fatdeploy
from fatdeploy.bundle import digest_of, read_bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.errors import BundleError, FatdeployError
from fatdeploy.manifest import DECODER, ENCODER, MANIFEST, PARITY, PROBES, WEIGHTS, Manifest
from fatdeploy.runtimes.proof.probes import read_probes, write_probes
from tests.support.bundles import bundle_of

TINY = "transformer-tiny"
FILES = (ENCODER, DECODER, WEIGHTS, PARITY, PROBES)
SHORT = fatdeploy.DecodeOptions(max_new_tokens=4)
Damage = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(bundle_of(TINY).path, tmp_path / "bundle")
    return tmp_path / "bundle"


def command(name: str, folder: Path) -> Result:
    return CliRunner().invoke(main, [name, str(folder), *(["--ids", "5 6"] if name == "run" else [])])


def refusal(folder: Path, *commands: str) -> str:
    """Return the one line with which all commands refuse a folder, and ``load`` too if ``run`` is among them."""
    lines = set()
    for name in commands or ("verify", "run", "inspect"):
        result = command(name, folder)
        assert isinstance(result.exception, SystemExit), result.exception
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        lines.add(result.stderr)
    if "run" in (commands or ("run",)):
        with pytest.raises(BundleError) as caught:
            fatdeploy.load(folder)
        lines.add(f"Error: {' '.join(str(caught.value).split())}\n")
    [line] = lines
    return line.rstrip("\n")


def changed_graph(path: Path, change: Callable[[onnx.GraphProto], object]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString())


# What the manifest's sizes and hashes catch.


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_empty_missing_or_another_models_is_named(folder: Path, name: str) -> None:
    file, whole = folder / name, (folder / name).read_bytes()
    other = bundle_of("fat-tiny").file(name).read_bytes()
    file.write_bytes(whole[:-1])
    assert f"refused: {name}: expected {len(whole)} bytes, found {len(whole) - 1}. Copy" in refusal(folder)
    file.write_bytes(b"")
    assert f"refused: {name}: expected {len(whole)} bytes, found 0. Copy" in refusal(folder)
    file.unlink()
    assert f"refused: {name}: missing. Copy" in refusal(folder)
    file.write_bytes(other)
    assert f"refused: {name}: expected " in refusal(folder)
    file.write_bytes(whole)
    assert command("verify", folder).exit_code == 0


def test_all_damage_is_reported_at_once(folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink()
    assert refusal(folder).count(": missing") == len(FILES)


@given(st.sampled_from((*FILES, MANIFEST)), st.integers(min_value=0), st.integers(0, 7))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_bit_of_any_file_is_noticed(folder: Path, name: str, place: int, bit: int) -> None:
    whole = (folder / name).read_bytes()
    data = bytearray(whole)
    data[place % len(data)] ^= 1 << bit
    (folder / name).write_bytes(data)
    try:
        with pytest.raises(BundleError, match=f"refused: .*{name}"):
            fatdeploy.load(folder)
    finally:
        (folder / name).write_bytes(whole)


# What only a reader of the manifest can refuse: it was rewritten, and its digest is correct.


def sealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / MANIFEST).read_bytes())
    change(values)
    (folder / MANIFEST).write_text(json.dumps({**values, "digest": digest_of(values)}))


def listed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda values: values["files"].update({name: values["files"][WEIGHTS]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda values: values.update(format=[2, 0]),
            "manifest.json: format: expected 1.x, found 2.0. It needs fatdeploy",
        ),
        (listed("../weights.bin"), " refused: ../weights.bin: expected a plain relative path inside the folder"),
        (listed("/etc/hostname"), " refused: /etc/hostname: expected a plain relative path inside the folder"),
        (lambda values: values["files"].pop(DECODER), "decoder.onnx: manifest.json does not list it"),
        (lambda values: values["spec"].update(vocab_size="64"), "vocab_size: expected int, found '64'"),
        (lambda values: values["spec"].update(silent_ids=[64]), "spec: silent_ids must lie in 0…63, found 64"),
        (lambda values: values["spec"].update(silent_ids=[-1]), "spec: silent_ids must lie in 0…63, found -1"),
        (lambda values: values["spec"].update(source_vocab_size=0), "source_vocab_size must be 1 or more, found 0"),
        (lambda values: values["spec"].update(source_vocab_size=-8), "source_vocab_size must be 1 or more, found -8"),
        (lambda values: values["spec"].update(eos_id=64), "spec: eos_id must lie in 0…63, found 64"),
    ],
)
def test_a_manifest_that_leaves_the_folder_or_has_another_format_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    sealed(folder, change)
    assert reason in refusal(folder).replace('"', "'")


# What only the engine can refuse: sizes and hashes are correct.


def swapped(folder: Path) -> None:
    encoder, decoder = (folder / ENCODER).read_bytes(), (folder / DECODER).read_bytes()
    (folder / ENCODER).write_bytes(decoder)
    (folder / DECODER).write_bytes(encoder)


def in_graph(name: str, change: Callable[[onnx.GraphProto], object]) -> Damage:
    return lambda folder: changed_graph(folder / name, change)


def renamed_input(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.input[:] = ["ids" if name == "source" else name for name in node.input]
    graph.input[0].name = "ids"


def read_through(graph: onnx.GraphProto, op: str, *more: str, **attributes: Any) -> None:
    """Let a graph read its first input through one more op."""
    first = graph.input[0].name
    for node in graph.node:
        node.input[:] = ["through" if name == first else name for name in node.input]
    graph.node.insert(0, onnx.helper.make_node(op, [first, *more], ["through"], **attributes))


def source_of_int32(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    read_through(graph, "Cast", to=onnx.TensorProto.INT64)


def far_ids(graph: onnx.GraphProto) -> None:
    graph.initializer.append(onnx.helper.make_tensor("far", onnx.TensorProto.INT64, [], [1 << 30]))
    read_through(graph, "Add", "far")


def misspelt_name(folder: Path) -> None:
    # Any byte of the same length leaves the message whole; onnxruntime itself does not mind.
    data = (folder / ENCODER).read_bytes()
    (folder / ENCODER).write_bytes(data.replace(b"source_mask", b"source_mas\xff"))


def weights_in(location: str) -> Callable[[onnx.GraphProto], None]:
    def move(graph: onnx.GraphProto) -> None:
        tensor = next(initializer for initializer in graph.initializer if initializer.external_data)
        next(entry for entry in tensor.external_data if entry.key == "location").value = location

    return move


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (swapped, "encoder.onnx does not fit the bundle's contract: input source is missing; "),
        (in_graph(ENCODER, renamed_input), "input source is missing; input ids is not in the contract"),
        (
            in_graph(ENCODER, lambda graph: graph.input[0].type.tensor_type.shape.dim[0].__init__(dim_value=2)),
            "source must be an input, int64 [-1, -1], found an input, int64 [2, -1]",
        ),
        (
            in_graph(ENCODER, source_of_int32),
            "source must be an input, int64 [-1, -1], found an input, int32 [-1, -1]",
        ),
        (in_graph(DECODER, lambda graph: graph.output.pop()), "contract: output present.values.1 is missing"),
        (lambda folder: (folder / DECODER).write_bytes(b"\xff" * 5000), "decoder.onnx failed:Protobuf parsing failed"),
        (lambda folder: (folder / ENCODER).write_bytes(b""), "encoder.onnx failed:No graph was found"),
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4096]), "out of bounds"),
        (
            misspelt_name,
            "encoder.onnx does not fit the bundle's contract: it has a name that is not UTF-8: 'utf-8' codec",
        ),
        (in_graph(ENCODER, weights_in("../x")), "External data path escapes model directory"),
        (in_graph(DECODER, weights_in("/etc/hostname")), "Absolute path not allowed for external data"),
        (in_graph(DECODER, weights_in(MANIFEST)), "out of bounds"),
    ],
)
def test_graphs_and_weights_that_do_not_fit_are_refused_when_they_are_opened(
    folder: Path, damage: Damage, reason: str
) -> None:
    # A graph that reads outside its folder would find intact weights there.
    shutil.copyfile(folder / WEIGHTS, folder.parent / "x")
    damage(folder)
    write_manifest(folder, bundle_of(TINY).manifest)
    assert reason in refusal(folder, "verify", "run")


def with_spec(**changes: Any) -> Manifest:
    manifest = bundle_of(TINY).manifest
    return replace(manifest, spec=replace(manifest.spec, **changes))


def test_a_contract_of_another_model_does_not_fit_the_graphs(folder: Path) -> None:
    write_manifest(folder, with_spec(vocab_size=65, top_k=8))
    assert (
        "logits must be an output, float32 [-1, -1, 65], found an output, float32 [-1, -1, 64]; "
        "top_log_probs must be an output, float32 [-1, -1, 8], found an output, float32 [-1, -1, 16]"
    ) in refusal(folder, "verify", "run")


@pytest.mark.parametrize("name", [ENCODER, DECODER])
def test_a_graph_that_opens_but_cannot_run_is_a_bundle_error(folder: Path, name: str) -> None:
    # An index past the end of a table is noticed only when it is used.
    changed_graph(folder / name, far_ids)
    write_manifest(folder, bundle_of(TINY).manifest)
    model = fatdeploy.load(folder)
    with pytest.raises(BundleError, match=rf"cannot run .*{name}: .*out of .*bounds.*: fatdeploy verify") as caught:
        model.generate([[5, 6]])
    assert "\n" not in str(caught.value)
    assert command("run", folder).exit_code == command("verify", folder).exit_code == 1


# What only verify can notice: the bundle runs, with wrong results.


def other_weights(folder: Path) -> None:
    data = np.fromfile(folder / WEIGHTS, np.float32)
    (data * np.float32(1.01)).tofile(folder / WEIGHTS)


def other_probes(folder: Path) -> None:
    shutil.copyfile(bundle_of("fat-tiny").file(PROBES), folder / PROBES)


def foreign_probes(folder: Path) -> None:
    probe = read_probes(folder / PROBES)[0]
    write_probes(folder / PROBES, [replace(probe, source=probe.source + 64)])


def ragged_probes(folder: Path) -> None:
    probe = read_probes(folder / PROBES)[1]
    write_probes(folder / PROBES, [replace(probe, bounds=probe.bounds[:2])])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (other_weights, "Error: probe 0, row 0, step "),
        (other_probes, "Error: probe 0, row 0, step 0: the reference says token"),
        (foreign_probes, "Error: source refused: source ids must lie in 0…63, found"),
        (ragged_probes, "probe 0 has arrays of shapes [(3, 256), (3, 256), (3, 48), (2,), (3,)] for tokens (3, 48)"),
        (lambda folder: (folder / PROBES).unlink(), "its manifest.json does not list probes.npz, only decoder.onnx"),
    ],
)
def test_verify_catches_a_bundle_that_runs_with_wrong_results(folder: Path, damage: Damage, reason: str) -> None:
    damage(folder)
    write_manifest(folder, bundle_of(TINY).manifest)
    assert reason in refusal(folder, "verify").replace('"', "'")
    assert command("run", folder).exit_code == 0


@given(st.integers(min_value=0), st.integers(0, 255))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_probes_with_any_changed_byte_are_read_or_refused(folder: Path, place: int, byte: int) -> None:
    data = bytearray(bundle_of(TINY).file(PROBES).read_bytes())
    # Names, headers and the archive's directory, where a byte has a meaning, are a small part of the file.
    marks = [at for at in range(len(data)) if data[at : at + 2] == b"PK" or data[at : at + 5] == b"NUMPY"]
    data[min(marks[place % len(marks)] + place // len(marks) % 130, len(data) - 1)] = byte
    (folder / PROBES).write_bytes(data)
    try:
        assert len(read_probes(folder / PROBES)) >= 1
    except BundleError as error:
        assert "cannot read" in str(error)  # noqa: PT017 - either is right


# What onnxruntime reads when hashes are not checked.


@pytest.mark.parametrize("name", [ENCODER, DECODER])
@given(st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_graph_with_any_bytes_works_or_raises_a_fatdeploy_error(
    folder: Path, name: str, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(bundle_of(TINY).file(name).read_bytes())
    for place, byte in changes:
        data[place % len(data)] = byte
    (folder / name).write_bytes(data)
    try:
        with fatdeploy.load(folder, threads=1, spinning=False, check_hashes=False) as model:
            results = model.generate([[5, 6, 7], [8, 9]], SHORT)
        assert [len(result.tokens) <= 4 for result in results] == [True, True]
    except FatdeployError as error:
        assert name in str(error)  # noqa: PT017 - either is right
    finally:
        shutil.copyfile(bundle_of(TINY).file(name), folder / name)


def test_damaging_copies_leaves_the_original_bundle_unchanged() -> None:
    assert read_bundle(bundle_of(TINY).path).digest == bundle_of(TINY).digest
