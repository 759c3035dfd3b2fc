"""Quantized bundles for tests, made of the bundles that other tests share: nothing is traced again."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from fatdeploy.bundle import DECODER, ENCODER, GATE, PARITY, PROBES, Bundle, write_manifest
from fatdeploy.export.contract import flat_model
from fatdeploy.export.examples import random_examples
from fatdeploy.export.precision import Asked, Quantizer
from fatdeploy.runtimes.gate import write_material
from tests.bundles import bundle_of, model_of, shared_bundle


def quantizer_of(preset: str, asked: Asked) -> Quantizer:
    """Return what quantizes a preset with random weights."""
    plain, flat = bundle_of(preset), flat_model(model_of(preset))
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
