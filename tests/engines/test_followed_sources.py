"""State with the columns of the source, and state of positions: the same tokens on every engine, batch and search."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ExportFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want
from fatdeploy.runtimes.engines.trt.engine import TrtEngine
from fatdeploy.runtimes.proof.verify import verify
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS, shared_bundle
from tests.support.choices import tiny
from tests.support.devices.counting import on_device
from tests.support.devices.cpu import CpuDevice, with_plans
from tests.support.engines.equalities import assert_alike, tokens_of
from tests.support.engines.refills import alone, refilled_logits, scripts

SIZES = {"decoder_layers": 1, "encoder_layers": 1, "max_source": 32, "max_target": 48}
ENGINES = ["ort", "standard", "ort device", "standard device", "trt"]
# An export takes seconds: each kind in one dialect, and in the slow tests in both.
REPRESENTATIVE = [("location", "ort"), ("location", "ort device"), ("monotonic", "standard"), ("monotonic", "trt")]
EVERY_ENGINE = [
    pytest.param(kind, engine, marks=[] if (kind, engine) in REPRESENTATIVE else pytest.mark.slow)
    for kind in ("location", "monotonic")
    for engine in ENGINES
]
SEARCHES = {
    "greedy": DecodeOptions(max_new_tokens=12),
    "beams": DecodeOptions(num_beams=4, num_return_sequences=4, max_new_tokens=12),
    "samples": DecodeOptions(sample=True, num_return_sequences=2, max_new_tokens=12, top_k=4, seed=5),
    "a prefix": DecodeOptions(prefix=[9, 8, 7], max_new_tokens=12),
}
SOURCES = [np.random.default_rng(length).integers(3, 64, length).tolist() for length in (1, 32, 5, 2, 9, 7)]


@cache
def model_of(kind: str) -> ReferenceModel:
    return tiny({**SIZES, "cross_attention": kind})


@cache
def bundle_of(kind: str, dialect: Dialect) -> Bundle:
    return shared_bundle(
        f"{kind}-{dialect}",
        lambda folder: write_bundle(model_of(kind), folder, origin=Origin(name=kind), target=TARGETS[dialect]),
    )


def engine_of(kind: str, name: str) -> Engine[Any]:
    if name == "trt":
        bundle = shared_bundle(f"{kind}-plans", lambda folder: with_plans(bundle_of(kind, "standard"), folder))
        return TrtEngine(bundle, CpuDevice(bundle))
    dialect: Dialect = "ort" if name.startswith("ort") else "standard"
    return on_device(bundle_of(kind, dialect)) if name.endswith("device") else OrtEngine(bundle_of(kind, dialect))


@pytest.mark.parametrize(("kind", "name"), EVERY_ENGINE)
def test_every_search_follows_what_each_row_looked_at(kind: str, name: str) -> None:
    engine, reference = engine_of(kind, name), EagerEngine(model_of(kind))
    for options in SEARCHES.values():
        expected = decode(reference, SOURCES, options)
        assert_alike(decode(engine, SOURCES, options), expected)
        # In reused memory, in which another state was, and each source alone.
        assert_alike(decode(engine, SOURCES[::-1], options)[::-1], expected)
        assert_alike([decode(engine, [source], options)[0] for source in SOURCES], expected)


@pytest.mark.parametrize(("kind", "name"), EVERY_ENGINE)
def test_rows_that_move_and_sources_that_leave_take_along_where_they_looked(kind: str, name: str) -> None:
    source = np.array([[5, 6, 7, 8, 9, 10], [40, 41, 0, 0, 0, 0], [9, 17, 30, 33, 0, 0]])
    logits = []
    for engine in (engine_of(kind, name), EagerEngine(model_of(kind))):
        state = engine.encode(source, source != 0, Capacity(2, 16))
        engine.reorder(state, np.array([0, 0, 1, 1, 2, 2]))
        draw, parts = np.random.default_rng(4), []
        for rows in ([1, 0, 2, 3, 4, 4], [5, 4, 1, 0], [1, 1, 2, 3], [3, 2]):
            for steps in (1, 1, 1):
                tokens = draw.integers(3, 64, (len(state_rows(state)), steps))
                parts.append(np.array(engine.step(tokens, state, Want.LOGITS).logits))
            engine.reorder(state, np.array(rows))
        tokens = draw.integers(3, 64, (len(state_rows(state)), 1))
        logits.append([*parts, np.array(engine.step(tokens, state, Want.LOGITS).logits)])
    for part, expected in zip(*logits, strict=True):
        np.testing.assert_allclose(part, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


def state_rows(state: Any) -> range:
    return range(state.rows)


@pytest.mark.parametrize("kind", ["location", pytest.param("monotonic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("per_source", [1, 3])
def test_newcomers_of_other_lengths_begin_anew(kind: str, per_source: int) -> None:
    engine, draw = OrtEngine(bundle_of(kind, "ort"), OrtOptions(threads=1)), np.random.default_rng(per_source)
    waiting = scripts(draw, [30, 21, 28, *draw.integers(1, 30, 9).tolist()], per_source)
    results, widths = refilled_logits(engine, waiting, per_source, places=3)
    # The state's columns are those that it began with.
    assert set(widths) == ({30} if kind == "location" else set(widths))
    reference = EagerEngine(model_of(kind))
    for script, logits in zip(waiting, results, strict=True):
        expected = alone(reference, script)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize(
    ("kind", "dialect"),
    [
        ("location", "ort"),
        ("monotonic", "standard"),
        pytest.param("monotonic", "ort", marks=pytest.mark.slow),
        pytest.param("location", "standard", marks=pytest.mark.slow),
    ],
)
def test_steps_of_a_call_are_one_loop_and_the_bundle_is_verified(kind: str, dialect: Dialect) -> None:
    bundle = bundle_of(kind, dialect)
    assert bundle.manifest.histograms[DECODER]["simplified"]["Scan"] == 1
    assert verify(bundle.path).as_dict()["tokens"] > 0
    names = {"location": "attended.0", "monotonic": "reached.0"}
    assert [tensor.name for tensor in bundle.spec.state] == ["keys.0", "values.0", names[kind]]


@pytest.mark.parametrize("kind", ["location", pytest.param("monotonic", marks=pytest.mark.slow)])
def test_integers_take_the_matrices_around_the_loop(kind: str, tmp_path: Path) -> None:
    origin = Origin(name=kind, random=True)
    bundle = write_bundle(model_of(kind), tmp_path / "bundle", origin=origin, precision="int8")
    assert any("Integer" in op for op in bundle.manifest.histograms[DECODER]["quantized"])
    assert verify(bundle.path).line()
    engine, options = OrtEngine(bundle), SEARCHES["greedy"]
    together = decode(engine, SOURCES, options)
    assert tokens_of(together) == tokens_of([decode(engine, [source], options)[0] for source in SOURCES])


@pytest.mark.slow
def test_half_precision_is_refused_because_of_the_loop(tmp_path: Path) -> None:
    with pytest.raises(ExportFailed, match=r"Scan .* cannot be converted to half precision: export in fp32 or"):
        write_bundle(model_of("location"), tmp_path / "half", origin=Origin(name="l"), target="onnx", precision="fp16")


def test_a_cache_beside_recurrent_state_stays_in_place() -> None:
    engine = OrtEngine(bundle_of("location", "ort"))
    state = engine.encode(np.array([[5, 6, 7]]), np.ones((1, 3), bool), Capacity(2, 8))
    first, second = state.arrays
    assert [array is other for array, other in zip(first, second, strict=True)] == [True, True, False]
    assert [array.shape for array in first] == [(2, 2, 8, 16)] * 2 + [(2, 2, 3)]
