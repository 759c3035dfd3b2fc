"""Models with the published choices as bundles: both dialects, int8, half precision, rows and padding."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ParityFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want
from fatdeploy.runtimes.proof.verify import verify
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS, bundle_of, half_of, model_of
from tests.support.choices import name_of, tiny
from tests.support.engines.equalities import sources_of, tokens_of
from tests.support.quantized import quantized_of

DIALECTS: list[Dialect] = ["ort", "standard"]
FAT, FAST = "fat-published-tiny", "fast-published-tiny"
SMALL = {"encoder_layers": 1, "decoder_layers": 1, "max_source": 12, "max_target": 16}
# The linear state, through a branch; a softmax, which is one op; copying; rows that start from a recurrent encoder.
SKIPPING: dict[str, Any] = {
    "encoder_attention": "gru",
    "decoder_attention": "linear",
    "decoder_layers": 2,
    "fc_softmax": "softmax",
    "copy": True,
}
STATELESS: dict[str, Any] = {"fc_softmax": "softmax", "hybrid_skips": "cross", "cross_wiring": "matched"}
RECURRENT: dict[str, Any] = {
    "fc_softmax": "tanh_bounded",
    "decoder_attention": "gru",
    "hybrid": False,
    "hybrid_skips": "cross",
    "encoder_attention": "lstm",
}
PERFORMER: dict[str, Any] = {"decoder_attention": "linear", "features": "performer", "norm": "post"}
# Exports take seconds, so most of these tests are slow.
PRESETS: list[Any] = [
    (FAT, "ort"),
    (FAST, "standard"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((FAT, "standard"), (FAST, "ort"))),
]
DISTANCES: dict[str, Any] = {"relative_each_layer": True, "relative_self": False, "relative_window": 3}
PARALLEL: dict[str, Any] = {"relative": "matrix", "attention_relu": True}
EXPORTED: list[Any] = [
    *(
        pytest.param(preset, changes, dialect, marks=pytest.mark.slow)
        for preset, changes, dialects in (
            ("fat-published", SKIPPING, DIALECTS),
            ("fat-published", STATELESS, DIALECTS),
            ("fat-published", RECURRENT, DIALECTS),
            ("fat-published", PERFORMER, DIALECTS),
            ("fast-published", DISTANCES, DIALECTS),
            ("transformer-nat", PARALLEL, DIALECTS),
        )
        for dialect in dialects
    ),
]


def exported(tmp_path: Path, preset: str, changes: dict[str, Any], dialect: Dialect) -> tuple[OrtEngine, EagerEngine]:
    model = tiny({**SMALL, **changes}, base=preset)
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name=preset), target=TARGETS[dialect])
    return OrtEngine(bundle), EagerEngine(model)


@pytest.mark.parametrize(("preset", "changes", "dialect"), EXPORTED, ids=name_of)
def test_other_published_choices_are_exported(
    tmp_path: Path, preset: str, changes: dict[str, Any], dialect: Dialect
) -> None:
    engine, reference = exported(tmp_path, preset, changes, dialect)
    sources = [[5], list(range(3, 15)), [9, 9, 8], [40, 3]]
    searches = (
        [DecodeOptions()] if engine.spec.decoding == "parallel" else [DecodeOptions(), DecodeOptions(num_beams=3)]
    )
    for options in searches:
        assert tokens_of(decode(engine, sources, options)) == tokens_of(decode(reference, sources, options))


@pytest.mark.parametrize(("preset", "dialect"), PRESETS)
def test_a_published_preset_gives_the_references_tokens(preset: str, dialect: Dialect) -> None:
    engine, reference = OrtEngine(bundle_of(preset, dialect)), EagerEngine(model_of(preset))
    for options in (DecodeOptions(max_new_tokens=24), DecodeOptions(max_new_tokens=24, num_beams=3)):
        sources = sources_of(preset)
        assert tokens_of(decode(engine, sources, options)) == tokens_of(decode(reference, sources, options))


def stepped(engine: Engine[Any], calls: list[list[list[int]]]) -> list[np.ndarray]:
    """Return the logits of calls with two rows per source, after BOS."""
    source = np.array([[5, 6, 7, 50, 51], [8, 9, 0, 0, 0]])
    state = engine.encode(source, source != 0, Capacity(2, 24))
    engine.step(np.array([[1], [1]]), state, Want.LOGITS)
    engine.reorder(state, np.array([0, 0, 1, 1]))
    return [np.array(engine.step(np.array(call), state, Want.LOGITS).logits) for call in calls]


@pytest.mark.parametrize(("preset", "dialect"), PRESETS)
def test_steps_that_some_rows_all_rows_and_no_row_skips_have_the_references_numbers(
    preset: str, dialect: Dialect
) -> None:
    rare, other = 60, 61
    # Several tokens, one of them skipped; all rows skipped; one row skipped; none.
    calls = [
        [[3, rare, 4], [rare, 5, 6], [7, other, rare], [9, 10, 20]],
        [[rare], [other], [rare], [0]],
        [[rare, other]] * 4,
        [[50], [rare], [8], [rare]],
        [[7]] * 4,
    ]
    engine, reference = OrtEngine(bundle_of(preset, dialect)), EagerEngine(model_of(preset))
    for logits, expected in zip(stepped(engine, calls), stepped(reference, calls), strict=True):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


def conditions(bundle: Bundle) -> list[onnx.NodeProto]:
    graph = onnx.load(bundle.file(DECODER), load_external_data=False).graph
    return [node for node in graph.node if node.op_type == "If"]


def test_all_layers_are_in_one_branch_and_nothing_of_them_is_beside_it() -> None:
    bundle = bundle_of(FAT)
    branches = {node.name: [attribute.g.node for attribute in node.attribute] for node in conditions(bundle)}
    [layers] = [graphs for graphs in branches.values() if any(inner.op_type == "Tanh" for inner in chain(*graphs))]
    sizes = [len(nodes) for nodes in layers]
    assert min(sizes) <= 3 < 40 < max(sizes)
    names = [node.name for node in onnx.load(bundle.file(DECODER), load_external_data=False).graph.node]
    assert not [name for name in names if name.startswith("decoder.layers")]


def test_the_contract_of_a_decoder_without_self_attention_is_one_vector_per_layer_and_the_source() -> None:
    spec = bundle_of(FAT).spec
    assert [(tensor.name, tensor.shape, tensor.start) for tensor in spec.state] == [
        (f"state.{layer}", ("rows", 32), "source") for layer in range(2)
    ]
    assert spec.reads_source
    assert spec.row_positions


@pytest.mark.parametrize(("preset", "dialect"), PRESETS)
def test_padding_with_any_tokens_changes_no_bit(preset: str, dialect: Dialect) -> None:
    engine = OrtEngine(bundle_of(preset, dialect))
    source = np.array([[5, 6, 7, 50, 51], [8, 9, 10, 11, 12]])
    mask = np.array([[True] * 3 + [False] * 2, [True] * 5])
    logits = []
    for padding in (0, 33):
        source[0, 3:] = padding
        state = engine.encode(source, mask, Capacity(1, 4))
        engine.step(np.array([[1], [1]]), state, Want.LOGITS)
        logits.append(np.array(engine.step(np.array([[33], [4]]), state, Want.LOGITS).logits))
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.slow
@pytest.mark.parametrize("preset", [FAT, FAST])
def test_integers_take_the_matrices_of_published_layers(preset: str) -> None:
    bundle = quantized_of(preset, "int8")
    plan = {part: bundle.manifest.histograms[part]["quantized"] for part in (ENCODER, DECODER)}
    inside = sum(
        node.op_type in ("MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul")
        for condition in conditions(bundle)
        for attribute in condition.attribute
        for node in attribute.g.node
    )
    assert preset == FAST or inside >= 8
    assert sum(plan[ENCODER].get(op, 0) for op in ("MatMulIntegerToFloat", "MatMulNBits")) >= 2
    assert verify(bundle.path).line()
    sources = sources_of(preset)[:4]
    together = decode(OrtEngine(bundle), sources, DecodeOptions(max_new_tokens=12))
    alone = [decode(OrtEngine(bundle), [source], DecodeOptions(max_new_tokens=12))[0] for source in sources]
    assert tokens_of(together) == tokens_of(alone)


def test_vectors_of_the_positions_before_stay_float32_in_half_precision() -> None:
    halved = bundle_of(FAT).spec.halved("float16")
    assert {tensor.dtype for tensor in halved.memory} == {"float16"}
    assert {tensor.dtype for tensor in halved.state} == {"float32"}


@pytest.mark.slow
def test_vectors_per_distance_go_to_half_precision_and_unbounded_weights_are_refused_by_name(tmp_path: Path) -> None:
    bundle = half_of(FAST)
    assert {tensor.dtype for tensor in (*bundle.spec.memory, *bundle.spec.state)} == {"float16"}
    with pytest.raises(ParityFailed, match="beyond the range of the precision: export with --precision bf16 or fp32"):
        write_bundle(model_of(FAT), tmp_path / "half", origin=Origin(name=FAT), target="onnx", precision="fp16")
