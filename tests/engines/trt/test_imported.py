"""TensorRT-RTX takes the graphs of imported models: norms, gates, relative tables and biases of other families."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fatdeploy
from fatdeploy.certificate import read_certificate
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.hugging_face.folder import model_from_folder
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
from fatdeploy.runtimes.engines.trt.modules import tensorrt_module
from tests.support.hugging_face_folders import write_folder

REQUEST = BuildRequest(flavour="tensorrt-rtx", capabilities=("8.6",))


@pytest.mark.parametrize("family", ["t5", "marian", pytest.param("encoder-decoder", marks=pytest.mark.slow)])
def test_engines_of_an_imported_model_are_built(family: str, tmp_path: Path) -> None:
    write_folder(family, 3, tmp_path / "folder")
    bundle = fatdeploy.export_model(
        str(tmp_path / "folder"), tmp_path / "bundle", target="tensorrt-rtx", engines=REQUEST
    )
    version = tensorrt_module("tensorrt-rtx").__version__
    parts = ("encoder", "decoder")
    assert [plan.file for plan in bundle.manifest.plans] == [
        f"engines/{part}-tensorrt-rtx-{version}-sm86.plan" for part in parts
    ]
    record = read_certificate(bundle).original
    assert record is not None
    assert record.agreement is not None
    assert record.agreement.largest_relative_difference < 1e-6
    # There is no GPU here, but the graphs are standard: they must also be right without engines.
    reference = EagerEngine(model_from_folder(tmp_path / "folder")[0])
    with closing(OrtEngine(bundle, OrtOptions(threads=1))) as engine:
        assert tokens_of(engine) == tokens_of(reference)


def tokens_of(engine: Engine[Any]) -> list[tuple[int, ...]]:
    options = DecodeOptions(num_beams=2, max_new_tokens=8)
    return [tuple(hypothesis.tokens) for hypothesis in decode(engine, [[5, 6, 7], [9]], options)]
