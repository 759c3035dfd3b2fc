"""A table of target tokens by source token that follows from arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fatdeploy.runtimes.engines.protocol import Ids


@dataclass(frozen=True)
class Multiples:
    """A table in which a source token allows its multiples, modulo the vocabulary."""

    frequent: Ids
    size: int = 64

    def targets_of(self, source: Ids) -> Ids:
        return np.unique((source[:, None] * np.arange(1, 9)) % self.size)


TABLE = Multiples(np.array([3, 10, 17]))


def listed(source: Sequence[int], *more: int) -> set[int]:
    """Return what a source may choose."""
    return {*TABLE.targets_of(np.array(source)).tolist(), *TABLE.frequent.tolist(), *more}
