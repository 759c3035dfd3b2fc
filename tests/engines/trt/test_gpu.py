"""Tests that need a GPU: plans built, loaded and run by the real TensorRT, compared with the reference."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.doctor.cuda_driver import cuda_here
from fatdeploy.runtimes.engines.opening import opened_engine
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest, build_engines
from fatdeploy.runtimes.engines.trt.modules import BUILDERS
from fatdeploy.runtimes.proof.probes import read_probes, verified
from fatdeploy.targets import Flavour
from tests.support.bundles import bundle_of, shared_bundle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_here().devices, reason=f"no GPU to run plans on: {cuda_here().reason}"),
]

FLAVOURS = ["tensorrt", "tensorrt-rtx"]
PRESETS = ["transformer-tiny", "fat-tiny", "transformer-nat-tiny"]
BEAMS = DecodeOptions(num_beams=4, num_return_sequences=4, max_new_tokens=24)


def built(preset: str, flavour: Flavour) -> Bundle:
    """Return a preset with plans for this machine's GPU."""
    pytest.importorskip(BUILDERS[flavour].module)
    pytest.importorskip("cuda.bindings.runtime")
    standard = bundle_of(preset, "standard")

    def write(folder: Path) -> None:
        shutil.copytree(standard.path, folder)
        write_manifest(folder, replace(standard.manifest, target=flavour))
        build_engines(folder, BuildRequest(flavour=flavour), stage=print)

    return shared_bundle(f"{preset}-{flavour}", write)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("preset", PRESETS)
def test_plans_give_the_references_tokens_recorded_and_not(preset: str, flavour: Flavour) -> None:
    bundle = built(preset, flavour)
    for cuda_graphs in (True, False):
        engine = opened_engine(bundle, cuda_graphs=cuda_graphs)
        parity = verified(engine, read_probes(bundle.file(PROBES)))
        engine.close()
        assert parity.largest_difference <= parity.bound


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("preset", PRESETS[:2])
def test_beams_and_prefixes_are_those_of_onnxruntime(preset: str, flavour: Flavour) -> None:
    bundle = built(preset, flavour)
    engine, reference = opened_engine(bundle), OrtEngine(bundle, OrtOptions(threads=1))
    sources = [[5, 6, 7], [8] * 20, [9]]
    for options in (BEAMS, DecodeOptions(prefix=[5, 6, 7] * 8, max_new_tokens=16)):
        hypotheses, again, expected = (decode(backend, sources, options) for backend in (engine, engine, reference))
        assert [hypothesis.tokens for hypothesis in hypotheses] == [hypothesis.tokens for hypothesis in expected]
        assert [hypothesis.tokens for hypothesis in again] == [hypothesis.tokens for hypothesis in expected]
    engine.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_memory_of_the_device_is_freed(flavour: Flavour) -> None:
    from cuda.bindings import runtime

    bundle = built("transformer-tiny", flavour)
    free = []
    for _ in range(4):
        engine = opened_engine(bundle)
        state = engine.encode(np.array([[5, 6, 7]]), np.ones((1, 3), bool), Capacity(1, 32))
        for _ in range(3):
            engine.step(np.array([[7]]), state, Want.LOGITS)
        engine.close()
        free.append(runtime.cudaMemGetInfo()[1])
    # The first time, CUDA and TensorRT load modules that stay in memory.
    assert free[1] == free[2] == free[3]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_command_verifies(flavour: Flavour) -> None:
    result = CliRunner().invoke(main, ["verify", str(built("fat-tiny", flavour).path)])
    assert result.exit_code == 0, result.output
    assert "are the reference's" in result.stdout
