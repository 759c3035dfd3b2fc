"""Exported graphs on ONNX Runtime: the tokens of the reference, in place, for every preset and both dialects."""

import gc
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fatdeploy.bundle import write_manifest
from fatdeploy.errors import BundleError, ExportFailed, SpecMismatch
from fatdeploy.export.graph_files import graphs_of
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.tracing.trace import traced_encoder
from fatdeploy.manifest import DECODER, ENCODER, WEIGHTS
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort import host_memory
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from tests.support.bundles import EXPORTED, bundle_of, model_of
from tests.support.choices import tiny
from tests.support.engines.kinds import Kind, engine_of

LENGTHS = (1, 2, 7, 31, 256)
EVERY = [(f"{preset}-tiny", dialect) for preset in EXPORTED for dialect in ("ort", "standard")]
AUTOREGRESSIVE = [preset for preset in EXPORTED if preset != "transformer-nat"]
ENGINES = [*EVERY, *((f"{preset}-tiny", "trt") for preset in EXPORTED)]


def sources(vocabulary: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, vocabulary, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize(("preset", "kind"), ENGINES)
def test_every_preset_gives_the_references_tokens_in_a_batch_alone_and_again(preset: str, kind: Kind) -> None:
    engine, reference = engine_of(preset, kind), EagerEngine(model_of(preset))
    rows, options = sources(engine.spec.vocab_size), DecodeOptions(max_new_tokens=48)
    expected = decode(reference, rows, options)
    assert decode(engine, rows, options) == expected
    assert [decode(engine, [row], options)[0] for row in rows] == expected
    assert decode(engine, rows, options) == expected
    # A model that knows its source by the start of its state alone may say the same about two of them.
    assert len(set(expected)) >= len(expected) - 1


@pytest.mark.parametrize("kind", ["ort", "trt"])
@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
def test_a_row_runs_to_max_target(preset: str, kind: Kind) -> None:
    engine, reference = engine_of(f"{preset}-tiny", kind), EagerEngine(model_of(f"{preset}-tiny"))
    row = [sources(64)[2]]
    assert decode(engine, row) == decode(reference, row)


@pytest.mark.parametrize(("preset", "kind"), [choice for choice in ENGINES if "nat" not in choice[0]])
def test_logits_hidden_and_best_tokens_stay_within_the_bound_after_growing_and_leaving(preset: str, kind: Kind) -> None:
    engines = engine_of(preset, kind), EagerEngine(model_of(preset))
    draw = np.random.default_rng(1)
    source = draw.integers(3, 64, (3, 6))
    mask = np.arange(6) < np.array([6, 2, 4])[:, None]
    states = [engine.encode(source, mask, Capacity(2, 20)) for engine in engines]
    calls = [
        (3, Want.LOGITS, None),
        (1, Want.TOPK, [0, 0, 1, 1, 2, 2]),
        (1, Want.LOGITS, [3, 2, 4, 5]),
        (2, Want.HIDDEN, None),
    ]
    for steps, want, rows in calls:
        if rows is not None:
            for engine, state in zip(engines, states, strict=True):
                engine.reorder(state, np.array(rows))
        tokens = draw.integers(3, 64, (states[0].rows, steps))
        output, expected = (engine.step(tokens, state, want) for engine, state in zip(engines, states, strict=True))
        for name in ("hidden", "logits", "top_log_probs", "top_ids"):
            array, expected_array = getattr(output, name), getattr(expected, name)
            assert (array is None) == (expected_array is None)
            if expected_array is not None:
                bound = 1e-5 * max(1.0, float(np.abs(expected_array).max()))
                np.testing.assert_allclose(array, expected_array, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
def test_state_stays_in_the_same_buffers_while_decoding(preset: str) -> None:
    engine = OrtEngine(bundle_of(f"{preset}-tiny"))
    state = engine.encode(np.array([[5, 6, 7]]), np.ones((1, 3), bool), Capacity(1, 64))
    places = [array.ctypes.data for arrays in state.arrays for array in arrays]
    for _ in range(20):
        engine.step(np.array([[9]]), state, Want.LOGITS)
    assert [array.ctypes.data for arrays in state.arrays for array in arrays] == places
    assert all(array.any() for array in state.arrays[0])
    assert len(state.bound) == 1


@pytest.mark.parametrize("kind", ["ort", "trt"])
def test_outputs_that_are_not_requested_are_none(kind: Kind) -> None:
    engine = engine_of("transformer-tiny", kind)
    state = engine.encode(np.array([[5, 6, 7]]), np.ones((1, 3), bool), Capacity(1, 8))
    out = engine.step(np.array([[1]]), state, Want.HIDDEN)
    assert out.logits is None
    assert out.top_ids is None
    assert out.hidden.shape == (1, 1, 32)


def test_the_tied_embedding_is_stored_once() -> None:
    bundle, model = bundle_of("transformer-tiny"), model_of("transformer-tiny")
    parameters = sum(parameter.numel() for parameter in model.parameters()) * 4
    positions = 256 * 32 * 4  # one sinusoidal table for both stacks
    assert bundle.file(WEIGHTS).stat().st_size <= parameters + positions + 64 * 100


@pytest.mark.parametrize(("preset", "dialect"), EVERY)
def test_graphs_carry_no_names_of_this_machine_and_no_weights(preset: str, dialect: str) -> None:
    bundle = bundle_of(preset, dialect)
    for name in (ENCODER, DECODER):
        content = bundle.file(name).read_bytes()
        assert b".py" not in content
        assert str(Path(__file__).parents[3]).encode() not in content
        graph = onnx.load(bundle.file(name), load_external_data=False).graph
        inside = [
            numpy_helper.to_array(tensor).nbytes
            for part in graphs_of(graph)
            for tensor in part.initializer
            if not tensor.external_data
        ]
        assert max(inside, default=0) < 1024


def test_attention_is_one_op_and_a_branch_is_not_computed() -> None:
    histogram = bundle_of("transformer-tiny").manifest.histograms[DECODER]["simplified"]
    assert (histogram["GroupQueryAttention"], histogram["MultiHeadAttention"]) == (2, 2)
    # Lengths of rows are computed once, not in each layer; queries, keys and values stay packed.
    assert (histogram["ReduceMax"], histogram["Sub"]) == (1, 2)
    assert "Split" not in histogram
    assert histogram["If"] == 2
    assert histogram["FusedMatMul"] == 1
    assert "Transpose" not in histogram
    assert bundle_of("fat-tiny").manifest.histograms[DECODER]["simplified"]["If"] == 4
    assert "If" not in bundle_of("fat-tiny", "standard").manifest.histograms[DECODER]["simplified"]


def test_the_same_model_gives_the_same_bundle_byte_for_byte(tmp_path: Path) -> None:
    first = bundle_of("transformer-tiny")
    again = write_bundle(model_of("transformer-tiny"), tmp_path / "again", origin=Origin(name="transformer-tiny"))
    for name in first.manifest.files:
        assert first.file(name).read_bytes() == again.file(name).read_bytes()
    assert first.digest == again.digest


def test_swapped_graphs_are_refused(tmp_path: Path) -> None:
    bundle = bundle_of("transformer-tiny")
    shutil.copytree(bundle.path, tmp_path / "swapped")
    (tmp_path / "swapped" / ENCODER).write_bytes(bundle.file(DECODER).read_bytes())
    swapped = write_manifest(tmp_path / "swapped", bundle.manifest)
    with pytest.raises(BundleError, match=r"encoder\.onnx does not fit the bundle's contract: input source is missing"):
        OrtEngine(swapped)


@pytest.mark.parametrize("kind", ["ort", "trt"])
def test_bad_input_is_refused_before_anything_runs(kind: Kind) -> None:
    engine = engine_of("fat-tiny", kind)
    with pytest.raises(SpecMismatch, match="source ids must lie in"):
        engine.encode(np.array([[99]]), np.ones((1, 1), bool), Capacity(1, 4))
    state = engine.encode(np.array([[5], [6]]), np.ones((2, 1), bool), Capacity(1, 4))
    with pytest.raises(SpecMismatch, match="past max_target = 4"):
        engine.step(np.ones((2, 5), np.int64), state, Want.LOGITS)
    with pytest.raises(SpecMismatch, match="3 rows of tokens, the state has 2"):
        engine.step(np.ones((3, 1), np.int64), state, Want.LOGITS)
    with pytest.raises(SpecMismatch, match="no length head"):
        engine.length_log_probs(state)
    with pytest.raises(SpecMismatch, match="the state has rows 0…1"):
        engine.reorder(state, np.array([2]))


@pytest.mark.parametrize("changes", [{"copy": True}, {"decoder_attention": "additive", "relative": "table"}], ids=str)
def test_the_copy_mechanism_and_additive_attention_are_exported_exactly(changes: dict, tmp_path: Path) -> None:
    model = tiny({**changes, "encoder_layers": 1, "decoder_layers": 1, "max_source": 40, "max_target": 48})
    engine = OrtEngine(write_bundle(model, tmp_path / "bundle", origin=Origin(name="choice")))
    rows = [row[:40] for row in sources(64)]
    assert decode(engine, rows) == decode(EagerEngine(model), rows)


def test_a_graph_that_torch_cannot_trace_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny({})
    monkeypatch.setattr(model, "encode", lambda source, mask: len(source.tolist()) and undefined)  # type: ignore[name-defined] # noqa: F821
    with pytest.raises(ExportFailed, match="torch could not trace the model"):
        traced_encoder(exportable_model(model), "ort", tmp_path / ENCODER)
    # The garbage collector is off while torch traces, and must be on again.
    assert gc.isenabled()


@pytest.mark.parametrize("preset", ["transformer-tiny", "fat-tiny", "transformer-nat-tiny"])
def test_many_sources_are_encoded_in_parts_that_give_the_same(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OrtEngine(bundle_of(preset))
    draw = np.random.default_rng(3)
    source = draw.integers(3, engine.spec.vocab_size, (11, 9))
    mask = np.arange(9) < draw.integers(1, 10, (11, 1))
    whole = engine.encode(source, mask, Capacity(1, 4)).sources
    for positions in (40, 9, 1):
        monkeypatch.setattr(host_memory, "ENCODED_TOGETHER", positions)
        parts = engine.encode(source, mask, Capacity(1, 4)).sources
        assert parts.keys() == whole.keys()
        for name, array in parts.items():
            assert array.flags.c_contiguous
            np.testing.assert_allclose(array, whole[name], atol=1e-5, err_msg=name)
