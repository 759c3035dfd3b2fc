"""A miss is reported with its stage, row, step and module, and the export leaves nothing on the disk."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from torch import Tensor

from fatdeploy.errors import ParityFailed
from fatdeploy.export import pipeline
from fatdeploy.export.graph_files import read_structure, tensor_data
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.proof import first_difference as bisect
from fatdeploy.export.tracing import dialect_ort
from fatdeploy.manifest import DECODER, ENCODER
from tests.support.bundles import bundle_of
from tests.support.choices import tiny

SIZES = {"max_source": 12, "max_target": 16}


def miss(folder: Path) -> str:
    """Export a model that must miss; return the message, and check that no files stay."""
    with pytest.raises(ParityFailed) as caught:
        write_bundle(tiny(SIZES), folder / "bundle", origin=Origin(name="wrong"))
    assert not list(folder.iterdir())
    return str(caught.value)


def scale_weights(graph: Path, module: str, factor: float) -> None:
    """Change the matrix of a module of a graph, in the file that stores it."""
    proto = read_structure(graph).graph
    node = next(node for node in proto.node if node.name.startswith(f"{module}/") and node.op_type == "MatMul")
    tensor = next(weight for weight in proto.initializer if weight.name in node.input)
    place = {entry.key: entry.value for entry in tensor.external_data}
    data = np.frombuffer(tensor_data(tensor, graph.parent), np.float32) * np.float32(factor)
    assert tensor.data_location == onnx.TensorProto.EXTERNAL
    with (graph.parent / place["location"]).open("r+b") as file:
        file.seek(int(place.get("offset", 0)))
        file.write(data.tobytes())


def after(function: Callable[..., Any], spoil: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that spoils its result, which its last path argument names."""

    def spoiled(*arguments: Any) -> Any:
        result = function(*arguments)
        spoil(next(argument for argument in reversed(arguments) if isinstance(argument, Path)))
        return result

    return spoiled


def test_an_error_in_a_seam_of_a_dialect_is_found_in_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = dialect_ort.OrtSeams.attend_cached, []

    def wrong(*arguments: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        mixed, state = right(*arguments)
        calls.append(1)
        return (mixed * 1.001 if len(calls) == 2 else mixed), state

    monkeypatch.setattr(dialect_ort.OrtSeams, "attend_cached", wrong)
    message = miss(tmp_path)
    assert len(calls) == 2
    assert re.match(r"probe 0: it begins at torch → traced, row 0, step \d+: ", message)
    assert re.search(
        r"first tensor to differ is \S+ of decoder\.layers\.1\.attention\.out \(by .*\), in step \d+$", message
    )


def test_a_simplification_that_changes_a_weight_is_found_in_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "decoder.layers.1.ffn.out"
    spoil = lambda path: scale_weights(path, module, 1.01) if path.name == DECODER else None  # noqa: E731
    monkeypatch.setattr(pipeline, "simplified", after(pipeline.simplified, spoil))
    message = miss(tmp_path)
    assert re.match(r"probe 0: it begins at traced → simplified, row 0, step \d+: ", message)
    assert re.search(rf"first tensor to differ is \S+ of {re.escape(module)} \(by .*\), in step 0$", message)


@pytest.mark.parametrize(
    ("part", "module", "where"),
    [
        (DECODER, "decoder.layers.1.cross.q", "in step 0"),
        (ENCODER, "encoder.layers.0.attention.qkv", "in the encoder"),
    ],
)
def test_weights_damaged_on_their_way_to_the_disk_are_found_in_their_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, module: str, where: str
) -> None:
    spoil = lambda folder: scale_weights(folder / part, module, 1.01)  # noqa: E731
    monkeypatch.setattr(pipeline, "write_graphs", after(pipeline.write_graphs, spoil))
    message = miss(tmp_path)
    assert re.match(r"probe 0: it begins at simplified → engine, row 0, step \d+: ", message)
    assert re.search(rf"first tensor to differ is \S+ of {re.escape(module)} \(by .*\), {where}$", message)


def test_a_difference_that_shows_only_in_single_outputs_is_found_value_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = list("abcdefgh")

    def values(stage: bisect.Stage, part: str, feeds: dict, outputs: list[str]) -> dict[str, np.ndarray]:
        return {name: np.array([1.0 + (len(outputs) == 1 and name >= "f")]) for name in outputs}

    monkeypatch.setattr(bisect, "_values", values)
    monkeypatch.setattr(bisect, "_modules_of_values", lambda *_: {name: f"module.{name}" for name in names})
    expected = {name: np.array([1.0]) for name in names}
    differences = [
        bisect._first_difference(bisect.Stage("engine", bundle_of("fat-tiny"), optimised), DECODER, {}, expected)
        for optimised in (True, False)
    ]
    assert differences == ["f of module.f (by 1.0e+00 of its largest value)", None]
