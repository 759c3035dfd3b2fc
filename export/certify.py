"""The parity certificate's probes: sources whose steps are decided so clearly that equality has no excuse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fatdeploy.errors import ExportFailed
from fatdeploy.export.eager import EagerEngine
from fatdeploy.runtimes.engine import Capacity, Floats, Want
from fatdeploy.runtimes.verify import NOISE, SAFE_MARGINS, Probe
from fatdeploy.spec import Mask, ModelSpec, Tokens

NEW_TOKENS = 48
# Source lengths of each batch; None is the longest the model takes.
BATCHES: tuple[tuple[int | None, ...], ...] = ((7,), (1, 31, None), (1, 2, 7, 31, None, 2, 7, 31))
CANDIDATES, ROUNDS = 8, 12


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
    longest = next(_safe_rows(engine, min(7, spec.max_source), spec.max_target, draw, CANDIDATES))
    return [*(_probe([next(safe[length]) for length in batch], spec) for batch in batches), _probe([longest], spec)]


def drawn_probe(engine: EagerEngine, lengths: Sequence[int], steps: int, seed: int = 0) -> Probe:
    """Return one batch of random sources of these lengths, safe for so many steps."""
    draw = np.random.default_rng(seed)
    safe = {length: _safe_rows(engine, length, steps, draw, CANDIDATES) for length in lengths}
    return _probe([next(safe[length]) for length in lengths], engine.spec)


def _safe_rows(
    engine: EagerEngine, length: int, steps: int, draw: np.random.Generator, at_once: int = 2
) -> Iterator[Row]:
    """Yield random sources of a length that are safe for so many steps, as many as are asked for."""
    special = {engine.spec.pad_id, engine.spec.bos_id, engine.spec.eos_id}
    ordinary = [token for token in range(engine.spec.vocab_size) if token not in special]
    failures = 0
    while failures < ROUNDS:
        rows = [row for row in _rows(engine, draw.choice(ordinary, (at_once, length)), steps) if row.safe]
        failures = 0 if rows else failures + 1
        yield from rows
    raise ExportFailed(
        f"none of {ROUNDS * at_once} random sources of length {length} keeps a safe margin between the best and "
        f"the next token for {steps} steps: these weights decide by chance, and parity on them would prove nothing"
    )


def _rows(engine: EagerEngine, source: Tokens, steps: int) -> list[Row]:
    # Only a few numbers of each step's logits are kept: all of them would be half a gigabyte for a base model.
    kept = [
        (one.argmax(-1), one.max(-1), np.abs(one).max((1, 2)), _margins(one).min(1))
        for one in _greedy_steps(engine, source, np.ones_like(source, bool), steps)
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


def _greedy_steps(engine: EagerEngine, source: Tokens, mask: Mask, steps: int) -> Iterator[Floats]:
    """Yield the logits [B, t, V] of each call of a greedy decode that EOS does not end."""
    state = engine.encode(source, mask, Capacity(1, steps))
    parallel = engine.spec.decoding == "parallel"
    tokens = np.full((len(source), steps if parallel else 1), engine.spec.bos_id)
    for _ in range(1 if parallel else steps):
        logits = engine.step(tokens, state, Want.LOGITS).logits
        if logits is None:
            raise ExportFailed("the reference returned no logits")
        yield logits
        tokens = logits.argmax(-1)


def _margins(logits: Floats) -> Floats:
    top: Floats = np.partition(logits, -2, axis=-1)[..., -2:]
    difference: Floats = top[..., 1] - top[..., 0]
    return difference
