"""What is trained on: pairs as tokens, those kept apart for validation, and a digest of all of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fatdeploy.errors import ConfigError, DataError, in_one_line
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.tokenizers import TextCoder
from fatdeploy.export.training.batches import IdPair
from fatdeploy.pairs import MOST_NAMED, Pair, read_pairs

# Without a file of validation pairs, one source in so many is kept apart.
KEPT_APART = 50


@dataclass(frozen=True)
class Parts:
    """Pairs to learn from, and pairs to validate with; no source is in both."""

    train: Sequence[Pair]
    validation: Sequence[Pair]

    @property
    def digest(self) -> str:
        """A hash of all pairs in their order."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for pair in part:
                digest.update(f"{pair.source}\t{pair.target}\n".encode())
            digest.update(b"\0")
        return digest.hexdigest()


def read_parts(train: Path, validation: Path | None) -> Parts:
    """Return the pairs of the files; without one for validation, some sources of the other are kept apart for it."""
    pairs = read_pairs(train)
    if validation is not None:
        apart = read_pairs(validation)
        shared = {pair.source for pair in pairs} & {pair.source for pair in apart}
        if shared:
            named = ", ".join(repr(source) for source in sorted(shared)[:5])
            raise DataError(
                f"{validation}: {len(shared)} of its sources are in {train} too, so it would measure what was "
                f"learned by heart: {named}; remove them from one of the files"
            )
        return Parts(pairs, apart)
    # By a hash of the source: variants of one stay together, and a longer file keeps what a shorter one kept.
    ranked = sorted({pair.source for pair in pairs}, key=lambda source: hashlib.sha1(source.encode()).digest())  # noqa: S324
    if len(ranked) < 2:
        raise DataError(
            f"{train} has only one source, and one must be kept apart for validation: add pairs, or pass --validation"
        )
    apart_sources = set(ranked[: max(1, len(ranked) // KEPT_APART)])
    return Parts(
        [pair for pair in pairs if pair.source not in apart_sources],
        [pair for pair in pairs if pair.source in apart_sources],
    )


def id_pairs(pairs: Sequence[Pair], coder: TextCoder, config: ModelConfig, name: str) -> list[IdPair]:
    """Return pairs as tokens; those that the model has no room for are told together."""
    ids = [IdPair(coder.source_ids(pair.source), coder.target_ids(pair.target)) for pair in pairs]
    # A target is read after BOS or said before EOS: one more position.
    most = {"source": config.max_source, "target": config.max_target - (0 if config.parallel else 1)}
    wrong = [
        f"{side} {getattr(pair, side)[:40]!r} has {len(tokens)} tokens"
        for pair, one in zip(pairs, ids, strict=True)
        for side, tokens in (("source", one.source), ("target", one.target))
        if not 1 <= len(tokens) <= most[side]
    ]
    if wrong:
        named = wrong[:MOST_NAMED] + ([f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else [])
        room = f"a source has 1…{most['source']} tokens and a target 1…{most['target']}"
        raise ConfigError(
            f"{in_one_line(f'{name}: {len(wrong)} texts do not fit', named)}; {room}: remove them, or raise the limits "
            "with --set max_source=N, --set max_target=N"
        )
    return ids
