"""A bundle with engines only: graphs and weights are dropped, except the output matrix, which the device reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fatdeploy.bundle import read_bundle, write_manifest
from fatdeploy.errors import ConfigError
from fatdeploy.manifest import GRAPHS, WEIGHTS, OutputMatrix
from fatdeploy.runtimes.engines.element_types import ELEMENT_TYPES
from fatdeploy.spec import ModelSpec

DTYPES = ("float32", "float16", "bfloat16", "int8")
ALIGNMENT = 64


def drop_graphs(folder: Path) -> None:
    """Remove the graphs from a bundle with engines, and all weights except the output matrix."""
    bundle = read_bundle(folder, check_hashes=False)
    matrix = bundle.manifest.output_matrix
    if matrix is not None and matrix.dtype not in DTYPES:
        raise ConfigError(f"--drop-onnx is for matrices of {', '.join(DTYPES)}, found {matrix.dtype}")
    kept = None if matrix is None else _matrix_alone(matrix, bundle.spec, folder / WEIGHTS)
    for name in (*GRAPHS.values(), *([WEIGHTS] if kept is None else [])):
        (folder / name).unlink()
    write_manifest(folder, replace(bundle.manifest, output_matrix=kept))


def _matrix_alone(matrix: OutputMatrix, spec: ModelSpec, weights: Path) -> OutputMatrix:
    """Write a weights file with nothing but the output matrix, and return its new place."""
    rows, width = spec.vocab_size, spec.width or 0
    sizes = {"offset": rows * width * ELEMENT_TYPES[matrix.dtype].n_bytes, "scales": rows * 4, "bias": rows * 4}
    data = bytearray()
    places: dict[str, Any] = {}
    with weights.open("rb") as file:
        for name, size in sizes.items():
            place = getattr(matrix, name)
            if place is not None:
                file.seek(place)
                data += b"\0" * (-len(data) % ALIGNMENT)
                places[name] = len(data)
                data += file.read(size)
    weights.write_bytes(data)
    return replace(matrix, **places)
