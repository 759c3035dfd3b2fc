"""``fatdeploy inspect``: what it shows is what the bundle's files contain."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.export.graph_files import graphs_of
from fatdeploy.manifest import DECODER, ENCODER, PARITY, WEIGHTS
from fatdeploy.targets import Dialect
from tests.support.bundles import bundle_of

EVERY: list[tuple[str, Dialect]] = [("transformer-tiny", "ort"), ("fat-tiny", "ort"), ("transformer-tiny", "standard")]
every_bundle = pytest.mark.parametrize(("preset", "dialect"), EVERY)


def shown(bundle: Bundle) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["inspect", str(bundle.path), "--json"])
    assert result.exit_code == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def lines_of(bundle: Bundle) -> list[str]:
    result = CliRunner().invoke(main, ["inspect", str(bundle.path)])
    assert result.exit_code == 0, result.stderr
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def graph_of(bundle: Bundle, part: str) -> onnx.GraphProto:
    return onnx.load(bundle.file(part), load_external_data=False).graph


def described(tensors: Any) -> list[dict[str, Any]]:
    """Return inputs or outputs of a graph as the command shows them."""
    return [
        {
            "name": tensor.name,
            "dtype": helper.tensor_dtype_to_np_dtype(tensor.type.tensor_type.elem_type).name,
            "shape": [dim.dim_param or dim.dim_value for dim in tensor.type.tensor_type.shape.dim],
        }
        for tensor in tensors
    ]


@every_bundle
def test_inputs_and_outputs_are_those_of_the_files(preset: str, dialect: Dialect) -> None:
    bundle = bundle_of(preset, dialect)
    lines, graphs = lines_of(bundle), shown(bundle)["graphs"]
    for part in (ENCODER, DECODER):
        graph = graph_of(bundle, part)
        assert graphs[part]["inputs"] == described(graph.input)
        assert graphs[part]["outputs"] == described(graph.output)
        section = lines[lines.index(part) :]
        for kind, tensors in (("in", graph.input), ("out", graph.output)):
            for tensor in described(tensors):
                assert f"{kind} {tensor['name']} {tensor['dtype']} [{', '.join(map(str, tensor['shape']))}]" in section


@every_bundle
def test_histograms_count_the_ops_of_the_files_branches_included(preset: str, dialect: Dialect) -> None:
    bundle = bundle_of(preset, dialect)
    lines, graphs = lines_of(bundle), shown(bundle)["graphs"]
    for part in (ENCODER, DECODER):
        counts = Counter(node.op_type for graph in graphs_of(graph_of(bundle, part)) for node in graph.node)
        assert graphs[part]["ops"]["simplified"] == counts
        # Where the seams leave nothing to simplify, both have the same ops.
        assert sum(graphs[part]["ops"]["traced"].values()) >= counts.total()
        [line] = [line for line in lines[lines.index(part) :] if line.startswith("simplified: ")][:1]
        op, count = counts.most_common(1)[0]
        assert line.startswith(f"simplified: {counts.total()} ops: {count} ")
        assert f"{count} {op}" in line


@every_bundle
def test_the_weights_of_the_parts_are_all_that_the_files_hold(preset: str, dialect: Dialect) -> None:
    bundle = bundle_of(preset, dialect)
    report = shown(bundle)
    groups = report["weights"].values()
    tensors = [
        tensor
        for part in (ENCODER, DECODER)
        for graph in graphs_of(graph_of(bundle, part))
        for tensor in graph.initializer
    ]
    stored = [(tensor, {entry.key: entry.value for entry in tensor.external_data}) for tensor in tensors]
    everything = {place["offset"]: int(place["length"]) for _, place in stored if place}
    floats = [(tensor, place) for tensor, place in stored if tensor.data_type == TensorProto.FLOAT and tensor.dims]
    places = {place["offset"]: int(place["length"]) for _, place in floats if place}
    inside = {tensor.raw_data for tensor, place in floats if not place}
    assert sum(group["tensors"] for group in groups) == len(places) + len(inside)
    assert sum(group["bytes"] for group in groups) == sum(places.values()) + sum(map(len, inside))
    assert report["parameters"] == sum(group["parameters"] for group in groups)
    assert sum(group["bytes"] for group in groups) == 4 * report["parameters"]
    # The file holds the large ones and, before each, less than 64 bytes of alignment.
    assert 0 <= bundle.file(WEIGHTS).stat().st_size - sum(everything.values()) < 64 * len(everything)


def test_parts_are_the_models_modules_with_all_layers_as_one_part() -> None:
    report = shown(bundle_of("transformer-tiny"))
    attention = report["weights"]["decoder.layers.*.attention.qkv"]
    assert attention == {"tensors": 4, "parameters": 2 * (32 * 96 + 96), "bytes": 8 * (32 * 96 + 96)}
    embedding = report["weights"]["source_embedding"]
    assert embedding == {"tensors": 1, "parameters": 64 * 32, "bytes": 64 * 32 * 4}
    line = next(
        line for line in lines_of(bundle_of("transformer-tiny")) if line.startswith("decoder.layers.*.attention.q")
    )
    assert line == "decoder.layers.*.attention.qkv 4 6,336 0.03"


@every_bundle
def test_origin_and_proof_are_shown(preset: str, dialect: Dialect) -> None:
    bundle = bundle_of(preset, dialect)
    report, lines = shown(bundle), lines_of(bundle)
    certificate = json.loads(bundle.file(PARITY).read_text())
    assert report["certificate"] == certificate
    assert report["source"] == {"name": preset, "sha256": bundle.manifest.source.sha256, "licence": None}
    assert (report["digest"], report["bytes"]) == (bundle.digest, bundle.total_bytes)
    assert report["versions"]["onnx"] == onnx.__version__
    target = {"ort": "ort-cpu", "standard": "onnx"}[dialect]
    machine = certificate["machine"]["cpu"] or "an unknown CPU"
    for line in (
        f"target {target} ({dialect} dialect, opset 24)",
        f"size {bundle.total_bytes / 1e6:.1f} MB in 6 files",
        f"digest {bundle.digest}",
        "vocabulary 64 (pad 0, bos 1, eos 2)",
        "longest source 256, target 256",
        f"source {preset}",
        f"weights sha256 {bundle.manifest.source.sha256}",
        "licence not given",
        f"verified 832 tokens of 13 rows on {machine}, onnxruntime CPU",
    ):
        assert line in lines


def test_the_same_weights_have_the_same_hash_in_both_dialects_and_others_another() -> None:
    hashes = [shown(bundle_of(preset, dialect))["source"]["sha256"] for preset, dialect in EVERY]
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize("name", [ENCODER, WEIGHTS, PARITY])
def test_a_damaged_bundle_is_refused(tmp_path: Path, name: str) -> None:
    shutil.copytree(bundle_of("fat-tiny").path, tmp_path / "bundle")
    data = bytearray((tmp_path / "bundle" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bundle" / name).write_bytes(data)
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "bundle"), "--json"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"refused: {name}: expected sha256" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"parity": 3}'])
def test_a_file_that_is_not_a_certificate_is_refused(tmp_path: Path, content: str) -> None:
    shutil.copytree(bundle_of("fat-tiny").path, tmp_path / "bundle")
    (tmp_path / "bundle" / PARITY).write_text(content)
    write_manifest(tmp_path / "bundle", bundle_of("fat-tiny").manifest)
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "bundle")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "parity.json cannot be read: " in result.stderr
    assert result.stderr.endswith("; export the bundle again\n")


def test_a_bundle_without_a_certificate_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    shutil.copytree(bundle_of("fat-tiny").path, tmp_path / "bundle")
    (tmp_path / "bundle" / PARITY).unlink()
    bundle = write_manifest(tmp_path / "bundle", bundle_of("fat-tiny").manifest)
    assert shown(bundle)["certificate"] is None
    assert not [line for line in lines_of(bundle) if line.startswith("verified")]
