"""Training data: pairs as tokens, those held out for validation, and a digest of all of it."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fatdeploy.errors import DataError
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.training.batches import IdPair
from fatdeploy.export.training.tokenizers import TextCoder
from fatdeploy.pairs import Pair, error_of_lines, read_pairs

# Without a validation file, about one source in this many is kept apart.
KEPT_APART = 50


@dataclass(frozen=True)
class DataPart:
    """Pairs of a file, and the line number of each."""

    path: Path
    pairs: Sequence[Pair]
    lines: Sequence[int]

    def of(self, sources: set[str], *, inside: bool) -> "DataPart":
        """Return the pairs with a source among these, or with any other."""
        kept = [place for place, pair in enumerate(self.pairs) if (pair.source in sources) == inside]
        return DataPart(self.path, [self.pairs[place] for place in kept], [self.lines[place] for place in kept])


@dataclass(frozen=True)
class Parts:
    """Pairs to learn from, and pairs to validate with; no source is in both."""

    train: DataPart
    validation: DataPart

    @property
    def digest(self) -> str:
        """A hash of all pairs in their order."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for pair in part.pairs:
                digest.update(f"{pair.source}\t{pair.target}\n".encode())
            digest.update(b"\0")
        return digest.hexdigest()


def read_parts(train: Path, validation: Path | None) -> Parts:
    """Return the pairs of the files; without a validation file, some training sources are kept apart for it."""
    if validation is None:
        [part] = _read(train)
        apart_sources = _kept_apart(train, {pair.source for pair in part.pairs})
        return Parts(part.of(apart_sources, inside=False), part.of(apart_sources, inside=True))
    part, apart = _read(train, validation)
    shared = {pair.source for pair in part.pairs} & {pair.source for pair in apart.pairs}
    if shared:
        named = ", ".join(repr(source) for source in sorted(shared)[:5])
        raise DataError(
            f"{validation}: {len(shared)} of its sources are in {train} too, so it would measure "
            f"memorised pairs: {named}; remove them from one of the files"
        )
    return Parts(part, apart)


def _read(*paths: Path) -> list[DataPart]:
    """Return the pairs of files; one error lists everything wrong with any of them."""
    parts, wrong = [], []
    for path in paths:
        try:
            pairs = read_pairs(path)
        except DataError as error:
            wrong.append(error)
        else:
            parts.append(DataPart(path, pairs, range(1, len(pairs) + 1)))
    if wrong:
        raise DataError("; ".join(map(str, wrong))) from wrong[0]
    return parts


def _kept_apart(path: Path, sources: Iterable[str]) -> set[str]:
    """Return the sources for validation: those with a small hash, so that a longer file keeps a shorter one's choice.

    At least one is kept apart, and at least one is left to train on.
    """
    shares = {source: int.from_bytes(hashlib.sha256(source.encode()).digest()[:8]) / 2**64 for source in sources}
    if len(shares) < 2:
        raise DataError(
            f"{path} has only one source, and one must be kept apart for validation: add pairs, or pass --validation"
        )
    count = sum(share < 1 / KEPT_APART for share in shares.values())
    return set(sorted(shares, key=shares.__getitem__)[: min(max(count, 1), len(shares) - 1)])


def ids_of_parts(parts: Parts, coder: TextCoder, config: ModelConfig) -> tuple[list[IdPair], list[IdPair]]:
    """Return both parts as tokens; one error lists all lines that are too long for the model."""
    # Targets end with EOS and the decoder starts with BOS: one more position, unless a head predicts the length.
    most_target = config.max_target - (0 if config.parallel and config.length == "head" else 1)
    both: list[list[IdPair]] = []
    wrong: dict[Path, dict[int, str]] = {}
    for part in (parts.train, parts.validation):
        ids = [IdPair(coder.source_ids(pair.source), coder.target_ids(pair.target)) for pair in part.pairs]
        for line, pair in zip(part.lines, ids, strict=True):
            sides = [("source", len(pair.source), config.max_source), ("target", len(pair.target), most_target)]
            if long := [f"{side} has {count} tokens" for side, count, most in sides if count > most]:
                wrong.setdefault(part.path, {})[line] = f"{' and '.join(long)} at line {line}"
        both.append(ids)
    if wrong:
        limits = f"a source may have {config.max_source} tokens and a target {most_target}"
        raise _too_long(parts, wrong, limits)
    return both[0], both[1]


def _too_long(parts: Parts, wrong: dict[Path, dict[int, str]], limits: str) -> DataError:
    """Return the error that lists long lines in the order of each file."""
    expected = f"{limits} (change the limits with --set max_source=N --set max_target=N)"
    messages = []
    for path, reasons in wrong.items():
        count = sum(len(part.pairs) for part in (parts.train, parts.validation) if part.path == path)
        in_order = [reasons[line] for line in sorted(reasons)]
        messages.append(str(error_of_lines(path, in_order, f"{count} lines", expected)))
    return DataError("; ".join(messages))
