"""What a bundle is, from its manifest and certificate alone. Opens no graph, needs no engine."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fatdeploy.bundle import DECODER, EMBEDDING, ENCODER, PARITY, Bundle
from fatdeploy.errors import BundleError
from fatdeploy.records import json_from_record
from fatdeploy.tables import aligned


def inspected(bundle: Bundle) -> dict[str, Any]:
    """Return everything that there is to say of a bundle, as JSON values."""
    manifest, spec = bundle.manifest, bundle.spec
    branches = manifest.dialect == "ort"
    graphs = {
        ENCODER: (spec.encoder_inputs(), spec.encoder_outputs()),
        DECODER: (spec.decoder_inputs(branches=branches), spec.decoder_outputs()),
    }
    fixed = spec.fixed_axes(branches=branches)
    return {
        **json_from_record(manifest),
        "digest": bundle.digest,
        "bytes": bundle.total_bytes,
        "parameters": sum(group.parameters for group in manifest.weights.values()),
        "graphs": {
            name: {
                "inputs": [json_from_record(one.fixed(fixed)) for one in inputs],
                "outputs": [json_from_record(one.fixed(fixed)) for one in outputs],
                "ops": manifest.histograms.get(name, {}),
            }
            for name, (inputs, outputs) in graphs.items()
        },
        "certificate": _certificate(bundle),
    }


def _certificate(bundle: Bundle) -> Any:
    if PARITY not in bundle.manifest.files:
        return None
    try:
        certificate = json.loads(bundle.file(PARITY).read_text())
        # All that is shown of it must be there.
        _verified(certificate)
        _checked_on(certificate)
    except (ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BundleError(f"{bundle.path / PARITY} cannot be read: {reason}; export the bundle again") from error
    return certificate


def inspection_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield sections for a human."""
    yield from ["Bundle", *aligned(_bundle_rows(found), indent=2), ""]
    yield from ["Model", *aligned(_model_rows(found["spec"]), indent=2), ""]
    for name, graph in found["graphs"].items():
        yield from [name, *aligned(_tensor_rows(graph), indent=2), *_op_lines(graph["ops"]), ""]
    yield from ["Weights", *aligned(_weight_rows(found["weights"]), indent=2), ""]
    yield from ["Origin", *aligned(_origin_rows(found), indent=2)]


def _bundle_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    yield "target", f"{found['target']} ({found['dialect']} dialect, opset {found['opset']})"
    yield "precision", found["precision"] + _quantized(found["quantization"])
    yield "size", f"{found['bytes'] / 1e6:.1f} MB in {len(found['files']) + 1} files"
    yield "parameters", f"{found['parameters']:,}"
    yield "digest", found["digest"]


def _quantized(quantization: dict[str, Any] | None) -> str:
    """Say for which CPUs a bundle's integers are, and how many matrices are stored in which way."""
    if quantization is None:
        return ""
    matrices = {name: kind for name, kind in quantization["matrices"].items() if name != EMBEDDING}
    kinds = [f"{count} {kind}" for kind, count in sorted(Counter(matrices.values()).items())]
    embedding = quantization["matrices"].get(EMBEDDING)
    return (
        f" for --cpu {quantization['cpu']} ({quantization['weight_bits']}-bit weights in int8); "
        f"{len(matrices)} matrices: {', '.join(kinds)}" + (f"; embedding {embedding}" if embedding else "")
    )


def _model_rows(spec: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    yield "vocabulary", f"{spec['vocab_size']:,} (pad {spec['pad_id']}, bos {spec['bos_id']}, eos {spec['eos_id']})"
    yield "longest", f"source {spec['max_source']}, target {spec['max_target']}"
    yield "decoding", spec["decoding"] + (f", length from {spec['length']}" if spec["decoding"] == "parallel" else "")
    yield "target order", spec["target_order"].replace("_", " ")
    yield "best tokens", str(spec["top_k"])
    if spec["alignment"]:
        yield "alignments", f"cross-attention of layer {spec['alignment']['layer']}"


def _tensor_rows(graph: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for kind, tensors in (("in", graph["inputs"]), ("out", graph["outputs"])):
        for one in tensors:
            yield kind, one["name"], one["dtype"], f"[{', '.join(map(str, one['shape']))}]"


def _op_lines(ops: dict[str, dict[str, int]]) -> Iterator[str]:
    for stage in sorted(ops, reverse=True):  # traced, then simplified
        counts = ops[stage]
        most = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
        yield f"  {stage}: {sum(counts.values())} ops: {', '.join(f'{count} {name}' for name, count in most)}"


def _weight_rows(weights: dict[str, dict[str, int]]) -> Iterator[tuple[str, ...]]:
    yield "part", "tensors", "parameters", "MB"
    for name, group in sorted(weights.items(), key=lambda entry: -entry[1]["bytes"]):
        yield name or "(none)", str(group["tensors"]), f"{group['parameters']:,}", f"{group['bytes'] / 1e6:.2f}"


def _origin_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    source, certificate = found["source"], found["certificate"]
    yield "source", source["name"]
    yield "weights", f"sha256 {source['sha256']}"
    yield "licence", source["licence"] or "not said"
    yield "made with", ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    if certificate:
        yield "verified", _verified(certificate)
        if certificate.get("checked_on"):
            yield "checked on", _checked_on(certificate)


def _verified(certificate: dict[str, Any]) -> str:
    parity, cpu = certificate["parity"], certificate["machine"]["cpu"] or "an unknown CPU"
    # Half precision has some of the reference's tokens, fp32 all.
    some = f"{parity['same']} of " if "same" in parity else ""
    exact = f"{some}{parity['tokens']} tokens of {parity['rows']} rows on {cpu}, {certificate['engine']}"
    if "gate" not in certificate:
        return exact
    gate, precision = certificate["gate"], certificate["precision"]
    found, bar = gate["agreement"], f"the bar was {gate['bar']:.2%}" if gate["enforced"] else "random weights: no bar"
    return f"{precision}: {found['share']:.2%} of {found['tokens']} tokens ({bar}); before, in fp32: {exact}"


def _checked_on(certificate: dict[str, Any]) -> str:
    """Say on which kinds of CPU a quantized bundle was checked, and how close it was there."""
    entries = certificate.get("checked_on", [])
    return ", ".join(f"{one['cpu_class'] or 'an unknown CPU'} ({one['share']:.2%})" for one in entries)
