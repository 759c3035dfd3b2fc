"""The certificate of fp32 graphs: every logit of every step against the live reference."""

from contextlib import closing
from pathlib import Path

from fatdeploy.bundle import Bundle
from fatdeploy.certificate import Certificate
from fatdeploy.errors import ParityFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.proof.first_difference import where_it_begins
from fatdeploy.export.proof.known_tokens import KnownTokens
from fatdeploy.machine import this_machine
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.proof.lockstep import (
    Comparison,
    compared,
    logit_agreement,
)
from fatdeploy.runtimes.proof.probes import Probe, verified


def certified(
    model: Exportable, bundle: Bundle, probes: list[Probe], traced: dict[str, Path], graphs: dict[str, Path]
) -> Certificate:
    """Return the certificate of a bundle whose probes are written; a difference is ParityFailed and says its origin."""
    # Threads that spin while PyTorch computes would take its cores from it.
    with closing(OrtEngine(bundle, OrtOptions(spinning=False))) as engine:
        comparisons = _comparisons(engine, model, bundle, probes, (traced, graphs))
        parity = verified(engine, probes, [comparison.chosen for comparison in comparisons])
    return Certificate(
        engine="onnxruntime CPU",
        agreement=logit_agreement(comparisons),
        parity=parity,
        probes_sha256=bundle.manifest.files[PROBES].sha256,
        versions=bundle.manifest.versions,
        machine=this_machine(),
    )


def _comparisons(
    engine: OrtEngine,
    model: Exportable,
    bundle: Bundle,
    probes: list[Probe],
    graphs: tuple[dict[str, Path], dict[str, Path]],
) -> list[Comparison]:
    """Compare every logit of every step with the live reference's, which reads each row alone."""
    comparisons = []
    for index, probe in enumerate(probes):
        reference = KnownTokens(EagerEngine(model), probe)
        comparison = compared(engine, reference, probe.source, probe.mask, probe.tokens.shape[1])
        if comparison.first_miss is not None:
            raise ParityFailed(f"probe {index}: {where_it_begins(model, bundle, *graphs, probe)}")
        comparisons.append(comparison)
    return comparisons
