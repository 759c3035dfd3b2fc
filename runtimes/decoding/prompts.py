"""What each target begins with: the start token, a prefix of its own, and how many tokens may follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.decoding.bounds import are_ids
from fatdeploy.runtimes.decoding.model_limits import wrong_prefix
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.spec import ModelSpec

PrefixIds = Sequence[int] | NDArray[np.generic]


@dataclass(frozen=True)
class Prompt:
    """The tokens that a target reads first, the start among them, and the most new ones that may follow."""

    tokens: tuple[int, ...]
    limit: int

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that are part of the target."""
        return self.tokens[1:]

    @property
    def end(self) -> int:
        """The number of tokens, from the start on, at which a target is cut."""
        return len(self.tokens) + self.limit


def prompts_of(
    options: DecodeOptions, spec: ModelSpec, prefixes: Sequence[PrefixIds | None] | None, count: int
) -> list[Prompt]:
    """Return a prompt per source; an entry of ``prefixes`` that is None stands for the prefix of the options.

    One ConfigError lists everything that the model cannot do.
    """
    limit = options.limit(spec)
    start = spec.bos_id if options.start_id is None else options.start_id
    shared = Prompt((start, *options.prefix_ids), limit)
    if prefixes is None:
        return [shared] * count
    check_count(prefixes, count)
    # A source's own prefix lowers its limit: the lengths of prefixes differ, and rows must not depend on each other.
    unlimited = replace(options, max_new_tokens=None)
    rows = [None if prefix is None else _listed(prefix) for prefix in prefixes]
    reasons = [
        f"source {index}: {reason}"
        for index, row in enumerate(rows)
        if row is not None
        for reason in reasons_against(row, unlimited, spec)
    ]
    if reasons:
        raise ConfigError(in_one_line("prefixes refused", reasons))
    return [shared if row is None else Prompt((start, *map(int, row)), options.limit_after(row, spec)) for row in rows]


def reasons_against(prefix: PrefixIds, options: DecodeOptions, spec: ModelSpec) -> list[str]:
    """Return why no target of a model can begin with a prefix under the options; empty if it can."""
    ids = _listed(prefix)
    return wrong_prefix(ids, options, spec) if are_ids(ids) else [f"prefix must be token ids, found {ids!r}"]


def check_count(prefixes: object, count: int) -> None:
    """Raise unless there is a list with one prefix per source."""
    if isinstance(prefixes, str) or not isinstance(prefixes, Sequence):
        raise ConfigError(f"prefixes refused: expected a list with one prefix per source, found {prefixes!r}")
    if len(prefixes) != count:
        raise ConfigError(f"prefixes refused: expected one per source, {count} in all, found {len(prefixes)}")


def _listed(prefix: PrefixIds) -> Sequence[int]:
    if isinstance(prefix, np.ndarray):
        ids: list[int] = prefix.tolist()
        return ids
    return prefix
