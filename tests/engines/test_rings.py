"""Rings of keys and values: the same tokens on every engine however often they turn, in memory that never grows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fatdeploy
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.sparse.kinds import TOKENS_PER_CALL
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.bulk.crews import Crew
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want
from fatdeploy.runtimes.engines.trt.build.profiles import profiles_from_text, profiles_of
from fatdeploy.runtimes.engines.trt.engine import TrtEngine
from fatdeploy.runtimes.engines.trt.memory import DecodeMemory, DecodeMemoryShape
from fatdeploy.runtimes.proof.verify import verify
from fatdeploy.spec import ModelSpec
from tests.support.bundles import shared_bundle
from tests.support.choices import tiny
from tests.support.devices.counting import on_device
from tests.support.devices.cpu import CpuDevice, with_plans
from tests.support.engines.equalities import assert_alike, tokens_of
from tests.support.engines.ring_models import MAX_TARGET, WINDOW, ring_bundle, ring_model

ENGINES = ["ort", "standard", "ort device", "standard device", "trt"]
LENGTH = WINDOW + TOKENS_PER_CALL
SEARCHES = {
    "greedy": DecodeOptions(),
    "beams": DecodeOptions(num_beams=4, num_return_sequences=4),
    "samples": DecodeOptions(sample=True, num_return_sequences=2, top_k=4, seed=5),
    "a prefix": DecodeOptions(prefix=list(range(10, 31))),
}
SOURCES = [np.random.default_rng(length).integers(3, 64, length).tolist() for length in (1, 32, 5, 2, 9, 7)]

SOURCES_OF_TWELVE = [source[:12] for source in SOURCES]


def engine_of(kind: str) -> Engine[Any]:
    if kind == "eager":
        return EagerEngine(ring_model())
    if kind == "trt":
        bundle = shared_bundle("ring-plans", lambda folder: with_plans(ring_bundle("standard"), folder))
        return TrtEngine(bundle, CpuDevice(bundle))
    bundle = ring_bundle("ort" if kind.startswith("ort") else "standard")
    return on_device(bundle) if kind.endswith("device") else OrtEngine(bundle)


@pytest.mark.parametrize("kind", ENGINES)
def test_every_search_gives_the_references_tokens_while_rings_turn(kind: str) -> None:
    engine, reference = engine_of(kind), EagerEngine(ring_model())
    for name, options in SEARCHES.items():
        expected = decode(reference, SOURCES, options)
        assert_alike(decode(engine, SOURCES, options), expected)
        # In reused memory, in which another state was, and each source alone.
        assert_alike(decode(engine, SOURCES[::-1], options)[::-1], expected)
        assert_alike([decode(engine, [source], options)[0] for source in SOURCES[:3]], expected[:3])
        n_before = len(options.prefix)
        assert max(len(hypothesis.tokens) + n_before for hypothesis in expected) > 2 * LENGTH, name


@pytest.mark.parametrize("kind", ["eager", *ENGINES])
def test_a_prefix_of_any_length_is_the_whole_sequence_at_once(kind: str) -> None:
    engine = engine_of(kind)
    source = np.array([[5, 6, 7], [40, 41, 0]])
    tokens = np.random.default_rng(1).integers(3, 64, (2, MAX_TARGET))
    state = engine.encode(source, source != 0, Capacity(1, MAX_TARGET))
    calls = np.split(tokens, [1, 1 + LENGTH, 3 + LENGTH, MAX_TARGET - 1], 1)
    logits = [np.array(engine.step(call, state, Want.LOGITS).logits) for call in calls]
    with torch.inference_mode():
        expected = ring_model()(*(torch.from_numpy(array) for array in (source, source != 0, tokens))).numpy()
    np.testing.assert_allclose(np.concatenate(logits, 1), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_window_that_reaches_as_far_as_the_longest_target_has_an_ordinary_cache() -> None:
    specs = [
        tiny({"decoder_attention": "local", "window": WINDOW, "max_target": longest}).spec
        for longest in (LENGTH, LENGTH + 1)
    ]
    assert [{tensor.kind for tensor in spec.state} for spec in specs] == [{"cache"}, {"ring"}]
    assert [spec.tokens_per_call for spec in specs] == [None, TOKENS_PER_CALL]


def test_memory_is_the_same_however_long_targets_may_be() -> None:
    engine = OrtEngine(ring_bundle("ort"))
    source = np.array([[5, 6, 7]])
    states = [engine.encode(source, source != 0, Capacity(4, most)) for most in (1, MAX_TARGET)]
    assert [array.shape for array in states[1].arrays[0]] == [(4, 2, LENGTH, 16)] * 4
    assert [array.shape for array in states[0].arrays[0]] == [array.shape for array in states[1].arrays[0]]
    longer = tiny({"decoder_attention": "local", "window": WINDOW, "max_target": 4 * MAX_TARGET}).spec
    assert longer.state == engine.spec.state
    # One set, which a step writes in place.
    assert len(states[0].arrays) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_of_rings_are_refilled_and_give_what_the_reference_gives(workers: int) -> None:
    draw = np.random.default_rng(8)
    sources = [draw.integers(3, 64, draw.integers(1, 33)).tolist() for _ in range(60)]
    assert OrtEngine(ring_bundle("ort")).refills
    with fatdeploy.load(ring_bundle("ort").path, threads=workers, spinning=False) as model:
        model._crews._crew = Crew(model._engine, workers, 8)  # type: ignore[union-attr]
        results = model.generate(sources)
    assert_alike(results, decode(EagerEngine(ring_model()), sources))
    assert len({len(hypothesis.tokens) for hypothesis in results}) > 5


def test_prefixes_of_different_lengths_are_what_they_are_alone() -> None:
    draw = np.random.default_rng(3)
    prefixes = [draw.integers(3, 60, draw.integers(20)).tolist() for _ in SOURCES]
    engine, options = OrtEngine(ring_bundle("ort")), DecodeOptions(num_beams=2, max_new_tokens=20)
    alone = [
        decode(engine, [source], replace(options, prefix=prefix))[0]
        for source, prefix in zip(SOURCES, prefixes, strict=True)
    ]
    assert_alike(decode(engine, SOURCES, options, prefixes=prefixes), alone)


def test_integers_with_rings_are_bit_for_bit_the_same_in_every_batch(tmp_path: Path) -> None:
    bundle = write_bundle(
        exportable_model(ring_model()), tmp_path / "bundle", origin=Origin(name="ring", random=True), precision="int8"
    )
    assert any("Integer" in op or op == "MatMulNBits" for op in bundle.manifest.histograms[DECODER]["quantized"])
    assert verify(bundle.path).line()
    engine = OrtEngine(bundle)
    together = decode(engine, SOURCES, SEARCHES["beams"])
    assert together == [decode(engine, [source], SEARCHES["beams"])[0] for source in SOURCES]


@pytest.mark.slow
@pytest.mark.parametrize("relative", ["table", "angle", "matrix"])
@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_rings_with_relative_scores_have_one_position_for_all_rows(relative: str, target: Any, tmp_path: Path) -> None:
    model = tiny({"decoder_attention": "local", "window": WINDOW, "max_target": MAX_TARGET, "relative": relative})
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name="ring"), target=target)
    assert not bundle.spec.row_positions
    for options in SEARCHES.values():
        expected = tokens_of(decode(EagerEngine(model), SOURCES, options))
        assert tokens_of(decode(OrtEngine(bundle), SOURCES, options)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_rings_are_exported_in_half_precision(precision: Any, tmp_path: Path) -> None:
    origin = Origin(name="ring", random=True)
    bundle = write_bundle(ring_model(), tmp_path / "bundle", origin=origin, target="onnx", precision=precision)
    assert {tensor.dtype for tensor in bundle.spec.state} == {"float16" if precision == "fp16" else "bfloat16"}


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_a_bundle_with_rings_is_verified_where_it_runs(dialect: Any) -> None:
    bundle = ring_bundle(dialect)
    assert verify(bundle.path).as_dict()["tokens"] > 0
    assert (bundle.spec.tokens_per_call, bundle.spec.row_positions) == (TOKENS_PER_CALL, dialect == "ort")


def test_engines_for_tensorrt_take_no_more_tokens_at_once_than_a_ring_allows() -> None:
    spec = ring_bundle("standard").spec
    (profile,) = profiles_of(spec, ())
    assert profile.sizes["step"].most == TOKENS_PER_CALL
    with pytest.raises(fatdeploy.ConfigError, match=f"step goes to 16, past tokens_per_call = {TOKENS_PER_CALL}"):
        profiles_of(spec, profiles_from_text(["step=1:16"]))


def test_tensorrt_reads_a_ring_in_one_place_and_writes_it_in_another() -> None:
    bundle = shared_bundle("ring-plans", lambda folder: with_plans(ring_bundle("standard"), folder))
    device = CpuDevice(bundle)
    memory = DecodeMemory(device, bundle.spec, DecodeMemoryShape(batch=2, source=16, rows_per_source=2))
    assert [len(places) for places in memory.state] == [2, 2, 2, 2]
    assert memory.places(0) == memory.places(1)[::-1]
    memory.close()
    assert device.leaked == 0


def test_the_contract_of_a_ring_survives_its_manifest_and_half_precision() -> None:
    spec = ring_bundle("ort").spec
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert {tensor.dtype for tensor in spec.halved("float16").state} == {"float16"}


def test_an_old_bundle_with_a_mask_over_a_cache_gives_what_a_new_one_with_rings_gives() -> None:
    """Format 1.7 had no rings; both bundles are one model."""
    data = Path(__file__).parents[1] / "data"
    tokens = []
    for folder, kind in ((data / "local-1.7", "cache"), (data / "bundles" / "1.8", "ring")):
        with fatdeploy.load(folder, threads=1) as model:
            assert [tensor.kind for tensor in model.spec.state] == [kind] * 2
            tokens.append(tokens_of(model.generate(SOURCES_OF_TWELVE)))
    assert tokens[0] == tokens[1]
    assert max(len(best) for best, *_ in tokens[0]) == 24
    with fatdeploy.load(data / "local-1.7", threads=1) as model:
        assert model.bundle.manifest.format == (1, 7)
