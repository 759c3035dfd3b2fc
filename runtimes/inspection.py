"""What a bundle is, from its manifest and certificate alone. Opens no graph, needs no engine."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.certificate import Certificate, CpuCheck, GateResult, HalfParity, read_certificate
from fatdeploy.manifest import (
    DECODER,
    EMBEDDING,
    ENCODER,
    PARITY,
    SHORTLIST,
    GenerationRecord,
    Manifest,
    Quantization,
    ShortlistRecord,
)
from fatdeploy.records import json_from_record, shown
from fatdeploy.spec import ModelSpec, TensorSpec
from fatdeploy.tables import aligned


@dataclass(frozen=True)
class GraphContract:
    """The contract of one graph, and its operators counted after each stage of the export."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    ops: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Inspection:
    """A bundle whose files are what its manifest says, and its certificate if it has one."""

    bundle: Bundle
    certificate: Certificate | None

    @property
    def parameters(self) -> int:
        """The number of weights; weights that parts share are counted once."""
        return sum(group.parameters for group in self.bundle.manifest.weights.values())

    @property
    def graphs(self) -> dict[str, GraphContract]:
        """The contract of each graph."""
        manifest, spec = self.bundle.manifest, self.bundle.spec
        tensors = {
            ENCODER: (spec.encoder_inputs(), spec.encoder_outputs()),
            DECODER: (spec.decoder_inputs(branches=manifest.branches), spec.decoder_outputs()),
        }
        sizes = spec.fixed_axes(branches=manifest.branches)
        return {
            name: GraphContract(
                tuple(tensor.fixed(sizes) for tensor in inputs),
                tuple(tensor.fixed(sizes) for tensor in outputs),
                manifest.histograms.get(name, {}),
            )
            for name, (inputs, outputs) in tensors.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            **json_from_record(self.bundle.manifest),
            "digest": self.bundle.digest,
            "bytes": self.bundle.total_bytes,
            "parameters": self.parameters,
            "graphs": json_from_record(self.graphs),
            "certificate": None if self.certificate is None else self.certificate.as_dict(),
        }

    def lines(self) -> Iterator[str]:
        """Yield sections for a human."""
        yield from ["Bundle", *aligned(_bundle_rows(self), indent=2), ""]
        yield from ["Model", *aligned(_model_rows(self.bundle.spec), indent=2), ""]
        if rows := list(_text_rows(self.bundle.manifest)):
            yield from ["Text", *aligned(rows, indent=2), ""]
        if (generation := self.bundle.manifest.generation) is not None:
            yield from ["Default options", *aligned(_generation_rows(generation), indent=2), ""]
        if (shortlist := self.bundle.manifest.shortlist) is not None:
            yield from ["Shortlist", *aligned(_shortlist_rows(self.bundle, shortlist), indent=2), ""]
        for name, graph in self.graphs.items():
            yield from [name, *aligned(_tensor_rows(graph), indent=2), *_op_lines(graph.ops), ""]
        yield from ["Weights", *aligned(_weight_rows(self.bundle), indent=2), ""]
        if self.certificate is not None and self.certificate.gate is not None and self.certificate.gate.plan:
            yield from ["Plan", *aligned(_plan_rows(self.certificate.gate), indent=2), ""]
        yield from ["Origin", *aligned(_origin_rows(self), indent=2)]


def inspect(path: str | Path) -> Inspection:
    """Return what a bundle holds; every file is checked against its hash first, and no graph is opened."""
    return inspected(read_bundle(path))


def inspected(bundle: Bundle) -> Inspection:
    """Return a bundle with its certificate."""
    return Inspection(bundle, read_certificate(bundle) if PARITY in bundle.manifest.files else None)


def _bundle_rows(inspection: Inspection) -> Iterator[tuple[str, ...]]:
    bundle, manifest = inspection.bundle, inspection.bundle.manifest
    yield "target", f"{manifest.target} ({manifest.dialect} dialect, opset {manifest.opset})"
    yield "precision", manifest.precision + _quantized(manifest.quantization)
    yield "size", f"{bundle.total_bytes / 1e6:.1f} MB in {len(manifest.files) + 1} files"
    yield "parameters", f"{inspection.parameters:,}"
    yield "digest", bundle.digest


def _quantized(quantization: Quantization | None) -> str:
    """Return for which CPUs a bundle's integers are, and how many matrices are stored in which way."""
    if quantization is None:
        return ""
    matrices = {name: kind for name, kind in quantization.matrices.items() if name != EMBEDDING}
    kinds = [f"{count} {kind}" for kind, count in sorted(Counter(matrices.values()).items())]
    embedding = quantization.matrices.get(EMBEDDING)
    return (
        f" for --cpu {quantization.cpu} ({quantization.weight_bits}-bit weights in int8); "
        f"{len(matrices)} matrices: {', '.join(kinds)}" + (f"; embedding {embedding}" if embedding else "")
    )


def _model_rows(spec: ModelSpec) -> Iterator[tuple[str, ...]]:
    yield "vocabulary", f"{spec.vocab_size:,} (pad {spec.pad_id}, bos {spec.bos_id}, eos {spec.eos_id})"
    yield "longest", f"source {spec.max_source}, target {spec.max_target}"
    yield "decoding", spec.decoding + (f", length from {spec.length}" if spec.decoding == "parallel" else "")
    yield "target order", spec.target_order.replace("_", " ")
    yield "best tokens", str(spec.top_k)
    if spec.alignment is not None:
        yield "alignments", f"cross-attention of layer {spec.alignment.layer}"


