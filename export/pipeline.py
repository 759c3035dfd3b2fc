"""The way from a reference model to a bundle: trace, simplify, halve, package, certify."""

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fatdeploy.bundle import Bundle, read_bundle, write_manifest
from fatdeploy.certificate import OriginalRecord, read_certificate, write_certificate
from fatdeploy.errors import ConfigError
from fatdeploy.export.graph_files import op_histogram
from fatdeploy.export.half.rewrite import half_array, halved
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Exportable, exportable_model
from fatdeploy.export.package import placed_output_matrix, with_bias, write_graphs
from fatdeploy.export.proof.certify import certified
from fatdeploy.export.proof.certify_half import certified_half
from fatdeploy.export.proof.cuda_ops import cuda_record, decoder_seams, runs_on_cuda
from fatdeploy.export.proof.draw_probes import drawn_probes
from fatdeploy.export.proof.original import original_record
from fatdeploy.export.quantize.examples import Example, examples_from_file, random_examples
from fatdeploy.export.quantize.gate import RANDOM_STEPS, metric_of
from fatdeploy.export.quantize.quantizer import Quantizer
from fatdeploy.export.quantize.request import QuantizeRequest, Trial, check_request
from fatdeploy.export.reference.checkpoint import stored_tensors
from fatdeploy.export.reference.seams import Seams
from fatdeploy.export.text_files import TextFiles, fitting_tokenizer
from fatdeploy.export.tracing.dialect_base import OPSET
from fatdeploy.export.tracing.row_positions import with_row_positions
from fatdeploy.export.tracing.samples import drawn_samples
from fatdeploy.export.tracing.scaled_queries import scaled_queries
from fatdeploy.export.tracing.simplify import simplified
from fatdeploy.export.tracing.trace import traced_decoder, traced_encoder
from fatdeploy.folders import replaced_folder
from fatdeploy.manifest import DECODER, ENCODER, GATE, PROBES, TOKENIZER, GenerationRecord, Manifest, Provenance
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.defaults import options_from_record
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module
from fatdeploy.runtimes.proof.gate import write_material
from fatdeploy.runtimes.proof.probes import Probe, write_probes
from fatdeploy.runtimes.text.tokenizer import Tokenizer
from fatdeploy.spec import ModelSpec
from fatdeploy.targets import DEFAULT_TARGET, TARGETS, Dialect, FloatPrecision, Precision, Target, TargetRecord, either

log = logging.getLogger("fatdeploy")

RECORDED = ("fatdeploy", "torch", "onnx", "onnxscript", "onnxsim", "numpy")


