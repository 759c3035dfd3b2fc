"""Compare an engine with what the reference said: tokens step by step, and the logits that chose them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import BundleError, ParityFailed
from fatdeploy.runtimes.engine import Capacity, Engine, Floats, State, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

# The size of float32 noise in logits, relative to the largest; a margin of ten times it leaves equality no excuse.
NOISE = 1e-5
SAFE_MARGINS = 10


@dataclass(frozen=True)
class Probe:
    """A batch of sources and the reference's greedy tokens for it, run on past EOS."""

    source: Tokens  # [B, S]
    mask: Mask  # [B, S]
    tokens: Tokens  # [B, T]
    best: Floats  # [B, T], the logit of each token
    bounds: NDArray[np.float64]  # [B], how far two correct fp32 computations of a row's logits may be apart
    margins: NDArray[np.float64]  # [B], the smallest between the best and the second best logit of a row


@dataclass(frozen=True)
class Parity:
    """What a comparison found, when nothing was wrong."""

    probes: int
    rows: int
    tokens: int
    largest_difference: float
    bound: float
    smallest_margin: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def write_probes(path: Path, probes: Sequence[Probe]) -> None:
    """Write probes as plain arrays; nothing in the file can be unpickled."""
    arrays = {
        f"{index}.{name}": np.asarray(value)
        for index, probe in enumerate(probes)
        for name, value in asdict(probe).items()
    }
    np.savez(path, allow_pickle=False, **arrays)


def read_probes(path: Path) -> list[Probe]:
    """Return the probes of a bundle."""
    try:
        # Opened here, because numpy leaves a file that is no archive open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            count = 1 + max(int(name.partition(".")[0]) for name in file.files)
            return [_probe(file, index) for index in range(count)]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BundleError(f"cannot read {path}: {error}; export the bundle again") from error


def _probe(file: Mapping[str, NDArray[Any]], index: int) -> Probe:
    return Probe(
        source=file[f"{index}.source"],
        mask=file[f"{index}.mask"],
        tokens=file[f"{index}.tokens"],
        best=file[f"{index}.best"],
        bounds=file[f"{index}.bounds"],
        margins=file[f"{index}.margins"],
    )


def verified(engine: Engine[State], probes: Sequence[Probe]) -> Parity:
    """Return how close an engine is to the reference; a token or logit that differs is ParityFailed."""
    differences = [_compared(engine, index, probe) for index, probe in enumerate(probes)]
    return Parity(
        probes=len(probes),
        rows=sum(len(probe.tokens) for probe in probes),
        tokens=sum(probe.tokens.size for probe in probes),
        largest_difference=max(differences),
        bound=max(float(probe.bounds.max()) for probe in probes),
        smallest_margin=min(float(probe.margins.min()) for probe in probes),
    )


def _compared(engine: Engine[State], index: int, probe: Probe) -> float:
    """Return the largest difference of a chosen logit over one probe, decoded freely."""
    tokens, logits = greedy_logits(engine, probe.source, probe.mask, probe.tokens.shape[1])
    wrong = np.argwhere(tokens != probe.tokens)
    if wrong.size:
        row, step = min(wrong.tolist(), key=lambda place: place[1])
        raise ParityFailed(
            f"probe {index}, row {row}, step {step}: the reference says token {probe.tokens[row, step]}, "
            f"the engine {tokens[row, step]} (smallest margin of the row {probe.margins[row]:.1e})"
        )
    difference = np.abs(logits - probe.best)
    beyond = difference / probe.bounds[:, None]
    row, step = (int(place) for place in np.unravel_index(beyond.argmax(), beyond.shape))
    if not beyond[row, step] <= 1:
        raise ParityFailed(
            f"probe {index}, row {row}, step {step}: the logit of token {tokens[row, step]} differs by "
            f"{difference[row, step]:.1e}, more than {probe.bounds[row]:.1e}"
        )
    return float(difference.max())


def greedy_logits(engine: Engine[State], source: Tokens, mask: Mask, steps: int) -> tuple[Tokens, Floats]:
    """Return greedy tokens [B, T] and their logits; EOS ends nothing, so that every step is compared."""
    spec: ModelSpec = engine.spec
    parallel = spec.decoding == "parallel"
    tokens = np.full((len(source), steps if parallel else 1), spec.bos_id)
    columns = []
    state = engine.encode(source, mask, Capacity(1, steps))
    try:
        for _ in range(1 if parallel else steps):
            tokens, best = _best(engine, tokens, state)
            columns.append((tokens, best))
    finally:
        engine.release(state)
    return np.concatenate([one for one, _ in columns], 1), np.concatenate([one for _, one in columns], 1)


def _best(engine: Engine[State], tokens: Tokens, state: State) -> tuple[Tokens, Floats]:
    logits = engine.step(tokens, state, Want.LOGITS).logits
    if logits is None:
        raise ParityFailed("the engine returned no logits although they were wanted")
    chosen = logits.argmax(-1)
    return chosen, np.take_along_axis(logits, chosen[..., None], -1)[..., 0]
