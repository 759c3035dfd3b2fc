"""A bundle of engines alone: graphs and weights go, but for the output matrix, rows of which are read on the device."""

from dataclasses import replace
from pathlib import Path

from fatdeploy.bundle import read_bundle, write_manifest
from fatdeploy.errors import ConfigError
from fatdeploy.manifest import GRAPHS, WEIGHTS, OutputMatrix
from fatdeploy.spec import ModelSpec

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
ALIGNMENT = 64


def drop_graphs(folder: Path) -> None:
    """Take the graphs out of a bundle with engines, and of the weights all but the output matrix."""
    bundle = read_bundle(folder, check_hashes=False)
    matrix = bundle.manifest.output_matrix
    if matrix is not None and matrix.dtype not in BYTES:
        raise ConfigError(f"--drop-onnx is for matrices of {', '.join(BYTES)}, found {matrix.dtype}")
    kept = None if matrix is None else _kept(matrix, bundle.spec, folder / WEIGHTS)
    for name in (*GRAPHS.values(), *([WEIGHTS] if kept is None else [])):
        (folder / name).unlink()
    write_manifest(folder, replace(bundle.manifest, output_matrix=kept))


def _kept(matrix: OutputMatrix, spec: ModelSpec, weights: Path) -> OutputMatrix:
    """Write a weights file that holds nothing but the output matrix, and return where it stands."""
    rows, width = spec.vocab_size, spec.width or 0
    sizes = {"offset": rows * width * BYTES[matrix.dtype], "scales": rows * BYTES["float32"]}
    data, places = bytearray(), {}
    with weights.open("rb") as file:
        for name, size in sizes.items():
            place = getattr(matrix, name)
            if place is not None:
                file.seek(place)
                data += b"\0" * (-len(data) % ALIGNMENT)
                places[name] = len(data)
                data += file.read(size)
    weights.write_bytes(data)
    return replace(matrix, offset=places["offset"], scales=places.get("scales"))
