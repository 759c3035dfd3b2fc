"""What a processor sees: the tokens that each row has read, and the source that the row belongs to."""

from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens

NEG_INF = np.float32(-np.inf)


class History(NamedTuple):
    """The rows of a step. Rows move, leave and join: only this says which source a row belongs to.

    Rows may have different lengths, but only where every processor is ``ragged``. Their tokens begin in the first
    column, and what stands after a row's last token means nothing.
    """

    tokens: Tokens  # [R, n], including BOS
    lengths: NDArray[np.int64]  # [R], how many of these tokens each row has read; n everywhere if rows are equally long
    sources: NDArray[np.int64]  # [R], indices
    chosen: Tokens | None = None  # [R, m], what earlier groups of the source's beams have chosen at this step


class Processor(Protocol):
    """Changes the scores of a step. Rows are independent: the result of one must not depend on another."""

    # Whether it works for rows of different lengths; if not, every length is the number of columns of the tokens.
    ragged: ClassVar[bool]
    # Whether only differences of scores matter to it: a number that is added to all scores of a row before is in all of
    # them afterwards, or in none.
    relative: ClassVar[bool]

    def __call__(self, history: History, scores: Floats) -> Floats:
        """Return scores [R, V] for the rows of a step; may change them in place."""
        ...


@runtime_checkable
class Occasional(Protocol):
    """A processor that leaves the scores of most steps alone."""

    def acts(self, history: History) -> bool:
        """Whether it changes any score of a step."""
        ...


def rectangular(tokens: Tokens, sources: NDArray[np.int64], chosen: Tokens | None = None) -> History:
    """Return the history of rows that have all read the same number of tokens."""
    return History(tokens, np.full(len(tokens), tokens.shape[1]), sources, chosen)
