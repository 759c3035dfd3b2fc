"""Quantized bundles for tests, made of the bundles that other tests share: nothing is traced again."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from fatdeploy.bundle import (
    DECODER,
    ENCODER,
    GATE,
    PARITY,
    PROBES,
    REQUIRED,
    Bundle,
    Manifest,
    Provenance,
    Quantization,
    write_manifest,
)
from fatdeploy.export.contract import Flat, flat_model
from fatdeploy.export.examples import random_examples
from fatdeploy.export.precision import Asked, Quantizer
from fatdeploy.runtimes.gate import write_material
from tests.bundles import bundle_of, model_of, shared_bundle
from tests.scripted import SPEC


def quantizer_of(preset: str, asked: Asked) -> Quantizer:
    """Return what quantizes a preset with random weights."""
    return quantizer_from(bundle_of(preset), flat_model(model_of(preset)), asked)


def quantizer_from(plain: Bundle, flat: Flat, asked: Asked) -> Quantizer:
    """Return what quantizes a bundle that was exported from a model."""
    return Quantizer(
        flat,
        {part: plain.path / part for part in (ENCODER, DECODER)},
        replace(plain.manifest, precision=asked.precision, files={}),
        asked,
        calibration=random_examples(flat.spec, 0),
        probes=random_examples(flat.spec, 1)[:12],
        tokenizer=None,
        stage=lambda _: None,
    )


@cache
def quantized_of(preset: str, precision: str) -> Bundle:
    """Return a preset with integers for matrices."""

    def write(folder: Path) -> None:
        folder.mkdir()
        asked = Asked(precision=precision)
        quantizer = quantizer_of(preset, asked)
        judged = quantizer.written(folder, enforced=False)
        plain = bundle_of(preset)
        for name in (PROBES, PARITY):
            (folder / name).write_bytes((plain.path / name).read_bytes())
        write_material(folder / GATE, quantizer.gate.material)
        matrix = quantizer.model.output_matrix().detach().numpy()
        placed = quantizer.placed_output(matrix, judged.quantization, folder)
        write_manifest(
            folder,
            replace(
                quantizer.manifest,
                quantization=judged.quantization,
                output_matrix=placed,
                weights=quantizer.weights,
            ),
        )

    return shared_bundle(f"{preset}-{precision}", write)


def hollow_bundle(folder: Path, quantization: Quantization | None, **files: bytes) -> Bundle:
    """Return a bundle of the scripted engine's model that has no graphs, only these files: ``gate_npz`` is gate.npz."""
    folder.mkdir()
    for name, data in {**dict.fromkeys(REQUIRED, b""), **files}.items():
        (folder / name.replace("_", ".")).write_bytes(data)
    manifest = Manifest(
        spec=SPEC,
        target="ort-cpu",
        precision="fp32" if quantization is None else "int8",
        dialect="ort",
        opset=24,
        versions={},
        source=Provenance("hollow", "0" * 64, None),
        quantization=quantization,
    )
    return write_manifest(folder, manifest)