# What a quantization is calibrated with, and what it is judged by.
Examples = tuple[list[Example], list[Example]]
# Adds to a bundle what is built from its graphs.
Finish = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model comes from, as the manifest says it; ``random`` weights have nothing to lose by a quantization.

    ``calibration`` and ``probes`` are the files that a quantization reads. ``tokenizer`` is a tokenizer.json that needs
    no further words; ``text`` is any other tokenizer. ``generation`` is how the model decodes by default, ``original``
    the folder that it was imported from.
    """

    name: str
    licence: str | None = None
    tokenizer: Path | None = None
    text: TextFiles | None = None
    random: bool = False
    calibration: Path | None = None
    probes: Path | None = None
    generation: GenerationRecord | None = None
    original: Path | None = None


def write_bundle(
    model: object,
    folder: Path,
    *,
    origin: Origin,
    target: Target = DEFAULT_TARGET,
    precision: Precision | QuantizeRequest = "fp32",
    finish: Finish | None = None,
    force: bool = False,
    stage: Callable[[str], None] = log.info,
) -> Bundle:
    """Export a model to a folder and return the bundle; a crash or a miss leaves what the folder held before.

    Integers replace the matrices of graphs that were proved right in fp32. ``stage`` is called with the name of each
    stage. ``finish`` adds what is built from the graphs, before the bundle takes its place.
    """
    # TensorRT engines are built from standard graphs, and their bundle takes its target once they are there.
    record = TARGETS[TARGETS[target].graph_target]
    exportable = with_row_positions(exportable_model(model), record)
    tokenizer = fitting_tokenizer(origin.tokenizer, origin.text, exportable.spec)
    if origin.generation is not None:
        options_from_record(origin.generation, exportable.spec)  # raises before anything is traced
    if finish is None and record.name != target:
        raise ConfigError(
            f"a bundle for {target} needs engines: fatdeploy.export_model(…, target={target!r}) builds them"
        )
    request = quantize_request(precision)
    trial: Trial | None = None
    floats: FloatPrecision = "fp32"
    if request is not None:
        check_request(request, record)
        trial = trial_of(origin, request, _examples(exportable.spec, origin, tokenizer), tokenizer, stage)
    else:
        floats = checked_floats(record, precision)
    with replaced_folder(folder, force=force) as new, _folder_beside(new) as work:
        traced, graphs = written_graphs(exportable, record.dialect, work, stage, decoder_seams(record, floats))
        plain = Plain(exportable, origin, record, traced, graphs, stage)
        if trial is None:
            plain.write(new, floats)
        else:
            (Path(work) / "fp32").mkdir()
            plain.write(Path(work) / "fp32", "fp32")
            write_quantized(plain, read_bundle(Path(work) / "fp32", check_hashes=False), new, trial)
        if finish is not None:
            finish(new)
    return read_bundle(folder)


@dataclass(frozen=True)
class Plain:
    """The graphs of a model, written as a bundle in fp32 or in half precision."""

    exportable: Exportable
    origin: Origin
    target: TargetRecord
    traced: dict[str, Path]
    graphs: dict[str, Path]
    stage: Callable[[str], None]

    def write(self, folder: Path, precision: FloatPrecision) -> None:
        """Write the bundle with its certificate."""
        exportable, spec, graphs = self.exportable, self.exportable.spec, self.graphs
        stages = {"traced": self.traced, "simplified": self.graphs}
        half = None if precision == "fp32" else precision
        if half is not None:
            self.stage(f"turning the graphs into {half}")
            spec, graphs = halved(spec, graphs, half)
            stages["half"] = graphs
        weights = write_graphs(graphs, folder)
        matrix = exportable.output_matrix()
        output_matrix = None
        if matrix is not None:
            output_matrix = placed_output_matrix(half_array(matrix.detach().numpy(), half), folder)
            output_matrix = with_bias(output_matrix, output_bias_of(exportable), folder)
        if self.origin.tokenizer is not None:
            shutil.copyfile(self.origin.tokenizer, folder / TOKENIZER)
        if self.origin.text is not None:
            self.origin.text.write(folder)
        self.stage("drawing probes from the reference")
        probes = drawn_probes(EagerEngine(exportable))
        write_probes(folder / PROBES, probes)
        histograms = {part: {name: op_histogram(written[part]) for name, written in stages.items()} for part in graphs}
        manifest = replace(
            manifest_of(exportable, self.origin, self.target),
            spec=spec,
            precision=precision,
            histograms=histograms,
            weights=weights,
            output_matrix=output_matrix,
        )
        self.stage("comparing the graphs with the reference")
        bundle = write_manifest(folder, manifest)
        if half is None:
            certificate = certified(exportable, bundle, probes, self.traced, graphs)
        else:
            certificate = certified_half(exportable, bundle, probes, trained=not self.origin.random)
        if self.origin.original is not None:
            self.stage("comparing with the original")
            certificate = replace(certificate, original=self._original_record(self.origin.original, bundle, probes))
        if runs_on_cuda(self.target):
            certificate = replace(certificate, cuda=cuda_record(graphs))
        write_certificate(folder, certificate)
        write_manifest(folder, manifest)

    def _original_record(self, folder: Path, bundle: Bundle, probes: list[Probe]) -> OriginalRecord:
        """Compare with the original; graphs in half precision choose other tokens, so the reference stands for them."""
        model, generation = self.exportable, self.origin.generation
        options = DecodeOptions() if generation is None else options_from_record(generation, model.spec)
        if bundle.manifest.precision != "fp32":
            return original_record(folder, model, EagerEngine(model), probes, options)
        with closing(OrtEngine(bundle, OrtOptions(spinning=False))) as engine:
            return original_record(folder, model, engine, probes, options)


def write_quantized(model: Plain, plain: Bundle, folder: Path, trial: Trial) -> None:
    """Write the quantized bundle of graphs that are proved right, with the gate's result in its certificate."""
    exportable, origin = model.exportable, model.origin
    manifest = replace(plain.manifest, precision=trial.request.precision)
    with closing(OrtEngine(plain, OrtOptions(spinning=False))) as proved:
        quantizer = Quantizer(exportable, model.graphs, manifest, trial, model.stage, proved)
        judged = quantizer.written(folder, enforced=not origin.random)
    for name in (PROBES, *([TOKENIZER] if origin.tokenizer is not None else [])):
        shutil.copyfile(plain.path / name, folder / name)
    if origin.text is not None:
        origin.text.write(folder)
    write_material(folder / GATE, quantizer.gate.material)
    matrix = exportable.output_matrix()
    output_matrix = None
    if matrix is not None:
        output_matrix = quantizer.placed_output(matrix.detach().numpy(), judged.quantization, folder)
        output_matrix = with_bias(output_matrix, quantizer.corrected_bias(output_bias_of(exportable)), folder)
    write_certificate(folder, judged.certificate(read_certificate(plain), trial.request))
    histograms = {
        part: {**plain.manifest.histograms[part], "quantized": quantizer.histograms[part]} for part in model.graphs
    }
    write_manifest(
        folder,
        replace(
            manifest,
            quantization=judged.quantization,
            output_matrix=output_matrix,
            weights=quantizer.weights,
            histograms=histograms,
        ),
    )


