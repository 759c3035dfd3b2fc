"""The parity certificate, and its probes: sources whose steps are decided so clearly that equality has no excuse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fatdeploy.bundle import PROBES, Bundle
from fatdeploy.errors import ExportFailed, ParityFailed
from fatdeploy.export.bisect import where_it_begins
from fatdeploy.export.contract import Flat
from fatdeploy.export.eager import EagerEngine, EagerState
from fatdeploy.machine import this_machine
from fatdeploy.runtimes.engine import Capacity, Floats, StepOut, Want
from fatdeploy.runtimes.lockstep import (
    NOISE,
    SAFE_MARGINS,
    Comparison,
    agreement_of,
    compared,
    greedy_calls,
    margins_of,
)
from fatdeploy.runtimes.ort import OrtEngine
from fatdeploy.runtimes.verify import Probe, verified
from fatdeploy.spec import Mask, ModelSpec, Tokens

NEW_TOKENS = 48
# Source lengths of each batch; None is the longest the model takes.
BATCHES: tuple[tuple[int | None, ...], ...] = ((7,), (1, 31, None), (1, 2, 7, 31, 2, 7, 31, 1))
# Random sources that are tried in vain before weights are called undecided, and how many at once.
TRIES, FEWEST, MOST = 96, 2, 16


def certified(
    model: Flat, bundle: Bundle, probes: list[Probe], traced: dict[str, Path], graphs: dict[str, Path]
) -> dict[str, Any]:
    """Return the certificate of a bundle whose probes are written; a difference is ParityFailed and says its origin."""
    # Threads that spin while PyTorch computes would take its cores from it.
    engine = OrtEngine(bundle, spinning=False)
    try:
        comparisons = _comparisons(engine, model, bundle, probes, (traced, graphs))
        parity = verified(engine, probes, [one.chosen for one in comparisons])
    finally:
        engine.close()
    return {
        "engine": "onnxruntime CPU",
        "agreement": agreement_of(comparisons).as_dict(),
        "parity": parity.as_dict(),
        "probes_sha256": bundle.manifest.files[PROBES].sha256,
        "versions": bundle.manifest.versions,
        "machine": this_machine().as_dict(),
    }


def _comparisons(
    engine: OrtEngine, model: Flat, bundle: Bundle, probes: list[Probe], graphs: tuple[dict[str, Path], dict[str, Path]]
) -> list[Comparison]:
    """Compare every logit of every step with the live reference's, which reads each row alone."""
    comparisons = []
    for index, probe in enumerate(probes):
        found = compared(engine, RowsAlone(EagerEngine(model)), probe.source, probe.mask, probe.tokens.shape[1])
        if found.first_miss is not None:
            raise ParityFailed(f"probe {index}: {where_it_begins(model, bundle, *graphs, probe)}")
        comparisons.append(found)
    return comparisons


class RowsAlone:
    """Runs every row of a batch alone and without padding: who agrees with it lets no row depend on its batch.

    It is also the quickest way to a reference: its encoder does not read short sources padded to the longest.
    """

    def __init__(self, engine: EagerEngine) -> None:
        self.engine = engine
        self.spec = engine.spec

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> list[EagerState]:
        """Return a state for each row."""
        rows = [ids[None, real] for ids, real in zip(source, mask, strict=True)]
        return [self.engine.encode(row, np.ones_like(row, bool), capacity) for row in rows]

    def step(self, tokens: Tokens, state: list[EagerState], want: Want) -> StepOut:
        """Feed each row its tokens and return the logits of all."""
        said = [self.engine.step(row[None], one, want) for row, one in zip(tokens, state, strict=True)]
        return StepOut(logits=np.concatenate([one.logits for one in said if one.logits is not None]))

    def release(self, state: list[EagerState]) -> None:
        """Nothing is kept for the next state."""


@dataclass(frozen=True)
class Row:
    """A source and what the reference makes of it."""

    source: Tokens  # [S]
    tokens: Tokens  # [T]
    best: Floats  # [T]
    bound: float
    margin: float

    @property
    def safe(self) -> bool:
        """Whether no step of it is decided by less than ten times the noise."""
        return self.margin >= SAFE_MARGINS * self.bound


def drawn_probes(engine: EagerEngine, seed: int = 0) -> list[Probe]:
    """Return padded probes in batches of 1, 3 and 8, of lengths 1 to the longest, and one row to max_target."""
    spec, draw = engine.spec, np.random.default_rng(seed)
    steps = min(NEW_TOKENS, spec.max_target)
    batches = [[min(length or spec.max_source, spec.max_source) for length in batch] for batch in BATCHES]
    # A length at a time: padding short sources to the longest would cost most of the time.
    safe = {length: _safe_rows(engine, length, steps, draw) for batch in batches for length in batch}
    longest = next(_safe_rows(engine, min(7, spec.max_source), spec.max_target, draw))
    return [*(_probe([next(safe[length]) for length in batch], spec) for batch in batches), _probe([longest], spec)]


def drawn_probe(engine: EagerEngine, lengths: Sequence[int], steps: int, seed: int = 0) -> Probe:
    """Return one batch of random sources of these lengths, safe for so many steps."""
    draw = np.random.default_rng(seed)
    safe = {length: _safe_rows(engine, length, steps, draw) for length in lengths}
    return _probe([next(safe[length]) for length in lengths], engine.spec)


def _safe_rows(engine: EagerEngine, length: int, steps: int, draw: np.random.Generator) -> Iterator[Row]:
    """Yield random sources of a length that are safe for so many steps, as many as are asked for."""
    special = {engine.spec.pad_id, engine.spec.bos_id, engine.spec.eos_id}
    ordinary = [token for token in range(engine.spec.vocab_size) if token not in special]
    at_once, tried = FEWEST, 0
    while tried < TRIES:
        rows = [row for row in _rows(engine, draw.choice(ordinary, (at_once, length)), steps) if row.safe]
        # Most rows of most models are safe; where they are not, larger batches find one sooner.
        at_once, tried = (FEWEST, 0) if rows else (min(2 * at_once, MOST), tried + at_once)
        yield from rows
    raise ExportFailed(
        f"none of {tried} random sources of length {length} keeps a safe margin between the best and "
        f"the next token for {steps} steps: these weights decide by chance, and parity on them would prove nothing"
    )


def _rows(engine: EagerEngine, source: Tokens, steps: int) -> list[Row]:
    # Only a few numbers of each step's logits are kept: all of them would be half a gigabyte for a base model.
    kept = [
        (one.argmax(-1), one.max(-1), np.abs(one).max((1, 2)), margins_of(one).min(1))
        for one in greedy_calls(engine, source, np.ones_like(source, bool), steps)
    ]
    tokens, best, sizes, margins = zip(*kept, strict=True)
    bounds = NOISE * np.maximum(1.0, np.max(sizes, axis=0))
    columns = np.concatenate(tokens, 1), np.concatenate(best, 1), bounds.tolist(), np.min(margins, axis=0).tolist()
    return [Row(*row) for row in zip(source, *columns, strict=True)]


def _probe(rows: list[Row], spec: ModelSpec) -> Probe:
    mask = np.arange(max(len(row.source) for row in rows)) < np.array([len(row.source) for row in rows])[:, None]
    source = np.full(mask.shape, spec.pad_id)
    source[mask] = np.concatenate([row.source for row in rows])
    return Probe(
        source=source,
        mask=mask,
        tokens=np.stack([row.tokens for row in rows]),
        best=np.stack([row.best for row in rows]),
        bounds=np.array([row.bound for row in rows]),
        margins=np.array([row.margin for row in rows]),
    )
