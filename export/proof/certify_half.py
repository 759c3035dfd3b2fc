"""The certificate of a bundle in half precision: how many tokens are the reference's, and how near the logits are."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.certificate import Certificate, HalfParity, OwnGraphs
from fatdeploy.errors import ParityFailed
from fatdeploy.export.half.emulation import rounded
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.package import write_graphs
from fatdeploy.export.proof.known_tokens import KnownTokens
from fatdeploy.machine import this_machine
from fatdeploy.manifest import DECODER, ENCODER, PROBES
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Engine, Floats
from fatdeploy.runtimes.proof.forced import decoder_inputs, forced_logits
from fatdeploy.runtimes.proof.lockstep import Comparison, compared
from fatdeploy.runtimes.proof.probes import Probe, row_alone

# The least share of the reference's tokens that a trained model must choose, each after the reference's own.
LEAST_AGREEMENT = 0.995
# What was executed for the comparison, in words, because it is easy to believe more.
ROUNDED = (
    "copies of the bundle's graphs in float32, on onnxruntime's CPU provider, the result of every {0} op rounded to "
    "{0} and sums inside of an op in float32. No GPU ran anything"
)
OWN = (
    "the bundle's own graphs, on onnxruntime's CPU provider, which has few kernels for fp16: it computes in float32 "
    "and leaves out roundings between ops, so its logits may be nearer to the reference than a GPU's"
)
NOT_EXECUTED = (
    "not executed: onnxruntime's CPU provider has no kernels for bf16. The bundle's own graphs were checked for "
    "structure and types alone"
)


def certified_half(model: Exportable, bundle: Bundle, probes: list[Probe], *, trained: bool) -> Certificate:
    """Return the certificate of a bundle whose probes are written; a trained model that loses too much is refused.

    What counts is the emulation in float32, rounded op by op: onnxruntime runs fp16 on a CPU with fewer roundings than
    there are ops, and bf16 not at all.
    """
    precision = bundle.manifest.precision
    least = LEAST_AGREEMENT if trained else None
    with emulated_engine(bundle) as emulation:
        parity = half_parity(emulation, model, probes, least)
    own = OwnGraphs(NOT_EXECUTED)
    if precision == "fp16":
        with closing(OrtEngine(bundle, OrtOptions(spinning=False))) as engine:
            own = OwnGraphs(OWN, half_parity(engine, model, probes, least))
    return Certificate(
        engine=f"onnxruntime CPU, {precision} emulated in float32",
        executed=ROUNDED.format(precision),
        parity=parity,
        own_graphs=own,
        probes_sha256=bundle.manifest.files[PROBES].sha256,
        versions=bundle.manifest.versions,
        machine=this_machine(),
    )


@contextmanager
def emulated_engine(bundle: Bundle) -> Iterator[OrtEngine]:
    """Yield an engine that runs a half-precision bundle in float32, the result of every op rounded as half would be."""
    with tempfile.TemporaryDirectory(dir=bundle.path.parent) as folder:
        work, emulation = Path(folder) / "rounded", Path(folder) / "emulation"
        work.mkdir()
        emulation.mkdir()
        write_graphs({part: rounded(bundle.file(part), work / part) for part in (ENCODER, DECODER)}, emulation)
        manifest = replace(bundle.manifest, spec=bundle.spec.widened(), precision="fp32", output_matrix=None)
        with closing(
            OrtEngine(write_manifest(emulation, manifest), OrtOptions(spinning=False, optimised=False))
        ) as engine:
            yield engine


def half_parity(engine: Engine[Any], model: Exportable, probes: Sequence[Probe], least: float | None) -> HalfParity:
    """Return how close an engine is to the live reference; a smaller share of its tokens than ``least`` is an error."""
    comparisons = [_compared(engine, model, probe, index) for index, probe in enumerate(probes)]
    alone = [_alone(engine, probe) for probe in probes if len(probe.source) > 1]
    tokens, same = (sum(count) for count in zip(*map(_fidelity, comparisons), strict=True))
    if least is not None and same < least * tokens:
        raise ParityFailed(
            f"{same} of {tokens} tokens ({same / tokens:.2%}) are the reference's, a trained model must have at least "
            f"{least:.1%}: export with --precision fp32, or bf16 instead of fp16 if its numbers are large"
        )
    return HalfParity(
        probes=len(probes),
        rows=sum(len(probe.tokens) for probe in probes),
        tokens=tokens,
        same=same,
        agreement=same / tokens,
        least_agreement=least,
        largest_difference=max(float(comparison.differences.max()) for comparison in comparisons),
        largest_logit=max(float(np.abs(comparison.chosen).max()) for comparison in comparisons),
        largest_difference_alone=max((difference for difference, _ in alone), default=0.0),
        different_tokens_alone=sum(count for _, count in alone),
    )


def _fidelity(comparison: Comparison) -> tuple[int, int]:
    """Return how many tokens were compared, and how many are the same."""
    return comparison.expected.size, int((comparison.expected == comparison.found).sum())


def _compared(engine: Engine[Any], model: Exportable, probe: Probe, index: int) -> Comparison:
    reference = KnownTokens(EagerEngine(model), probe)
    comparison = compared(engine, reference, probe.source, probe.mask, probe.tokens.shape[1])
    wrong = np.argwhere(~np.isfinite(comparison.differences))
    if wrong.size:
        row, step = wrong[0].tolist()
        raise ParityFailed(
            f"probe {index}, row {row}, step {step}: a logit is infinite or not a number, beyond the range of the "
            "precision: export with --precision bf16 or fp32"
        )
    return comparison


def _alone(engine: Engine[Any], probe: Probe) -> tuple[float, int]:
    """Return how far the logits of a row in its batch and alone are apart, and how many tokens differ."""
    together = _forced(engine, probe)
    alone = np.concatenate([_forced(engine, row_alone(probe, row)) for row in range(len(together))])
    different = together.argmax(-1) != alone.argmax(-1)
    return float(np.abs(together - alone).max()), int(different.sum())


def _forced(engine: Engine[Any], probe: Probe) -> Floats:
    """Return the logits [B, T, V] of a decode that reads the reference's tokens."""
    inputs = decoder_inputs(engine.spec, probe.tokens)
    return forced_logits(engine, probe.source, probe.mask, inputs, step_by_step=True)
