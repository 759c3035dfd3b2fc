"""Quantized bundles for tests, made from the bundles that other tests share: nothing is traced again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.export.g2p import CALIBRATION, CHECKPOINT, NAME
from fatdeploy.export.g2p import PROBES as G2P_PROBES
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, Exportable, exportable_model
from fatdeploy.export.models.loading import model_from_source
from fatdeploy.export.pipeline import Origin, Plain, trial_of, write_quantized
from fatdeploy.export.quantize.examples import examples_from_file, random_examples
from fatdeploy.export.quantize.gate import RANDOM_STEPS
from fatdeploy.export.quantize.integers import WeightBits
from fatdeploy.export.quantize.planning.costs import ProductShape
from fatdeploy.export.quantize.planning.plan import Option, Plan, planned
from fatdeploy.export.quantize.quantizer import Quantizer
from fatdeploy.export.quantize.recipe import Form
from fatdeploy.export.quantize.request import Integers, QuantizeRequest, Trial
from fatdeploy.manifest import DECODER, ENCODER, REQUIRED, Manifest, Provenance, Quantization
from fatdeploy.runtimes.text.tokenizer import tokenizer_from_file
from fatdeploy.targets import CpuClass
from tests.support.bundles import bundle_of, model_of, shared_bundle
from tests.support.engines.scripted import SPEC
from tests.support.words import g2p_bundle


def quantizer_of(preset: str, request: QuantizeRequest) -> Quantizer:
    """Return the quantizer of a preset with random weights."""
    return quantizer_from(bundle_of(preset), exportable_model(model_of(preset)), request)


def quantizer_from(plain: Bundle, exportable: Exportable, request: QuantizeRequest) -> Quantizer:
    """Return the quantizer of a bundle that was exported from a model."""
    exportable = exportable.with_spec(plain.spec)
    return Quantizer(
        exportable,
        {part: plain.path / part for part in (ENCODER, DECODER)},
        replace(plain.manifest, precision=request.precision, files={}),
        Trial(
            request,
            random_examples(exportable.spec, 0),
            random_examples(exportable.spec, 1)[:12],
            most_steps=RANDOM_STEPS,
        ),
        lambda _: None,
        EagerEngine(exportable),
    )


@cache
def quantized_of(preset: str, precision: Integers, cpu: CpuClass = "any") -> Bundle:
    """Return a preset with integers for matrices."""
    origin, spec = Origin(name=preset, random=True), model_of(preset).spec
    examples = random_examples(spec, 0), random_examples(spec, 1)[:12]
    request = QuantizeRequest(precision=precision, cpu=cpu)
    trial = trial_of(origin, request, examples, None, lambda _: None)
    return _shared(bundle_of(preset), exportable_model(model_of(preset)), origin, trial)


@cache
def formed_of(preset: str, form: Form, *, smoothed: bool = False) -> Bundle:
    """Return a preset whose matrices are int8 in one form, whatever other forms would cost."""

    def cost(other: Form, shape: ProductShape, bits: WeightBits, *, smoothed: bool) -> float:
        return float(other != form) + float(smoothed != wanted) / 2

    wanted, name = smoothed, f"{preset}-{form}{'-smoothed' if smoothed else ''}"
    examples = random_examples(model_of(preset).spec, 0), random_examples(model_of(preset).spec, 1)[:12]
    origin = Origin(name=name, random=True)
    trial = trial_of(origin, QuantizeRequest(precision="int8"), examples, None, lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fatdeploy.export.quantize.planning.form_search.cost_of", cost)
        return _shared(bundle_of(preset), exportable_model(model_of(preset)), origin, trial)


@cache
def split_of(preset: str) -> Bundle:
    """Return a preset in int4 whose output matrix has its first columns in 8 bits."""
    return split_from(bundle_of(preset), exportable_model(model_of(preset)), f"{preset}-split")


def split_from(plain: Bundle, exportable: Exportable, name: str) -> Bundle:
    """Return a model in int4 whose output matrix has its first columns in 8 bits."""

    def split(options: Mapping[str, Sequence[Option]], budget: float) -> Plan:
        splits = [option for option in options["output"] if option.recipe.form == "split"]
        chosen = min(splits, key=lambda option: option.cost)
        return Plan({**planned(options, budget).choices, "output": chosen})

    examples = random_examples(plain.spec, 0), random_examples(plain.spec, 1)[:12]
    origin = Origin(name=name, random=True)
    trial = trial_of(origin, QuantizeRequest(precision="int4"), examples, None, lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fatdeploy.export.quantize.quantizer.planned", split)
        return _shared(plain, exportable, origin, trial)


@cache
def quantized_g2p(precision: Integers) -> Bundle:
    """Return the bundled model with integers for matrices; the two that lose most with 4 bits have 8."""
    model, origin = model_from_source(NAME)
    plain, tokenizer = g2p_bundle(), tokenizer_from_file(CHECKPOINT / "tokenizer.json")
    calibration, probes = (examples_from_file(path, plain.spec, tokenizer) for path in (CALIBRATION, G2P_PROBES))
    request = QuantizeRequest(precision=precision, of={"output": "int8", "decoder.layers.1.ffn.out": "int8"})
    trial = trial_of(origin, request, (calibration, probes), tokenizer, lambda _: None)
    return _shared(plain, exportable_model(model, Choices(attention_layer=0)), origin, trial)


def _shared(plain: Bundle, exportable: Exportable, origin: Origin, trial: Trial) -> Bundle:
    def write(folder: Path) -> None:
        folder.mkdir()
        graphs = {part: plain.path / part for part in (ENCODER, DECODER)}
        model = Plain(
            exportable.with_spec(plain.spec), origin, "ort-cpu", traced={}, graphs=graphs, stage=lambda _: None
        )
        write_quantized(model, plain, folder, trial)

    return shared_bundle(f"{origin.name}-{trial.request.precision}-{trial.request.cpu}", write)


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
