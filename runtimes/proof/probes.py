"""Compare an engine with what the reference said: tokens step by step, and the logits that chose them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.certificate import Parity
from fatdeploy.errors import BundleError, ParityFailed
from fatdeploy.runtimes.engines.protocol import Engine, Floats, State
from fatdeploy.runtimes.proof.lockstep import greedy_calls
from fatdeploy.spec import Mask, Tokens


@dataclass(frozen=True)
class Probe:
    """A batch of sources and the reference's greedy tokens for it, run on past EOS."""

    source: Tokens  # [B, S]
    mask: Mask  # [B, S]
    tokens: Tokens  # [B, T]
    best: Floats  # [B, T], the logit of each token
    bounds: NDArray[np.float64]  # [B], how far two correct fp32 computations of a row's logits may be apart
    margins: NDArray[np.float64]  # [B], the smallest between the best and the second best logit of a row


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
    except Exception as error:  # zip, zlib, numpy and its reading of Python literals each have errors of their own
        raise BundleError(f"cannot read {path}: {error}; export the bundle again") from error


def _probe(file: Mapping[str, NDArray[Any]], index: int) -> Probe:
    probe = Probe(
        source=file[f"{index}.source"],
        mask=file[f"{index}.mask"],
        tokens=file[f"{index}.tokens"],
        best=file[f"{index}.best"],
        bounds=file[f"{index}.bounds"],
        margins=file[f"{index}.margins"],
    )
    rows, steps = probe.tokens.shape
    expected = [(rows, probe.source.shape[-1])] * 2 + [(rows, steps)] + [(rows,)] * 2
    shapes = [array.shape for array in (probe.source, probe.mask, probe.best, probe.bounds, probe.margins)]
    if shapes != expected or not rows * steps:
        raise ValueError(f"probe {index} has arrays of shapes {shapes} for tokens {(rows, steps)}")
    return probe


def verified(engine: Engine[State], probes: Sequence[Probe], first: Sequence[Floats] = ()) -> Parity:
    """Return how close an engine is to the reference; a token or logit that differs is ParityFailed.

    Every probe is decoded as it is; every row of a batch alone; and the probe with most tokens a second time. ``first``
    are the chosen tokens' logits of a decode of all probes that was compared already.
    """
    chosen = first or [_chosen(engine, f"probe {index}", probe) for index, probe in enumerate(probes)]
    alone = [
        _difference(_chosen(engine, f"probe {index}, row {row} alone", row_alone(probe, row)), row_alone(probe, row))
        for index, probe in enumerate(probes)
        if len(probe.source) > 1
        for row in range(len(probe.source))
    ]
    largest = max(range(len(probes)), key=lambda index: probes[index].tokens.size)
    _check_again(engine, probes[largest], chosen[largest])
    return Parity(
        probes=len(probes),
        rows=sum(len(probe.tokens) for probe in probes),
        tokens=sum(probe.tokens.size for probe in probes),
        different_tokens=len({token for probe in probes for token in probe.tokens.ravel().tolist()}),
        largest_difference=max(_difference(*pair) for pair in zip(chosen, probes, strict=True)),
        largest_difference_alone=max(alone, default=0.0),
        bound=max(float(probe.bounds.max()) for probe in probes),
        smallest_margin=min(float(probe.margins.min()) for probe in probes),
    )


def row_alone(probe: Probe, row: int) -> Probe:
    """Return a row of a batch as a probe of its own, without the padding."""
    only = slice(row, row + 1)
    length = int(probe.mask[row].sum())
    return Probe(
        probe.source[only, :length],
        probe.mask[only, :length],
        probe.tokens[only],
        probe.best[only],
        probe.bounds[only],
        probe.margins[only],
    )


def _difference(chosen: Floats, probe: Probe) -> float:
    return float(np.abs(chosen - probe.best).max())


def _check_again(engine: Engine[State], probe: Probe, first: Floats) -> None:
    _, second = greedy_logits(engine, probe.source, probe.mask, probe.tokens.shape[1])
    if first.tobytes() != second.tobytes():
        raise ParityFailed("the same batch decoded twice gave two answers: something is kept from the first decode")


def _chosen(engine: Engine[State], place: str, probe: Probe) -> Floats:
    """Return the chosen tokens' logits [B, T] of one probe, decoded freely; those that are wrong are ParityFailed."""
    tokens, logits = greedy_logits(engine, probe.source, probe.mask, probe.tokens.shape[1])
    wrong = np.argwhere(tokens != probe.tokens)
    if wrong.size:
        row, step = min(wrong.tolist(), key=lambda place: place[1])
        raise ParityFailed(
            f"{place}, row {row}, step {step}: the reference says token {probe.tokens[row, step]}, "
            f"the engine {tokens[row, step]} (smallest margin of the row {probe.margins[row]:.1e})"
        )
    difference = np.abs(logits - probe.best)
    beyond = difference / probe.bounds[:, None]
    row, step = (int(place) for place in np.unravel_index(beyond.argmax(), beyond.shape))
    if not beyond[row, step] <= 1:
        raise ParityFailed(
            f"{place}, row {row}, step {step}: the logit of token {tokens[row, step]} differs by "
            f"{difference[row, step]:.1e}, more than {probe.bounds[row]:.1e}"
        )
    return logits


def greedy_logits(engine: Engine[State], source: Tokens, mask: Mask, steps: int) -> tuple[Tokens, Floats]:
    """Return greedy tokens [B, T] and their logits; EOS ends nothing, so that every step is compared."""
    columns = [(logits.argmax(-1), logits.max(-1)) for logits in greedy_calls(engine, source, mask, steps)]
    tokens, best = (np.concatenate(column, 1) for column in zip(*columns, strict=True))
    return tokens, best
