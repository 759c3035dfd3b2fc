"""Probes: random sources whose every step the reference decides so clearly that equality has no excuse."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fatdeploy.errors import ExportFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.cross.decisions import recorded_margins
from fatdeploy.runtimes.engines.protocol import Capacity, Floats
from fatdeploy.runtimes.proof.forced import call_count, first_tokens, step_logits
from fatdeploy.runtimes.proof.lockstep import NOISE, SAFE_MARGINS, margins_of
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import ModelSpec, Tokens

NEW_TOKENS = 48
# Source lengths of each batch; None is the longest that the model takes.
BATCHES: tuple[tuple[int | None, ...], ...] = ((7,), (1, 31, None), (1, 2, 7, 31, 2, 7, 31, 1))
# How many random sources may fail in a row before the weights count as undecided, and the most per try.
TRIES, MOST = 96, 16


@dataclass
class Row:
    """A source, and the reference's decode of it so far."""

    source: Tokens  # [S]
    tokens: list[Tokens] = field(default_factory=list)  # of each call, [t]
    best: list[Floats] = field(default_factory=list)
    largest: float = 1.0  # of all logits by size, but at least 1
    margin: float = np.inf
    decided: float = np.inf  # the smallest margin of a choice inside the model, relative to what decides it

    def add(self, logits: Floats, decided: float) -> None:
        """Take in the logits [t, V] of another call, and the smallest margin of the choices in it."""
        self.decided = min(self.decided, decided)
        self.tokens.append(logits.argmax(-1))
        self.best.append(logits.max(-1))
        self.largest = max(self.largest, float(np.abs(logits).max()))
        self.margin = min(self.margin, float(margins_of(logits).min()))

    @property
    def bound(self) -> float:
        """How far apart two correct fp32 computations of its logits may be."""
        return NOISE * self.largest

    @property
    def safe(self) -> bool:
        """Whether every step is decided by at least ten times the noise; a row that is not safe never becomes so."""
        return self.margin >= SAFE_MARGINS * self.bound and self.decided >= SAFE_MARGINS * NOISE


def drawn_probes(engine: EagerEngine, seed: int = 0) -> list[Probe]:
    """Return padded probes in batches of 1, 3 and 8, of lengths 1 to the longest, and one row to max_target."""
    spec, draw = engine.spec, np.random.default_rng(seed)
    batches = [[min(length or spec.max_source, spec.max_source) for length in batch] for batch in BATCHES]
    rows = _safe_rows(engine, [length for batch in batches for length in batch], min(NEW_TOKENS, spec.max_target), draw)
    longest = _safe_rows(engine, [min(7, spec.max_source)], spec.max_target, draw)
    return [*(_probe([next(rows) for _ in batch], spec) for batch in batches), _probe([*longest], spec)]


def drawn_probe(engine: EagerEngine, lengths: Sequence[int], steps: int, seed: int = 0) -> Probe:
    """Return one batch of random sources of these lengths, safe for ``steps`` steps."""
    return _probe([*_safe_rows(engine, lengths, steps, np.random.default_rng(seed))], engine.spec)


def _safe_rows(engine: EagerEngine, lengths: Sequence[int], steps: int, draw: np.random.Generator) -> Iterator[Row]:
    """Return random sources of these lengths, in this order, that are safe for ``steps`` steps."""
    # A length at a time: padding short sources to the longest would cost most of the time.
    rows = {length: iter(_drawn_rows(engine, length, count, steps, draw)) for length, count in Counter(lengths).items()}
    return (next(rows[length]) for length in lengths)


def _drawn_rows(engine: EagerEngine, length: int, count: int, steps: int, draw: np.random.Generator) -> list[Row]:
    """Return ``count`` safe rows of a length; each try draws as many as are missing, and more after failures."""
    ordinary = engine.spec.ordinary_ids()
    safe: list[Row] = []
    tried = 0
    while len(safe) < count and tried < TRIES:
        at_once = min(max(count - len(safe), tried), MOST)
        rows = _safe_of(engine, draw.choice(ordinary, (at_once, length)), steps)
        tried = 0 if rows else tried + at_once
        safe += rows
    if len(safe) < count:
        raise ExportFailed(
            f"none of {tried} random sources of length {length} keeps a safe margin between the best and "
            f"the next token for {steps} steps: these weights decide by chance, and parity on them would prove nothing"
        )
    return safe


def _safe_of(engine: EagerEngine, source: Tokens, steps: int) -> list[Row]:
    """Return the safe rows of a batch; the others leave it at the step that shows it, often long before the end."""
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, steps))
    tokens = first_tokens(engine.spec, len(source), steps)
    rows = [Row(ids) for ids in source]
    for _ in range(call_count(engine.spec, steps)):
        with recorded_margins() as margins:
            logits = step_logits(engine, tokens, state)
        for row, row_logits, decided in zip(rows, logits, _smallest(margins, len(rows)), strict=True):
            row.add(row_logits, decided)
        kept = [index for index, row in enumerate(rows) if row.safe]
        if not kept:
            return []
        if len(kept) < len(rows):
            engine.reorder(state, np.array(kept))
            rows = [rows[index] for index in kept]
        tokens = np.stack([row.tokens[-1] for row in rows])
    return rows


def _smallest(margins: Sequence[Tensor], n_rows: int) -> list[float]:
    """Return the smallest margin of each row in what a call recorded."""
    smallest: list[float] = torch.stack([torch.full((n_rows,), torch.inf), *margins]).amin(0).tolist()
    return smallest


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
