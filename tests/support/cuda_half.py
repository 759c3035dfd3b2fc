"""A bundle in half precision for onnxruntime's CUDA provider."""

from functools import cache
from pathlib import Path
from typing import Any

from fatdeploy.bundle import Bundle
from fatdeploy.export.pipeline import Origin, write_bundle
from tests.support.bundles import model_of, shared_bundle

TINY = "transformer-tiny"


def written(folder: Path, **choices: Any) -> Bundle:
    origin = Origin(name=TINY, random=True)
    return write_bundle(model_of(TINY), folder, origin=origin, target="ort-cuda", **choices)


@cache
def half() -> Bundle:
    return shared_bundle(f"{TINY}-cuda-fp16", lambda folder: written(folder, precision="fp16"))
