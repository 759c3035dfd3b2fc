"""State that starts from the source: the same tokens on every engine, in every batch, search and reused memory."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fatdeploy
from fatdeploy.bundle import Bundle
from fatdeploy.errors import ExportFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.models.user_models import check_user_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.bulk.crews import Crew
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want
from fatdeploy.runtimes.engines.trt.engine import TrtEngine
from fatdeploy.runtimes.proof.verify import verify
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS, shared_bundle
from tests.support.devices.counting import on_device
from tests.support.devices.cpu import CpuDevice, with_plans
from tests.support.engines.equalities import assert_alike, tokens_of
from tests.support.engines.started_models import learned_start, started_sum

ENGINES = ["ort", "standard", "ort device", "standard device", "trt"]
SEARCHES = {
    "greedy": DecodeOptions(max_new_tokens=12),
    "beams": DecodeOptions(num_beams=4, num_return_sequences=4, max_new_tokens=12),
    "samples": DecodeOptions(sample=True, num_return_sequences=2, max_new_tokens=12, top_k=4, seed=5),
    "a shortlist": DecodeOptions(shortlist=list(range(2, 40)), max_new_tokens=12),
    "a shortlist of beams": DecodeOptions(shortlist=list(range(2, 40)), num_beams=3, max_new_tokens=12),
    "a prefix": DecodeOptions(prefix=[9, 8, 7], max_new_tokens=12),
}
SOURCES = [np.random.default_rng(length).integers(3, 64, length).tolist() for length in (1, 32, 5, 2, 9, 7)]


def bundle_of(dialect: Dialect) -> Bundle:
    return shared_bundle(
        f"started-{dialect}",
        lambda folder: write_bundle(started_sum(), folder, origin=Origin(name="own"), target=TARGETS[dialect]),
    )


def engine_of(kind: str) -> Engine[object]:
    if kind == "trt":
        bundle = shared_bundle("started-plans", lambda folder: with_plans(bundle_of("standard"), folder))
        return TrtEngine(bundle, CpuDevice(bundle))
    dialect: Dialect = "ort" if kind.startswith("ort") else "standard"
    return on_device(bundle_of(dialect)) if kind.endswith("device") else OrtEngine(bundle_of(dialect))


@pytest.mark.parametrize("kind", ENGINES)
def test_every_search_starts_from_the_source(kind: str) -> None:
    engine, reference = engine_of(kind), EagerEngine(started_sum())
    for options in SEARCHES.values():
        expected = decode(reference, SOURCES, options)
        assert_alike(decode(engine, SOURCES, options), expected)
        # In reused memory, in which another state was, and each source alone.
        assert_alike(decode(engine, SOURCES[::-1], options)[::-1], expected)
        assert_alike([decode(engine, [source], options)[0] for source in SOURCES], expected)
    # The state is all that differs between sources of one length.
    assert len({tuple(decode(engine, [[token]], SEARCHES["greedy"])[0].tokens) for token in range(5, 25)}) > 10


@pytest.mark.parametrize("workers", [1, 2])
def test_many_sources_of_an_own_model_give_what_the_reference_gives(workers: int) -> None:
    draw = np.random.default_rng(8)
    sources = [draw.integers(3, 64, draw.integers(1, 33)).tolist() for _ in range(90)]
    with fatdeploy.load(bundle_of("ort").path, threads=workers, spinning=False) as model:
        model._crews._crew = Crew(model._engine, workers, 8)  # type: ignore[union-attr]
        results = model.generate(sources, SEARCHES["greedy"])
    assert_alike(results, decode(EagerEngine(started_sum()), sources, SEARCHES["greedy"]))


def test_a_learned_start_that_is_the_same_for_all_sources_is_exported(tmp_path: Path) -> None:
    model = learned_start()
    bundle = write_bundle(model, tmp_path / "bundle", origin=Origin(name="own"))
    expected = decode(EagerEngine(model), SOURCES, SEARCHES["beams"])
    assert_alike(decode(OrtEngine(bundle), SOURCES, SEARCHES["beams"]), expected)
    with torch.no_grad():
        model.first.zero_()
    assert tokens_of(decode(EagerEngine(model), SOURCES, SEARCHES["beams"])) != tokens_of(expected)


def test_integers_of_an_own_model_start_from_the_source(tmp_path: Path) -> None:
    origin = Origin(name="own", random=True)
    bundle = write_bundle(started_sum(), tmp_path / "bundle", origin=origin, precision="int8")
    assert any("Integer" in op for op in bundle.manifest.histograms[DECODER]["quantized"])
    assert verify(bundle.path).line()
    engine = OrtEngine(bundle)
    together = decode(engine, SOURCES, SEARCHES["beams"])
    assert together == [decode(engine, [source], SEARCHES["beams"])[0] for source in SOURCES]


@pytest.mark.parametrize("kind", ["eager", *ENGINES])
def test_rows_that_are_added_and_moved_before_the_first_token_start_from_their_source(kind: str) -> None:
    reference = EagerEngine(started_sum())
    engine = reference if kind == "eager" else engine_of(kind)
    source = np.array([[5, 6, 7], [40, 41, 0], [9, 0, 0]])
    state = engine.encode(source, source != 0, Capacity(2, 8))
    engine.reorder(state, np.array([0, 0, 1, 1, 2, 2]))
    engine.reorder(state, np.array([5, 4, 0, 1]))
    moved = np.array(engine.step(np.full((4, 1), 1), state, Want.LOGITS).logits)
    for rows, index in (([0, 1], 2), ([2, 3], 0)):
        alone = reference.encode(source[[index]], source[[index]] != 0, Capacity(1, 8))
        expected = reference.step(np.array([[1]]), alone, Want.LOGITS).logits
        np.testing.assert_allclose(moved[rows], np.repeat(expected, 2, 0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_the_encoder_graph_returns_the_start_and_the_bundle_is_verified(dialect: Dialect) -> None:
    bundle = bundle_of(dialect)
    assert [tensor.name for tensor in bundle.spec.encoder_outputs()] == ["lengths", "start.sum"]
    assert [tensor.start for tensor in bundle.spec.state] == ["zero", "source"]
    assert "start.sum" not in {tensor.name for tensor in bundle.spec.decoder_inputs(branches=True)}
    assert verify(bundle.path).as_dict()["tokens"] > 0


def test_a_start_that_the_spec_does_not_mention_is_refused_with_what_to_write() -> None:
    with pytest.raises(ExportFailed, match=r'start returned sum with values other than 0, .* start="source"'):
        check_user_model(exportable_model(started_sum("zero")))
