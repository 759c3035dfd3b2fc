"""A matrix in two parts: its first columns in 8-bit blocks, all others in 4-bit blocks.

Vocabularies are ordered by frequency almost always. So the first columns of an output matrix belong to the tokens that
are chosen most, and the exactness of a few columns is worth more than that of all others.
"""

from dataclasses import dataclass

import numpy as np

from fatdeploy.export.quantize.integers import Blocks, Floats


@dataclass(frozen=True)
class SplitBlocks:
    """A matrix [K, N] whose first columns are in 8-bit blocks (``wide``), and all others in 4-bit blocks."""

    wide: Blocks
    narrow: Blocks

    @property
    def n_wide(self) -> int:
        """How many columns are in 8 bits."""
        return len(self.wide.scales)

    @property
    def nbytes(self) -> int:
        """Their size when they are stored."""
        return self.wide.nbytes + self.narrow.nbytes

    def restored(self) -> Floats:
        """Return the matrix that the integers stand for."""
        return np.concatenate([self.wide.restored(), self.narrow.restored()], 1)


def split_blocks(wide: Blocks, narrow: Blocks, n_wide: int) -> SplitBlocks:
    """Return the first columns of a matrix in 8-bit blocks and the others of the same matrix in 4-bit blocks."""
    return SplitBlocks(wide.columns(slice(n_wide)), narrow.columns(slice(n_wide, None)))
