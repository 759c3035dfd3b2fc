"""The way from a reference model to a bundle: trace, simplify, package, certify."""

import hashlib
import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx

from fatdeploy.bundle import (
    DECODER,
    ENCODER,
    PARITY,
    PROBES,
    Bundle,
    Dialect,
    Manifest,
    Provenance,
    read_bundle,
    write_manifest,
)
from fatdeploy.export.certify import drawn_probes
from fatdeploy.export.dialects import OPSET
from fatdeploy.export.eager import EagerEngine
from fatdeploy.export.package import write_graphs
from fatdeploy.export.reference.checkpoint import stored_tensors
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.simplify import Arrays, op_histogram, simplified
from fatdeploy.export.trace import check_expressible, traced_decoder, traced_encoder
from fatdeploy.folders import replaced_folder
from fatdeploy.machine import this_machine
from fatdeploy.runtimes.engine import Want
from fatdeploy.runtimes.ort import OrtEngine
from fatdeploy.runtimes.verify import Probe, verified, write_probes
from fatdeploy.spec import ModelSpec, TensorSpec

log = logging.getLogger("fatdeploy")

# Shapes on which a simplified graph must give the traced one's numbers: batch, rows a source, source, step, capacity.
SAMPLES = ((1, 1, 1, 1, 4), (2, 3, 5, 4, 9), (3, 1, 9, 2, 12))
RECORDED = ("fatdeploy", "torch", "onnx", "onnxscript", "onnxsim", "onnxruntime", "numpy")


def write_bundle(
    model: ReferenceModel,
    folder: Path,
    *,
    name: str,
    dialect: Dialect = "ort",
    force: bool = False,
    stage: Callable[[str], None] = log.info,
) -> Bundle:
    """Export a model to a folder and return the bundle; a crash or a miss leaves what stood there before.

    ``stage`` is told what begins.
    """
    check_expressible(model, dialect)
    spec = model.spec
    with replaced_folder(folder, force=force) as new:
        stage("tracing the encoder")
        traced = {ENCODER: traced_encoder(model, dialect)}
        stage("tracing the decoder")
        traced[DECODER] = traced_decoder(model, dialect)
        stage("simplifying")
        inputs = {ENCODER: spec.encoder_inputs(), DECODER: spec.decoder_inputs(branches=dialect == "ort")}
        graphs = {part: simplified(graph, _samples(spec, inputs[part], dialect)) for part, graph in traced.items()}
        write_graphs(graphs, new)
        manifest = _manifest(model, name, dialect, traced, graphs)
        stage("drawing probes from the reference")
        probes = drawn_probes(EagerEngine(model))
        stage("comparing the graphs with the reference")
        _certify(write_manifest(new, manifest), probes)
        write_manifest(new, manifest)
    return read_bundle(folder)


def _certify(bundle: Bundle, probes: list[Probe]) -> None:
    """Write probes and certificate beside the graphs; a difference is ParityFailed."""
    engine = OrtEngine(bundle)
    parity = verified(engine, probes)
    engine.close()
    write_probes(bundle.path / PROBES, probes)
    certificate = {
        "engine": "onnxruntime CPU",
        "parity": parity.as_dict(),
        "probes_sha256": hashlib.sha256((bundle.path / PROBES).read_bytes()).hexdigest(),
        "versions": bundle.manifest.versions,
        "machine": this_machine().as_dict(),
    }
    (bundle.path / PARITY).write_text(json.dumps(certificate, indent=2, sort_keys=True) + "\n")


def _manifest(
    model: ReferenceModel,
    name: str,
    dialect: Dialect,
    traced: dict[str, onnx.ModelProto],
    graphs: dict[str, onnx.ModelProto],
) -> Manifest:
    histograms = {
        part: {"traced": op_histogram(traced[part]), "simplified": op_histogram(graphs[part])} for part in graphs
    }
    return Manifest(
        spec=model.spec,
        target="ort-cpu" if dialect == "ort" else "onnx",
        precision="fp32",
        dialect=dialect,
        opset=OPSET,
        versions={package: version(package) for package in RECORDED},
        source=Provenance(name=name, sha256=_weights_hash(model), licence=None),
        onnxruntime=(version("onnxruntime"), version("onnxruntime")),
        settings={"top_k": model.spec.top_k},
        histograms=histograms,
    )


def _weights_hash(model: ReferenceModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(model).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _samples(spec: ModelSpec, inputs: tuple[TensorSpec, ...], dialect: Dialect) -> list[Arrays]:
    """Return random inputs of three shapes."""
    samples = []
    for seed, (batch, each, source, step, capacity) in enumerate(SAMPLES):
        capacity = min(capacity, spec.max_target) if dialect == "ort" else spec.max_target  # noqa: PLW2901
        sizes = {"batch": batch, "rows": batch * each, "capacity": capacity}
        sizes |= {"source": min(source, spec.max_source), "step": min(step, spec.max_target)}
        draw = np.random.default_rng(seed)
        samples.append({one.name: _drawn(one, sizes, spec, draw) for one in inputs})
    return samples


def _drawn(one: TensorSpec, sizes: dict[str, int], spec: ModelSpec, draw: np.random.Generator) -> np.ndarray:
    shape = one.sized(sizes)
    if one == spec.want:
        return np.array(int(Want.TOPK))
    if one == spec.position:
        return np.array(0)
    if one.dtype == "bool":
        # Right-padded: every row has its first token.
        return np.arange(shape[-1]) < draw.integers(1, shape[-1] + 1, (*shape[:-1], 1))
    if one.dtype == "int64":
        return draw.integers(0, spec.vocab_size, shape)
    if one in spec.past:
        # Sums of features are positive; a normaliser near zero would turn rounding into a difference.
        return draw.uniform(0.5, 1.5, shape).astype(np.float32)
    return draw.standard_normal(shape, np.float32)
