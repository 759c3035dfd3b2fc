"""What a processor sees: the tokens that each row has read, and the source that the row belongs to."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.spec import Tokens

NEG_INF = np.float32(-np.inf)


class History(NamedTuple):
    """The rows of a step. Rows move and leave: only this says which source a row belongs to."""

    tokens: Tokens  # [R, n], including BOS
    sources: NDArray[np.int64]  # [R], indices
    chosen: Tokens | None = None  # [R, m], what earlier groups of the source's beams have chosen at this step


class Processor(Protocol):
    """Changes the scores of a step. Rows are independent: the result of one must not depend on another."""

    def __call__(self, history: History, scores: Floats) -> Floats:
        """Return scores [R, V] for the rows of a step; may change them in place."""
        ...