def trial_of(
    origin: Origin,
    request: QuantizeRequest,
    examples: Examples,
    tokenizer: Tokenizer | None,
    say: Callable[[str], None],
) -> Trial:
    """Return how a quantization is calibrated and judged; a metric that is not available is refused."""
    calibration, probes = examples
    metric = metric_of(request.metric, probes, tokenizer, say)
    return Trial(request, calibration, probes, tokenizer, metric, RANDOM_STEPS if origin.random else None)


def _examples(spec: ModelSpec, origin: Origin, tokenizer: Tokenizer | None) -> Examples:
    """Return what a quantization is calibrated with and judged by; a trained model needs real sources for both."""
    files = {"--calibration": origin.calibration, "--probes": origin.probes}
    missing = [name for name, path in files.items() if path is None]
    if missing and not origin.random:
        raise ConfigError(
            f"a quantization of trained weights needs {' and '.join(missing)}: files with one source per line, or "
            "source, TAB and target (a few hundred lines each, not the same ones)"
        )
    calibration, probes = (
        random_examples(spec, seed) if path is None else examples_from_file(path, spec, tokenizer)
        for seed, path in enumerate(files.values())
    )
    return calibration, probes


def quantize_request(precision: Precision | QuantizeRequest) -> QuantizeRequest | None:
    """Return how matrices become integers; None for floats."""
    if isinstance(precision, QuantizeRequest):
        return precision
    return QuantizeRequest(precision=precision) if precision in ("int8", "int4") else None


def checked_floats(record: TargetRecord, precision: object) -> FloatPrecision:
    """Return a precision of floats; raise, with what to type, for one that the target does not take."""
    for name in get_args(FloatPrecision):
        if precision == name:
            if refusal := record.refusal(name):
                raise ConfigError(refusal)
            return cast("FloatPrecision", name)
    raise ConfigError(f"precision must be one of {either(get_args(Precision))}, found {precision!r}")


def output_bias_of(model: Exportable) -> NDArray[np.float32] | None:
    """Return what a model adds to the product with its output matrix, [V]; None if it adds nothing."""
    bias = model.output_bias()
    return None if bias is None else bias.detach().numpy()


def _folder_beside(folder: Path) -> tempfile.TemporaryDirectory[str]:
    # Beside the bundle: the system's own temporary folder is often in memory, and weights are large.
    return tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent)


def written_graphs(
    model: Exportable, dialect: Dialect, work: str, stage: Callable[[str], None], seams: Seams | None
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the paths of the traced and the simplified graphs, by their names in the bundle."""
    first, second = Path(work) / "traced", Path(work) / "simplified"
    first.mkdir()
    second.mkdir()
    spec = model.spec
    with scaled_queries(model.inner):
        stage("tracing the encoder")
        traced = {ENCODER: traced_encoder(model, dialect, first / ENCODER)}
        stage("tracing the decoder")
        traced[DECODER] = traced_decoder(model, dialect, first / DECODER, seams)
    stage("simplifying")
    inputs = {ENCODER: spec.encoder_inputs(), DECODER: spec.decoder_inputs(branches=dialect == "ort")}
    graphs = {
        part: simplified(graph, second / part, drawn_samples(spec, inputs[part], dialect))
        for part, graph in traced.items()
    }
    return traced, graphs


def manifest_of(model: Exportable, origin: Origin, target: TargetRecord) -> Manifest:
    """Return the manifest of a model's fp32 graphs, without what depends on their files."""
    # The version of the module, not of a package: on a machine with a GPU another package installs it.
    versions = {package: version(package) for package in RECORDED} | {"onnxruntime": onnxruntime_module().__version__}
    return Manifest(
        spec=model.spec,
        target=target.name,
        precision="fp32",
        dialect=target.dialect,
        opset=OPSET,
        versions=versions,
        source=Provenance(name=origin.name, sha256=weights_hash(model.inner), licence=origin.licence),
        onnxruntime=(versions["onnxruntime"], versions["onnxruntime"]),
        text=None if origin.text is None else origin.text.record,
        settings={"top_k": model.spec.top_k, "threads": "as many as there are cores"},
        generation=origin.generation,
    )


def weights_hash(model: nn.Module) -> str:
    """Return a hash of everything that a checkpoint of the model would hold."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(model).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
