"""Choices of an export: alignments, shorter limits, best tokens, licence, tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.cli import main
from fatdeploy.errors import CheckpointError, ConfigError, SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.checkpoint import save_checkpoint
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.manifest import DECODER, TOKENIZER
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want
from fatdeploy.runtimes.engines.trt.engine import TrtEngine
from fatdeploy.targets import Dialect
from tests.support.aligned import HYBRID, aligned, model_with
from tests.support.choices import tiny
from tests.support.devices.cpu import CpuDevice, with_plans
from tests.support.engines.output_rows import check_output_rows

ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1, "max_source": 40, "max_target": 48}
DIALECTS: list[Dialect] = ["ort", "standard"]
SOURCE = np.array([[5, 6, 7, 8, 9], [20, 21, 0, 0, 0]])
MASK = SOURCE != 0


def alignments(engine: Engine[Any], calls: list[list[list[int]]]) -> list[np.ndarray]:
    """Return the weights of a call on BOS and of later calls with two rows per source."""
    state = engine.encode(SOURCE, MASK, Capacity(2, 16))
    arrays = [np.array(engine.step(np.array([[1], [1]]), state, Want.LOGITS).attention)]
    engine.reorder(state, np.array([0, 0, 1, 1]))
    return [*arrays, *(np.array(engine.step(np.array(call), state, Want.HIDDEN).attention) for call in calls)]


@pytest.mark.parametrize(
    ("dialect", "layer", "planned"), [("ort", 0, False), ("standard", 1, False), ("standard", 1, True)]
)
def test_a_layers_attention_is_the_references_and_never_on_padding(
    dialect: Dialect, layer: int, planned: bool, tmp_path: Path
) -> None:
    engine: Engine[Any]
    engine, reference = aligned("plain", dialect, layer)
    if planned:
        bundle = with_plans(engine._bundle, tmp_path / "plans")
        engine = TrtEngine(bundle, CpuDevice(bundle))
    calls = [[[3, 4], [5, 6], [7, 8], [9, 10]], [[50], [51], [52], [53]]]
    weights, expected = alignments(engine, calls), alignments(reference, calls)
    assert [array.shape for array in weights] == [(2, 2, 1, 5), (4, 2, 2, 5), (4, 2, 1, 5)]
    for array, expected_array in zip(weights, expected, strict=True):
        np.testing.assert_allclose(array, expected_array, rtol=0, atol=1e-5)
        np.testing.assert_allclose(array.sum(-1), 1, rtol=0, atol=1e-6)
        assert not array[len(array) // 2 :, ..., 2:].any()
        assert (array[: len(array) // 2] > 0).all()
    # Heads, positions and the two rows of a source attend to different places.
    assert np.abs(weights[1][0, 0] - weights[1][0, 1]).max() > 0.01
    assert np.abs(weights[1][0, :, 0] - weights[1][0, :, 1]).max() > 0.01
    assert np.abs(weights[1][0] - weights[1][1]).max() > 0.01


@pytest.mark.parametrize(("dialect", "layer", "transposed"), [("ort", 0, False), ("standard", 1, True)])
def test_an_output_matrix_that_is_not_an_embedding_is_found_as_the_graph_reads_it(
    dialect: Dialect, layer: int, transposed: bool
) -> None:
    engine, reference = aligned("plain", dialect, layer)
    check_output_rows(engine)
    ids = np.array([60, 2, 17])
    np.testing.assert_array_equal(engine.output_rows(ids), reference.output_rows(ids))
    manifest = engine._bundle.manifest
    assert manifest.output_matrix.transposed == transposed


@pytest.mark.parametrize("dialect", DIALECTS)
def test_attention_is_zero_where_the_gate_is_closed_whether_all_rows_skip_or_some(dialect: Dialect) -> None:
    engine, reference = aligned("hybrid", dialect, 0)
    rare, frequent, own = 60, 7, 20
    calls = [[[rare]] * 4, [[rare], [frequent], [rare], [own]], [[frequent, rare]] * 4]
    weights, expected = alignments(engine, calls), alignments(reference, calls)
    for array, expected_array in zip(weights, expected, strict=True):
        np.testing.assert_allclose(array, expected_array, rtol=0, atol=1e-5)
    totals = [np.round(array.sum(-1)[:, 0], 5).tolist() for array in weights]  # [R, t] of the first head
    assert totals == [[[1]] * 2, [[0]] * 4, [[0], [1], [0], [1]], [[1, 0]] * 4]


def same_tokens(engine: Engine[Any], reference: Engine[Any], longest: int) -> list[Hypothesis]:
    draw = np.random.default_rng(2)
    sources = [draw.integers(3, 64, length).tolist() for length in (1, 2, 7, longest, longest - 1)]
    hypotheses = decode(engine, sources)
    assert hypotheses == decode(reference, sources)
    assert len({hypothesis.tokens for hypothesis in hypotheses}) == len(sources)
    return hypotheses


@pytest.mark.parametrize("dialect", DIALECTS)
def test_copying_goes_together_with_the_attention_of_another_layer(dialect: Dialect) -> None:
    engine, reference = aligned("hybrid", dialect, 0)
    same_tokens(engine, reference, longest=12)
    # Logits are logarithms of a mixture.
    assert engine.output_rows(np.array([3])) is None


def test_copying_in_a_hybrid_model_is_exact(tmp_path: Path) -> None:
    model = tiny({**HYBRID, **ONE_LAYER})
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name="hybrid"))
    hypotheses = same_tokens(OrtEngine(bundle), EagerEngine(model), longest=40)
    assert all(hypothesis.tokens for hypothesis in hypotheses)


@pytest.mark.parametrize(
    ("choices", "reasons"),
    [
        (Choices(attention_layer=2), "attention must be a decoder layer in 0…1, found 2"),
        (Choices(attention_layer=-1), "attention must be a decoder layer in 0…1, found -1"),
        (Choices(max_source=13), "max_source must lie in 1…12, found 13"),
        (Choices(max_target=0), "max_target must lie in 1…16, found 0"),
        (
            Choices(max_source=99, max_target=17, top_k=65, attention_layer=7),
            "max_source must lie in 1…12, found 99; max_target must lie in 1…16, found 17; "
            "top_k must lie in 1…64, found 65; attention must be a decoder layer in 0…1, found 7",
        ),
    ],
)
def test_everything_the_model_lacks_is_refused_at_once(choices: Choices, reasons: str) -> None:
    with pytest.raises(ConfigError, match=f"^the model cannot be exported with these options: {reasons}$"):
        exportable_model(model_with("plain"), choices)


def test_the_command_lists_unavailable_choices_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    arguments = ["--max-source", "257", "--max-target", "300", "--attention", "2", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["export", "fat-tiny", *arguments])
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: the model cannot be exported with these options: max_source must lie in 1…256, found 257; "
        "max_target must lie in 1…256, found 300; attention must be a decoder layer in 0…1, found 2\n"
    )
    assert not list(tmp_path.iterdir())


def words_of(folder: Path, count: int) -> Path:
    """Write a tokenizer with this many words."""
    words = {f"word{index}": index for index in range(count)}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(folder / "words.json"))
    return folder / "words.json"


def test_a_tokenizer_that_a_device_could_not_use_is_refused_before_tracing(tmp_path: Path) -> None:
    model = tiny(ONE_LAYER)
    stages: list[str] = []
    (tmp_path / "broken.json").write_text('{"no": "tokenizer"}')
    for path, message in (
        (tmp_path / "broken.json", r"broken\.json is not in the format of the tokenizers package"),
        (words_of(tmp_path, 65), r"words\.json has 65 tokens, the model 64: it belongs to another model"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_bundle(model, tmp_path / "out", origin=Origin(name="x", tokenizer=path), stage=stages.append)
    assert not stages
    assert not (tmp_path / "out").exists()


def chosen_on_the_command_line(folder: Path) -> tuple[ReferenceModel, Bundle, dict[str, Any]]:
    """Export a checkpoint with every choice but the attention; return its model, the bundle and the output."""
    model = tiny({**ONE_LAYER, "max_source": 20, "max_target": 24})
    words_of(folder, 40)
    save_checkpoint(model, folder / "mine", tokenizer=folder / "words.json")
    limits = ["--max-source", "8", "--max-target", "10", "--top-k", "3"]
    arguments = ["export", str(folder / "mine"), *limits, "--licence", "MIT", "--target", "onnx", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--out", str(folder / "bundle")])
    assert result.exit_code == 0, result.stderr
    return model, read_bundle(folder / "bundle"), json.loads(result.stdout)


def test_a_checkpoint_is_exported_with_shorter_limits_its_tokenizer_and_its_licence(tmp_path: Path) -> None:
    model, bundle, printed = chosen_on_the_command_line(tmp_path)
    spec, source = bundle.spec, bundle.manifest.source
    assert (spec.max_source, spec.max_target, spec.top_k) == (8, 10, 3)
    assert (source.name, source.licence) == ("mine", "MIT")
    assert bundle.file(TOKENIZER).read_bytes() == (tmp_path / "words.json").read_bytes()
    assert (printed["bundle"], printed["bytes"]) == (str(tmp_path / "bundle"), bundle.total_bytes)
    assert (printed["parity"]["rows"], printed["parity"]["tokens"]) == (13, 130)
    assert (printed["agreement"]["tokens"], printed["agreement"]["ties"]) == (130, 0)
    check_limits(OrtEngine(bundle), model)
    shapes = {
        tensor.name: [dim.dim_param or dim.dim_value for dim in tensor.type.tensor_type.shape.dim]
        for tensor in onnx.load(bundle.file(DECODER), load_external_data=False).graph.input
    }
    assert shapes["past.keys.0"] == ["rows", 2, 10, 16]


def check_limits(engine: OrtEngine, model: ReferenceModel) -> None:
    hypotheses = same_tokens(
        engine, EagerEngine(exportable_model(model, Choices(max_source=8, max_target=10))), longest=8
    )
    assert {len(hypothesis.tokens) for hypothesis in hypotheses if hypothesis.finish == "length"} == {10}
    assert max(len(hypothesis.tokens) for hypothesis in hypotheses if hypothesis.finish == "eos") < 10
    with pytest.raises(SpecMismatch, match="source 0: has 9 tokens, more than max_source = 8"):
        decode(engine, [list(range(3, 12))])
    with pytest.raises(ConfigError, match=r"max_new_tokens must lie in 1…10 \(the model's max_target\), found 11"):
        decode(engine, [[5]], DecodeOptions(max_new_tokens=11))
    state = engine.encode(np.array([[5]]), np.ones((1, 1), bool), Capacity(1, 10))
    assert engine.step(np.array([[1]]), state, Want.TOPK).top_ids.shape == (1, 1, 3)


def test_the_length_head_is_cut_to_the_targets_that_are_left(tmp_path: Path) -> None:
    model = tiny({**ONE_LAYER, "max_source": 16, "max_target": 24}, base="transformer-nat")
    exportable = exportable_model(model, Choices(max_target=6))
    bundle = write_bundle(exportable, tmp_path / "bundle", origin=Origin(name="nat"))
    engine, reference = OrtEngine(bundle), EagerEngine(exportable)
    source = np.random.default_rng(3).integers(3, 64, (4, 9))
    cut, whole = (
        backend.length_log_probs(backend.encode(source, np.ones_like(source, bool), Capacity(1, 6)))
        for backend in (engine, EagerEngine(model))
    )
    assert (cut.shape, whole.shape) == ((4, 6), (4, 24))
    np.testing.assert_allclose(cut, whole[:, :6], rtol=0, atol=1e-5)
    hypotheses = same_tokens(engine, reference, longest=16)
    assert max(len(hypothesis.tokens) for hypothesis in hypotheses) <= 6
