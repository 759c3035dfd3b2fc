"""A lexical table: the most frequent target tokens, and those that go with each source token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleError
from fatdeploy.manifest import SHORTLIST
from fatdeploy.runtimes.engines.protocol import Ids
from fatdeploy.spec import ModelSpec

ARRAYS = ("frequent", "sources", "starts", "targets")


@dataclass(frozen=True, eq=False)
class LexicalTable:
    """Target tokens of source tokens: those of ``sources[i]`` are ``targets[starts[i] : starts[i + 1]]``.

    With ``copies`` a source token may also be a target token itself, such as a name.
    """

    frequent: Ids  # [f], in order
    sources: Ids  # [n], in order
    starts: Ids  # [n + 1]
    targets: Ids  # [m]
    copies: bool

    def targets_of(self, source: Ids) -> Ids:
        """Return the target tokens of a source's tokens, beyond the frequent ones; some may occur twice."""
        tokens = np.unique(source)
        places = np.searchsorted(self.sources, tokens)
        inside = places < len(self.sources)
        known = places[inside][self.sources[places[inside]] == tokens[inside]].tolist()
        parts = [self.targets[self.starts[place] : self.starts[place + 1]] for place in known]
        return np.concatenate([*parts, tokens if self.copies else tokens[:0]])

    def entries_of(self, token: int) -> Ids:
        """Return the target tokens of one source token, beyond the frequent ones."""
        return np.setdiff1d(self.targets_of(np.array([token])), self.frequent)


def copies_of(spec: ModelSpec) -> bool:
    """Whether a token of a source means the same in a target: both sides share their ids."""
    return spec.n_source_ids == spec.vocab_size


def write_table(path: Path, table: LexicalTable, spec: ModelSpec) -> None:
    """Write a table as plain arrays, compressed, with the smallest integers that take every id."""
    ids = np.min_scalar_type(max(spec.n_source_ids, spec.vocab_size) - 1)
    arrays = {name: getattr(table, name).astype(np.uint32 if name == "starts" else ids) for name in ARRAYS}
    np.savez_compressed(path, allow_pickle=False, **arrays)


def read_table(bundle: Bundle) -> LexicalTable | None:
    """Return the table of a bundle, None if it has none; one that is damaged is a BundleError."""
    if SHORTLIST not in bundle.manifest.files:
        return None
    path = bundle.file(SHORTLIST)
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: _integers(name, file[name]) for name in ARRAYS}
        table = LexicalTable(**arrays, copies=copies_of(bundle.spec))
        _check(table, bundle.spec)
    except Exception as error:  # zip, zlib and numpy each have errors of their own
        raise BundleError(
            f"cannot read {path}: {error}; copy the bundle again, or build its shortlist again: "
            f"fatdeploy shortlist {bundle.path} FILE --force"
        ) from error
    return table


def _integers(name: str, array: NDArray[Any]) -> Ids:
    if array.ndim != 1 or array.dtype.kind != "u":
        raise ValueError(f"{name} must be unsigned integers [n], found {array.dtype} {list(array.shape)}")
    return array.astype(np.int64)


def _check(table: LexicalTable, spec: ModelSpec) -> None:
    """Raise ValueError unless the arrays are a table for the model."""
    limits = {"frequent": spec.vocab_size, "sources": spec.n_source_ids, "targets": spec.vocab_size}
    for name, limit in limits.items():
        ids = getattr(table, name)
        if ids.size and ids.max() >= limit:
            raise ValueError(f"{name} must be ids in 0…{limit - 1}, found {ids.max()}")
        if name != "targets" and (np.diff(ids) <= 0).any():
            raise ValueError(f"{name} must be in order, each once")
    starts = table.starts
    if len(starts) != len(table.sources) + 1:
        raise ValueError(f"starts must be {len(table.sources) + 1} numbers, found {len(starts)}")
    if starts[0] != 0 or starts[-1] != len(table.targets) or (np.diff(starts) < 0).any():
        raise ValueError(f"starts must rise from 0 to {len(table.targets)}")