def _text_rows(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    text = manifest.text
    if text is None:
        return
    yield "tokenizer", text.kind.replace("_", ".") + (f" ({', '.join(text.files)})" if text.files else "")
    if (conversion := text.conversion) is not None:
        counts = f"{conversion.different_ids} with other tokens, {conversion.different_texts} with another text"
        yield "converted", f"of {conversion.texts} texts {counts}"
    if text.languages is None:
        return
    defaults = {"source": text.languages.default_source, "target": text.languages.default_target}
    yield "defaults", ", ".join(f"{side} {code or 'none'}" for side, code in defaults.items())
    lines = wrap(" ".join(sorted(text.languages.ids)), 88, break_long_words=False, break_on_hyphens=False)
    yield from ((f"languages ({len(text.languages.ids)})" if line is lines[0] else "", line) for line in lines)


def _generation_rows(generation: GenerationRecord) -> Iterator[tuple[str, ...]]:
    """Yield how the bundle decodes by default, and the settings of its model that fatdeploy does not have."""
    for name, value in sorted(generation.options.items()):
        yield shown(name), shown(value), ""
    for name, value in sorted(generation.ignored.items()):
        yield shown(name), shown(value), "ignored: not available in fatdeploy"
    if not generation.options and not generation.ignored:
        yield "none", "greedy", ""


def _shortlist_rows(bundle: Bundle, record: ShortlistRecord) -> Iterator[tuple[str, ...]]:
    size = bundle.manifest.files[SHORTLIST].size if SHORTLIST in bundle.manifest.files else 0
    yield (
        "size",
        f"{record.frequent:,} frequent tokens, {record.entries:,} more for {record.source_tokens:,} source tokens",
    )
    yield "stored", f"{size / 1e6:.2f} MB, from {record.lines:,} lines, aligned by {record.aligned_by}"
    yield "agreement", record.line()


def _tensor_rows(graph: GraphContract) -> Iterator[tuple[str, ...]]:
    for kind, tensors in (("in", graph.inputs), ("out", graph.outputs)):
        for tensor in tensors:
            yield kind, tensor.name, tensor.dtype, f"[{', '.join(map(str, tensor.shape))}]"


def _op_lines(ops: dict[str, dict[str, int]]) -> Iterator[str]:
    for stage in sorted(ops, reverse=True):  # traced, then simplified
        counts = ops[stage]
        most = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
        yield f"  {stage}: {sum(counts.values())} ops: {', '.join(f'{count} {name}' for name, count in most)}"


def _weight_rows(bundle: Bundle) -> Iterator[tuple[str, ...]]:
    yield "part", "tensors", "parameters", "MB"
    for name, group in sorted(bundle.manifest.weights.items(), key=lambda entry: -entry[1].bytes):
        yield name or "(none)", str(group.tensors), f"{group.parameters:,}", f"{group.bytes / 1e6:.2f}"


def _plan_rows(gate: GateResult) -> Iterator[tuple[str, ...]]:
    """Yield how the exporter stored each matrix, the error that it expected of that and the cost that it measured."""
    in_bytes = any(matrix.in_bytes for matrix in gate.plan)
    rows = "1 row" if gate.rows == 1 else f"{gate.rows} rows"
    yield "matrix", "form", "error", "bytes" if in_bytes else f"µs per step of {rows}"
    for matrix in gate.plan:
        yield (
            matrix.name,
            matrix.kind,
            f"{matrix.error:.1e}",
            f"{matrix.cost:,.0f}" if in_bytes else f"{matrix.cost:.1f}",
        )


def _origin_rows(inspection: Inspection) -> Iterator[tuple[str, ...]]:
    manifest, certificate = inspection.bundle.manifest, inspection.certificate
    yield "source", manifest.source.name
    yield "weights", f"sha256 {manifest.source.sha256}"
    yield "licence", manifest.source.licence or "not given"
    yield "made with", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
    if certificate is not None:
        yield "verified", _verified(certificate)
        if certificate.checked_on:
            yield "checked on", ", ".join(map(_checked, certificate.checked_on))


def _verified(certificate: Certificate) -> str:
    parity, cpu = certificate.parity, certificate.machine.cpu or "an unknown CPU"
    # Half precision has some of the reference's tokens, fp32 all.
    some = f"{parity.same} of " if isinstance(parity, HalfParity) else ""
    exact = f"{some}{parity.tokens} tokens of {parity.rows} rows on {cpu}, {certificate.engine}"
    gate = certificate.gate
    if gate is None:
        return exact
    bar = "random weights: no bar"
    if gate.enforced:
        bar = f"the bar was {gate.points} points" if gate.by_metric else f"the bar was {gate.bar:.2%}"
    counts = f"{gate.agreement.share:.2%} of {gate.agreement.tokens} tokens"
    return f"{certificate.precision}: {counts} ({bar}); before, in fp32: {exact}"


def _checked(check: CpuCheck) -> str:
    """Return a kind of CPU, and how close a quantized bundle was there."""
    return f"{check.cpu_class or 'an unknown CPU'} ({check.share:.2%})"
