"""The parity certificate, and its probes: sources whose steps are decided so clearly that equality has no excuse."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fatdeploy.bundle import Bundle
from fatdeploy.certificate import Certificate
from fatdeploy.errors import ExportFailed, ParityFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.proof.first_difference import where_it_begins
from fatdeploy.export.proof.known_tokens import KnownTokens
from fatdeploy.machine import this_machine
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Want
from fatdeploy.runtimes.proof.lockstep import (
    NOISE,
    SAFE_MARGINS,
    Comparison,
    compared,
    logit_agreement,
    margins_of,
)
from fatdeploy.runtimes.proof.probes import Probe, verified
from fatdeploy.spec import ModelSpec, Tokens

NEW_TOKENS = 48
# Source lengths of each batch; None is the longest the model takes.
BATCHES: tuple[tuple[int | None, ...], ...] = ((7,), (1, 31, None), (1, 2, 7, 31, 2, 7, 31, 1))
# Random sources that are tried in vain before weights are called undecided, and how many at once at most.
TRIES, MOST = 96, 16


def certified(
    model: Exportable, bundle: Bundle, probes: list[Probe], traced: dict[str, Path], graphs: dict[str, Path]
) -> Certificate:
    """Return the certificate of a bundle whose probes are written; a difference is ParityFailed and says its origin."""
    # Threads that spin while PyTorch computes would take its cores from it.
    engine = OrtEngine(bundle, OrtOptions(spinning=False))
    try:
        comparisons = _comparisons(engine, model, bundle, probes, (traced, graphs))
        parity = verified(engine, probes, [one.chosen for one in comparisons])
    finally:
        engine.close()
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
        found = compared(engine, reference, probe.source, probe.mask, probe.tokens.shape[1])
        if found.first_miss is not None:
            raise ParityFailed(f"probe {index}: {where_it_begins(model, bundle, *graphs, probe)}")
        comparisons.append(found)
    return comparisons


@dataclass
class Row:
    """A source and what the reference has made of it so far."""

    source: Tokens  # [S]
    tokens: list[Tokens] = field(default_factory=list)  # of each call, [t]
    best: list[Floats] = field(default_factory=list)
    largest: float = 1.0  # of all logits by size, but at least 1
    margin: float = np.inf

    def add(self, logits: Floats) -> None:
        """Take in the logits [t, V] of another call."""
        self.tokens.append(logits.argmax(-1))
        self.best.append(logits.max(-1))
        self.largest = max(self.largest, float(np.abs(logits).max()))
        self.margin = min(self.margin, float(margins_of(logits).min()))

    @property
    def bound(self) -> float:
        """How far two correct fp32 computations of its logits may be apart."""
        return NOISE * self.largest

    @property
    def safe(self) -> bool:
        """Whether no step of it is decided by less than ten times the noise; once it is not, it stays so."""
        return self.margin >= SAFE_MARGINS * self.bound


def drawn_probes(engine: EagerEngine, seed: int = 0) -> list[Probe]:
    """Return padded probes in batches of 1, 3 and 8, of lengths 1 to the longest, and one row to max_target."""
    spec, draw = engine.spec, np.random.default_rng(seed)
    batches = [[min(length or spec.max_source, spec.max_source) for length in batch] for batch in BATCHES]
    rows = _safe_rows(engine, [length for batch in batches for length in batch], min(NEW_TOKENS, spec.max_target), draw)
    longest = _safe_rows(engine, [min(7, spec.max_source)], spec.max_target, draw)
    return [*(_probe([next(rows) for _ in batch], spec) for batch in batches), _probe([*longest], spec)]


def drawn_probe(engine: EagerEngine, lengths: Sequence[int], steps: int, seed: int = 0) -> Probe:
    """Return one batch of random sources of these lengths, safe for so many steps."""
    return _probe([*_safe_rows(engine, lengths, steps, np.random.default_rng(seed))], engine.spec)


def _safe_rows(engine: EagerEngine, lengths: Sequence[int], steps: int, draw: np.random.Generator) -> Iterator[Row]:
    """Return random sources of these lengths, in their order, that are safe for so many steps."""
    # A length at a time: padding short sources to the longest would cost most of the time.
    rows = {length: iter(_found(engine, length, count, steps, draw)) for length, count in Counter(lengths).items()}
    return (next(rows[length]) for length in lengths)


def _found(engine: EagerEngine, length: int, count: int, steps: int, draw: np.random.Generator) -> list[Row]:
    """Return so many safe rows of a length; as many are tried at once as are missing, more after tries in vain."""
    special = {engine.spec.pad_id, engine.spec.bos_id, engine.spec.eos_id}
    ordinary = [token for token in range(engine.spec.vocab_size) if token not in special]
    found: list[Row] = []
    tried = 0
    while len(found) < count and tried < TRIES:
        at_once = min(max(count - len(found), tried), MOST)
        rows = _safe_of(engine, draw.choice(ordinary, (at_once, length)), steps)
        tried = 0 if rows else tried + at_once
        found += rows
    if len(found) < count:
        raise ExportFailed(
            f"none of {tried} random sources of length {length} keeps a safe margin between the best and "
            f"the next token for {steps} steps: these weights decide by chance, and parity on them would prove nothing"
        )
    return found


def _safe_of(engine: EagerEngine, source: Tokens, steps: int) -> list[Row]:
    """Return the safe rows of a batch; the others leave it at the step that shows it, often long before the last."""
    parallel = engine.spec.decoding == "parallel"
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, steps))
    tokens = np.full((len(source), steps if parallel else 1), engine.spec.bos_id)
    rows = [Row(ids) for ids in source]
    for _ in range(1 if parallel else steps):
        logits = engine.step(tokens, state, Want.LOGITS).logits
        assert logits is not None  # noqa: S101 - they were wanted
        for row, said in zip(rows, logits, strict=True):
            row.add(said)
        kept = [index for index, row in enumerate(rows) if row.safe]
        if not kept:
            return []
        if len(kept) < len(rows):
            engine.reorder(state, np.array(kept))
            rows = [rows[index] for index in kept]
        tokens = np.stack([row.tokens[-1] for row in rows])
    return rows


def _probe(rows: list[Row], spec: ModelSpec) -> Probe:
    mask = np.arange(max(len(row.source) for row in rows)) < np.array([len(row.source) for row in rows])[:, None]
    source = np.full(mask.shape, spec.pad_id)
    source[mask] = np.concatenate([row.source for row in rows])
    return Probe(
        source=source,
        mask=mask,
        tokens=np.stack([np.concatenate(row.tokens) for row in rows]),
        best=np.stack([np.concatenate(row.best) for row in rows]),
        bounds=np.array([row.bound for row in rows]),
        margins=np.array([row.margin for row in rows]),
    )
